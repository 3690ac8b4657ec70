"""The built site in headless Chromium, at two widths: nothing is cut, loaded from elsewhere or dead.

`nox -s pages` builds it and runs this. A driver page shows each page of the site in a frame and sends what it measured.
"""

import json
import os
import queue
import shutil
import subprocess
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urljoin, urlsplit

import pytest

SITE = Path(os.environ.get("FP8REFIT_SITE", ""))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif("FP8REFIT_SITE" not in os.environ, reason="`nox -s pages` builds the site"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
WIDTHS = (1280, 390)
DRIVER = """<!doctype html><iframe id=frame height=900 style="border: 0"></iframe><script>
const frame = document.getElementById("frame");
const show = (page) => new Promise((done) => { frame.onload = done; frame.src = page; });
async function look(page, width) {
  frame.width = width;
  await new Promise((done) => setTimeout(done, 400));
  const view = frame.contentWindow, root = frame.contentDocument;
  const scrolls = (part) => ["auto", "scroll"].includes(view.getComputedStyle(part).overflowX);
  const parts = [...root.querySelectorAll("article pre > code, article table, article img, article p, article li")];
  const is_cut = (part) => {
    let box = part;
    while (box !== root.body && !scrolls(box)) box = box.parentElement;
    if (box !== root.body) return false;
    return part.scrollWidth > part.clientWidth + 1 && view.getComputedStyle(part).overflowX !== "visible"
      || part.getBoundingClientRect().right > width + 1;
  };
  return {
    page, width,
    body: root.documentElement.scrollWidth,
    cut: parts.filter(is_cut).map((part) => part.textContent.slice(0, 80)),
    scrolled: parts.filter((part) => part.matches("pre > code") && part.scrollWidth > part.clientWidth + 1)
      .map((part) => part.textContent.slice(0, 80)),
    loaded: view.performance.getEntriesByType("resource").map((entry) => entry.name),
    ids: [...root.querySelectorAll("[id]")].map((part) => part.id),
    links: [...root.querySelectorAll("a[href], img[src]")].map((part) => part.href || part.src),
    unlinked: [...root.querySelectorAll(".doc-signature span[title]")].map((part) => part.title),
  };
}
(async () => {
  const found = [];
  for (const page of PAGES) {
    frame.width = WIDTHS[0];
    await show(page);
    for (const width of WIDTHS) found.push(await look(page, width));
  }
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    def __init__(self, *arguments, pages, found, **options):
        self._driver = DRIVER.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", json.dumps(pages))
        self._found = found
        super().__init__(*arguments, **options)

    def do_GET(self):
        if self.path != "/driver":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        return self.wfile.write(self._driver.encode())

    def do_POST(self):
        self._found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        """Nothing: tests print enough."""


@contextmanager
def browser(url, profile):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-port=0", url]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def look_at(site, profile):
    """What the browser says of every page at every width."""
    found: queue.Queue = queue.Queue()
    pages = sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    handler = partial(Handler, pages=pages, found=found, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser(f"http://127.0.0.1:{server.server_port}/driver", profile):
            seen = found.get(timeout=500)
        server.shutdown()
    origin = f"http://127.0.0.1:{server.server_port}/"
    return [page | {"origin": origin, "url": urljoin(origin, page["page"])} for page in seen]


def loaded_from_elsewhere(seen):
    return {(page["page"], url) for page in seen for url in page["loaded"] if not url.startswith(page["origin"])}


def dead_links(seen, site):
    ids = {page["url"]: set(page["ids"]) for page in seen}
    dead = set()
    for page in seen:
        for link in page["links"]:
            url, anchor = urldefrag(link)
            if not url.startswith(page["origin"]) or page["page"] == "404.html":
                continue
            file = site / urlsplit(url).path.lstrip("/")
            is_there = file.is_file() or (file / "index.html").is_file()
            if not is_there or (anchor and anchor not in ids.get(url, {anchor})):
                dead.add((page["page"], link))
    return dead


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return look_at(SITE, tmp_path_factory.mktemp("profile"))


def test_no_page_is_wider_than_the_window_and_nothing_is_cut(seen):
    assert len(seen) > 60
    assert [(page["page"], page["width"], page["body"]) for page in seen if page["body"] > page["width"]] == []
    assert [(page["page"], page["width"], page["cut"]) for page in seen if page["cut"]] == []


def test_code_needs_no_scrolling_on_a_wide_window(seen):
    assert [(page["page"], page["scrolled"]) for page in seen if page["width"] == 1280 and page["scrolled"]] == []


def test_nothing_is_loaded_from_elsewhere(seen):
    assert loaded_from_elsewhere(seen) == set()


def test_no_link_is_dead(seen):
    assert dead_links(seen, SITE) == set()


def test_every_type_in_a_signature_is_a_link(seen):
    """Names of modules, of arguments and of values are no types."""
    (reference, *_) = (page for page in seen if page["page"] == "api.html")
    names = {title.rpartition(".")[2] for title in reference["unlinked"] if "(" not in title}
    assert {name for name in names if name[0].isupper() and not name.isupper() and name != "FP8"} == set()


def test_what_is_cut_or_dead_or_elsewhere_is_seen(tmp_path):
    """The tests above see what they say that they see."""
    wide = "<article><pre style='overflow: hidden'><code>" + 400 * "x" + "</code></pre></article>"
    script = "<script src='https://unpkg.com/mermaid/mermaid.js'></script>"
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text(f"<a href='none.html'>x</a><a href='#none'>x</a>{wide}{script}")
    seen = look_at(site, tmp_path / "profile")
    assert all(page["cut"] for page in seen)
    assert {url for _, url in loaded_from_elsewhere(seen)} == {"https://unpkg.com/mermaid/mermaid.js"}
    assert len(dead_links(seen, site)) == 2
