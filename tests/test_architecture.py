"""What the source may import, and from where: imports point down, and the core names no engine."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fp8refit"
LAYERS = [
    "_version",
    "errors",
    "tensors",
    "files",
    "correction",
    "guard",
    "live",
    "slots",
    "sharing",
    "fingerprint",
    "names",
    "peft",
    "config",
    "control",
    "caught",
    "calibration",
    "admission",
    "report",
    "vote",
    "layout",
    "sources",
    "transport",
    "pieces",
    "handed",
    "shards",
    "batches",
    "relay",
    "renaming",
    "trainers",
    "gather",
    "megatron",
    "sections",
    "wire",
    "plan",
    "kernels",
    "layers",
    "precision",
    "kv_scales",
    "rows",
    "compare",
    "fill",
    "direct",
    "received",
    "job",
    "target",
    "rank",
    "announcement",
    "receiver",
    "server",
    "reader",
    "sender",
    "broadcast",
    "remote",
    "served",
    "engine",
    "driven",
    "hosted",
    "fleet",
    "refitter",
    "update",
    "broadcaster",
    "push",
    "checkpoint",
    "bench",
    "testing",
    "demo",
    "cli",
    "__main__",
]
"""Low to high. A module imports only from layers below its own, or from its own."""

ENGINES = {"vllm", "sglang", "transformers"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(file: Path) -> str:
    """The first name under the package: a module or a folder of modules."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> set[str]:
    """Every module that `file` imports, at any depth of nesting, by its full name."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "fp8refit"}
    return modules


def test_every_module_has_a_layer():
    assert {layer_of(file) for file in MODULES} - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    layer = layer_of(file)
    if layer == "__init__":
        return
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for module in imported_modules(file):
        package, _, rest = module.partition(".")
        imported = rest.split(".")[0]
        if package == "fp8refit" and imported in LAYERS:
            assert imported in allowed, f"{layer} imports {module}, which lies above it"
        elif module == "fp8refit":
            assert layer in LAYERS[LAYERS.index("demo") :], f"{layer} imports the package's own surface"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_core_names_no_engine(file):
    allowed = {"transformers"} if layer_of(file) == "demo" else set()
    imported = {module.partition(".")[0] for module in imported_modules(file)}
    assert not imported & (ENGINES - allowed)
    adapters = {module for module in imported if module.startswith("fp8refit_")}
    assert not adapters or layer_of(file) == "demo"


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_modules_are_named_for_what_they_hold(file):
    assert file.stem not in {"utils", "util", "helpers", "helper", "common", "misc"}


def test_triton_is_imported_by_its_kernels_alone():
    importers = {
        file.name for file in MODULES if "triton" in {module.partition(".")[0] for module in imported_modules(file)}
    }
    assert importers == {"triton_amax.py", "triton_table.py"}
