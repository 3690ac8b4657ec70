"""Makes the repository's Markdown a site. mkdocs calls this; see `hooks` in mkdocs.yml.

Links are written for readers of the repository, relative to the file they are in. Here the files at its root become pages,
Python files that a page links to become pages too, and other files that it links to files of the site. Nothing is loaded from
elsewhere: a diagram's picture takes its place.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
"""A relative link's path, without its anchor."""
MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
PICTURE = "![What a refit does](docs/figures/pipeline.svg)"
"""Of the README's diagram: `python benchmarks/render_picture.py`."""
SOURCE = """---
search:
  exclude: true
hide: [navigation, toc]
---
# {name}

````python
{code}````
"""
PYTHON, TORCH = "https://docs.python.org/3/library", "https://docs.pytorch.org/docs/stable"
MODULES = {
    "collections.abc": ("Callable", "Collection", "Coroutine", "Iterable", "Iterator", "Mapping", "Sequence"),
    "contextlib": ("AbstractContextManager",),
    "dataclasses": ("field",),
    "pathlib": ("Path",),
    "types": ("MappingProxyType",),
    "typing": ("Annotated", "Any", "Literal", "Never", "Self", "TypeAlias", "TypeVar", "Unpack"),
}
TYPES = {
    **{name: f"{PYTHON}/functions.html#{name}" for name in ("bool", "float", "int", "object", "type")},
    **{
        name: f"{PYTHON}/stdtypes.html#{name}" for name in ("bytes", "dict", "frozenset", "list", "set", "str", "tuple")
    },
    **{name: f"{PYTHON}/exceptions.html#{name}" for name in ("BaseException", "KeyboardInterrupt")},
    **{f"{part}.{name}": f"{PYTHON}/{part}.html#{part}.{name}" for part, names in MODULES.items() for name in names},
    **{f"torch.{name}": f"{TORCH}/tensor_attributes.html#torch.{name}" for name in ("device", "dtype")},
    "torch.Size": f"{TORCH}/size.html#torch.Size",
    "torch.Tensor": f"{TORCH}/tensors.html#torch.Tensor",
    "torch.nn.Module": f"{TORCH}/generated/torch.nn.Module.html",
    "torch.distributed.ProcessGroup": f"{TORCH}/distributed.html#torch.distributed.ProcessGroup",
    "torch.float32": f"{TORCH}/tensor_attributes.html#torch.dtype",
    "pydantic.PlainValidator": "https://docs.pydantic.dev/latest/api/functional_validators/",
    "pydantic.Field": "https://docs.pydantic.dev/latest/api/fields/#pydantic.fields.Field",
}
"""What signatures name that is not ours, and where it is described."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root, and every source file that a page links to."""
    for origin, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text()))
    linked = {target for file in files.documentation_pages() for target in _links_of(file.src_uri, file.content_string)}
    for target in sorted(linked):
        path = ROOT / target
        if not path.is_file() or target in ROOT_PAGES or target.startswith("docs/"):
            continue
        if path.suffix == ".py":
            page = SOURCE.format(name=target, code=path.read_text())
            files.append(File.generated(config, f"{target}.md", content=page, inclusion=InclusionLevel.NOT_IN_NAV))
        else:
            files.append(File.generated(config, f"source/{target}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at where the site has what they lead to."""
    if page.file.src_uri.endswith(".py.md"):
        return markdown
    origin = _origin_of(page.file.src_uri)

    def point(link: re.Match[str]) -> str:
        target = _target_of(origin, link[0])
        if target in ROOT_PAGES:
            return ROOT_PAGES[target]
        if target.startswith("docs/"):
            return target.removeprefix("docs/")
        return f"{target}.md" if target.endswith(".py") else f"source/{target}"

    return LINK.sub(point, MERMAID.sub(PICTURE, markdown))


def on_env(env: Any, config: Any, **_: Any) -> Any:
    """Let signatures link to what others describe."""
    for name, url in TYPES.items():
        config.plugins["autorefs"].register_url(name, url)
    return env


def _links_of(src_uri: str, markdown: str) -> list[str]:
    return [_target_of(_origin_of(src_uri), link) for link in LINK.findall(markdown)]


def _origin_of(src_uri: str) -> str:
    """Where the repository keeps a page. All pages of the site are in one folder."""
    at_root = {page: origin for origin, page in ROOT_PAGES.items()}
    return at_root.get(src_uri, f"docs/{src_uri}")


def _target_of(origin: str, link: str) -> str:
    """The file of the repository that a link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
