"""Makes the repository's Markdown a site. mkdocs calls this; see `hooks` in mkdocs.yml.

Links are written for readers of the repository, relative to the file they are in. Here the files at its root become pages,
and source files that a page links to become files of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
"""A relative link's path, without its anchor."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, and every source file that a page links to."""
    for origin, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    linked = {target for file in files.documentation_pages() for target in _links_of(file.src_uri, file.content_string)}
    for target in sorted(linked):
        path = ROOT / target
        if path.is_file() and target not in ROOT_PAGES and not target.startswith("docs/"):
            files.append(File.generated(config, f"source/{target}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at where the site has what they lead to."""
    origin = _origin_of(page.file.src_uri)

    def point(link: re.Match[str]) -> str:
        target = _target_of(origin, link[0])
        if target in ROOT_PAGES:
            return ROOT_PAGES[target]
        return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"

    return LINK.sub(point, markdown)


def _links_of(src_uri: str, markdown: str) -> list[str]:
    return [_target_of(_origin_of(src_uri), link) for link in LINK.findall(markdown)]


def _origin_of(src_uri: str) -> str:
    """Where the repository keeps a page. All pages of the site are in one folder."""
    at_root = {page: origin for origin, page in ROOT_PAGES.items()}
    return at_root.get(src_uri, f"docs/{src_uri}")


def _target_of(origin: str, link: str) -> str:
    """The file of the repository that a link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
