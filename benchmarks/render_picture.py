"""Draws docs/figures/pipeline.svg from the mermaid block in README.md. The site shows it in place of mermaid's own script.

npm pack mermaid@11 && tar xzf mermaid-*.tgz && python benchmarks/render_picture.py package/dist/mermaid.min.js

Needs Chromium. The picture keeps a digest of what it was drawn from.
"""

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "figures" / "pipeline.svg"
COLOURS = {"primaryColor": "#e8eaf6", "primaryTextColor": "#1a1a1a", "primaryBorderColor": "#7986cb"}
COLOURS |= {"lineColor": "#8a8fa3", "edgeLabelBackground": "#fff8e1", "fontFamily": "sans-serif", "fontSize": "15px"}
"""They can be read on light pages and on dark ones."""
OPTIONS = {
    "startOnLoad": False,
    "theme": "base",
    "themeVariables": COLOURS,
    "htmlLabels": False,
    "deterministicIds": True,
}
OPTIONS |= {"themeCSS": ".edgeLabel .background { opacity: 1; }"}
OPTIONS |= {"flowchart": {"wrappingWidth": 320, "nodeSpacing": 40, "rankSpacing": 35}}
PAGE = """<pre id="drawn"></pre><script src="{script}"></script><script>
mermaid.initialize({options});
mermaid.render("pipeline", {source}).then(({{svg}}) => document.getElementById("drawn").textContent = btoa(svg));
</script>"""


def read_source() -> str:
    """The README's diagram."""
    (source,) = re.findall(r"^```mermaid\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return source


def digest_of(source: str) -> str:
    """What the picture says of its source."""
    return f"<!-- {hashlib.sha256(source.encode()).hexdigest()} -->"


def main(script: Path) -> None:
    """Draw it in a headless browser."""
    source = read_source()
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(
            PAGE.format(script=script.resolve().as_uri(), options=json.dumps(OPTIONS), source=json.dumps(source))
        )
        command = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={folder}", "--virtual-time-budget=20000"]
        dumped = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True)
    (drawn,) = re.findall(r'id="drawn">(.+?)<', dumped.stdout)
    svg = re.sub(r'width="100%"(.+?max-width: )(\d+)', r'width="\2"\1\2', base64.b64decode(drawn).decode(), count=1)
    PICTURE.write_text(f"{svg}\n{digest_of(source)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
