"""The documentation leads nowhere that is not there, and names what the code has."""

import ast
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import typer.main

import fp8refit
from fp8refit.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MAX_README_WORDS = 900


def prose_of(page: Path) -> str:
    """Without blocks of code."""
    return FENCE.sub("", page.read_text())


def code_of(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text()) if name == language]


def anchors_of(page: Path) -> set[str]:
    """Of headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links_of(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose_of(page))


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(name):
    page, dead = ROOT / name, []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else page
        if not target.is_file() or (anchor and anchor not in anchors_of(target)):
            dead.append(link)
    assert not dead


def test_dead_links_are_seen():
    """The test above reads what it says that it reads."""
    assert "docs/measured.md" in links_of(ROOT / "README.md")
    assert "refits-that-fail" not in anchors_of(DOCS / "servers.md")
    assert "who-may-refit-a-server" in anchors_of(DOCS / "servers.md")


def test_every_page_is_in_the_sites_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert {page.name for page in DOCS.glob("*.md")} <= set(re.findall(r": (\S+\.md)", navigation))


def test_every_example_is_linked():
    linked = {posixpath.basename(link) for page in PAGES for link in links_of(page) if "examples/" in link}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} <= linked


def test_code_names_no_way_to_install_that_the_readme_does_not():
    """No package index has us."""
    code = [*(ROOT / "fp8refit").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    hints = {hint for file in code for hint in re.findall(r"pip install [^ `]+", file.read_text())}
    extras = re.findall(r"\[\w+\]", (ROOT / "README.md").read_text())
    known = {f"pip install '.{extra}'" for extra in [*extras, "[{extra}]"]}
    assert hints and hints <= known


def test_the_readme_is_short():
    words = (ROOT / "README.md").read_text().split()
    assert sum(any(map(str.isalnum, word)) for word in words) <= MAX_README_WORDS  # not the lines of tables


@pytest.mark.parametrize("session", ["demo", "tests"])
def test_the_readmes_two_commands_are_sessions_that_nox_has(session):
    (commands, *_) = code_of(ROOT / "README.md", "bash")
    assert f"nox -s {session}" in commands
    assert re.search(rf"^def {session}\(session: nox.Session\)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_python(name):
    for code in code_of(ROOT / name, "python"):
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("name", NAMES)
def test_what_examples_import_from_fp8refit_is_there(name):
    imports = [node for code in code_of(ROOT / name, "python") for node in ast.walk(ast.parse(code))]
    taken = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module == "fp8refit"]
    assert all(hasattr(fp8refit, alias.name) for node in taken for alias in node.names if alias.name != "correction")
    used = (node for node in imports if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "fp8refit")
    assert all(hasattr(fp8refit, node.attr) for node in used)


def commands_of(page: Path) -> Iterator[list[str]]:
    """Every call of our command line in the page's shell code."""
    for line in "".join(code_of(page, "bash")).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if "fp8refit" in words[:3] and "nox" not in words:
            yield words[words.index("fp8refit") + 1 :]


@pytest.mark.parametrize("words", chain.from_iterable(map(commands_of, PAGES)), ids=" ".join)
def test_commands_and_their_options_are_there(words):
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands
        command, words = command.commands[words[0]], words[1:]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


REFERENCE = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)


def test_every_public_name_is_in_the_reference():
    errors = {name for name in fp8refit.__all__ if name.endswith("Error")}
    assert "fp8refit.errors" in REFERENCE
    assert {f"fp8refit.{name}" for name in fp8refit.__all__} - {f"fp8refit.{name}" for name in errors} <= {
        *REFERENCE,
        "fp8refit.__version__",
    }


def test_every_error_has_its_row_in_troubleshooting():
    errors = {name for name in fp8refit.__all__ if name.endswith("Error")} - {"RefitError"}
    assert set(re.findall(r"^\| `(\w+Error)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)) == errors


def test_the_structures_rows_are_the_layers_that_imports_follow():
    """Every package and module of the root, once, lowest first."""
    listed = prose_of(DOCS / "structure.md").partition("## What is where")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in listed.splitlines() if line.startswith("| ")][2:]
    found = [[name.rstrip("/") for name in re.findall(r"`([\w/]+)`", row)] for row in rows]
    (layers,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "tests" / "test_architecture.py").read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS"
    )
    assert found == layers


def test_files_that_the_walk_names_are_there():
    walk = prose_of(DOCS / "structure.md").partition("## What is where")[0]
    files = set(re.findall(r"`([\w/]+\.py)`", walk)) - {"layout.py", "twin.py", "naming.py"}  # an adapter's
    assert len(files) > 15
    assert all((Path(fp8refit.__file__).parent / file).is_file() for file in files)


def test_the_newest_versions_changes_are_told():
    """A version that was given out has its heading."""
    version = fp8refit.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings and headings[0] in {"Unreleased", version}


def test_the_site_is_built_with_pinned_tools():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert all("==" in requirement for requirement in groups["docs"])
