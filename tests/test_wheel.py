"""What is released works: the wheel has every file, and in a clean environment it is found, typed and refits an engine."""

import json
import tarfile
import tomllib
import zipfile

import pytest

import fp8refit
from tests.clean_install import ROOT, CleanInstall, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [ROOT / path for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
LOOK = """
import importlib.metadata as metadata, json
found = {}
for group in json.loads(input()):
    for point in metadata.entry_points(group=group):
        if point.dist.name == "fp8refit":
            found.setdefault(group, {})[point.name] = point.value
loaded = [point.load().__module__ for point in metadata.entry_points(group="fp8refit.engines")]
import fp8refit, sys
print(json.dumps({
    "points": found, "files": [sys.modules[name].__file__ for name in ("fp8refit", *loaded)],
    "version": metadata.version("fp8refit"), "engines": sorted(loaded),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return CleanInstall.of(wheel, tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def seen(installed):
    """What the clean environment's Python sees."""
    groups = json.dumps(list(PROJECT["project"]["entry-points"]))
    return json.loads(installed.run("python", "-c", LOOK.replace("input()", repr(groups))))


def source_files():
    for package in PACKAGES:
        for file in package.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield str(file.relative_to(package.parent))


def test_no_file_is_missing_from_the_wheel_and_none_is_too_many(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(source_files())


def test_every_package_of_the_wheel_says_that_it_is_typed(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert all(f"{package.name}/py.typed" in names for package in PACKAGES)


def test_the_wheel_has_the_license_and_the_readme(wheel):
    files = zipfile.ZipFile(wheel)
    (info,) = {name.partition("/")[0] for name in files.namelist() if ".dist-info/" in name}
    assert files.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert files.read(f"{info}/METADATA").decode().endswith((ROOT / "README.md").read_text())


def test_the_source_distribution_has_all_that_its_tests_and_pages_read(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as built:
        there = {name.partition("/")[2] for name in built.getnames()}
    folders = ("fp8refit", "adapters", "tests", "examples", "benchmarks", "docs")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file())
    needed = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    needed |= {file.name for file in ROOT.glob("*.md")} | {"mkdocs.yml", "noxfile.py", "pyproject.toml", "LICENSE"}
    assert not needed - there


def test_nothing_of_fp8refit_comes_from_anywhere_but_the_wheel(installed, seen):
    assert len(seen["files"]) == 4
    assert all(file.startswith(str(installed.site_packages)) for file in seen["files"])


def test_the_wheels_version_is_the_packages(seen):
    assert seen["version"] == fp8refit.__version__


def test_every_entry_point_is_found(seen):
    assert seen["points"] == PROJECT["project"]["entry-points"]


def test_every_adapter_is_imported_with_or_without_its_engine(seen):
    assert [name.partition(".")[0] for name in seen["engines"]] == [
        "fp8refit_sglang",
        "fp8refit_transformers",
        "fp8refit_vllm",
    ]


def test_the_command_line_is_there(installed):
    assert installed.run("fp8refit", "--version").split()[-1] == fp8refit.__version__


def test_it_refits_an_engine(installed):
    said = installed.run("python", ROOT / "examples" / "transformers_loop.py")
    assert [line.partition(":")[0] for line in said.splitlines()] == ["version 1", "version 2", "version 3"]
