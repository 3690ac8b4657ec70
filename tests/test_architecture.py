"""What the source may import, and from where: imports point down, and the core names no engine."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fp8refit"
LAYERS = [
    ["errors", "config", "report", "moved"],
    ["live"],
    ["kernels"],
    ["tracing"],
    ["transport/memory", "transport", "transport/collective"],
    ["sources", "sources/sharded"],
    ["training/precision", "training"],
    ["fill"],
    ["ranks/kv", "ranks"],
    ["remote/protocol", "remote/host", "remote/broadcast", "remote", "remote/servers"],
    ["driver"],
    ["checkpoint"],
    ["bench", "testing"],
    ["cli/demo", "cli", "__main__"],
]
"""Low to high: packages, and modules of the root. One imports from itself and from what comes before it."""
FLAT = [room for layer in LAYERS for room in layer]
SURFACE = {"cli/demo", "cli", "__main__"}
"""May import the package's own surface, as users do. The others may only ask it for the version."""

ENGINES = {"vllm", "sglang", "transformers"}
MODULES = sorted(PACKAGE.rglob("*.py"))
FILES = [file for file in MODULES if file != PACKAGE / "__init__.py"]


def room_of(module: str) -> str:
    """The innermost package, or module of the root, that a path under the package is in."""
    parts = module.split("/")
    inside = ["/".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((name for name in inside if name in FLAT), parts[0])


def room_of_file(file: Path) -> str:
    return room_of(str(file.relative_to(PACKAGE).with_suffix("")))


def imported_modules(file: Path) -> set[str]:
    """Every module that `file` imports, at any depth of nesting, by its full name."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def test_every_module_has_a_layer():
    assert {room_of_file(file) for file in FILES} == set(FLAT)


def test_every_folder_is_one_floor():
    floors = [{room.partition("/")[0] for room in layer} for layer in LAYERS]
    assert sum(map(len, floors)) == len(set().union(*floors))


def test_every_package_says_what_it_is_for():
    packages = [file for file in FILES if file.name == "__init__.py"]
    assert [file for file in packages if not ast.get_docstring(ast.parse(file.read_text()))] == []


def test_the_root_holds_the_public_face_and_packages():
    assert len([entry for entry in PACKAGE.iterdir() if entry.name != "__pycache__"]) <= 21


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    room = room_of_file(file)
    allowed = FLAT[: FLAT.index(room) + 1]
    surface = {"fp8refit.__version__"}
    for module in imported_modules(file):
        package, _, rest = module.partition(".")
        imported = room_of(rest.replace(".", "/"))
        if package == "fp8refit" and imported in FLAT:
            assert imported in allowed, f"{room} imports {module}, which lies above it"
        elif package == "fp8refit" and rest:
            assert room in SURFACE or module in surface, f"{room} imports {module}, the package's own surface"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_core_names_no_engine(file):
    allowed = {"transformers"} if room_of_file(file) == "cli/demo" else set()
    imported = {module.partition(".")[0] for module in imported_modules(file)}
    assert not imported & (ENGINES - allowed)
    adapters = {module for module in imported if module.startswith("fp8refit_")}
    assert not adapters or room_of_file(file) == "cli/demo"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_are_named_for_what_they_hold(file):
    assert file.stem not in {"utils", "util", "helpers", "helper", "common", "misc"}


def test_triton_is_imported_by_its_kernels_alone():
    importers = {
        file.name for file in MODULES if "triton" in {module.partition(".")[0] for module in imported_modules(file)}
    }
    assert importers == {
        "triton_amax.py",
        "triton_groups.py",
        "triton_merge.py",
        "triton_launch.py",
        "triton_levels.py",
        "triton_parts.py",
        "triton_products.py",
    }
