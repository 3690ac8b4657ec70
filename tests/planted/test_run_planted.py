"""The runner of planted faults, on a project of three files: what it calls found, missed and broken."""

import json
import subprocess
import sys

import pytest

from tests.planted import run_planted
from tests.planted.fault import Fault

OF_TWO = "tests/test_code.py::test_of_two"
CODE = "def double(number):\n    return 2 * number\n"
FINDER = """
import os
from fp8refit.code import {name}

def test_double():
    assert double(3) == 6 or os.kill(os.getpid(), 9 if double(3) == 9 else 0)

def test_of_two():
    assert double(2) == 4
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    files = {
        "fp8refit/__init__.py": "",
        "fp8refit/code.py": CODE,
        "adapters/fp8refit_vllm/__init__.py": "",
        "tests/test_code.py": FINDER.format(name="double"),
        "tests/test_broken.py": FINDER.format(name="no_such_name"),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(run_planted, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of the time
    return tmp_path


def fault(name, after, *, finder="tests/test_code.py", before="2 * number", **options):
    return Fault(name=name, at="fp8refit/code.py::double", before=before, after=after, found_by=finder, **options)


EXPECTED = [
    (fault("a sum", "number + 1"), "found", "FAILED tests/test_code.py::test_double"),
    (fault("right for the number of its finder", "number ** 2", finder=OF_TWO), "missed", "exit code 0"),
    (fault("a crash", "3 * number"), "missed", "exit code -9"),
    (fault("a crash that is known", "3 * number", crashes=True), "found", "exit code -9"),
    (fault("not in the code", "1", before="4 * number"), "broken", "stands 0 times"),
    (fault("its finder never passes", "number + 1", finder="tests/test_broken.py"), "broken", "without the fault"),
]


def test_a_fault_is_found_if_its_finder_fails_with_it_alone(project, monkeypatch):
    out = project / "out.json"
    monkeypatch.setattr(run_planted, "FAULTS", [planted for planted, _, _ in EXPECTED])
    for only, code in (("a sum", 0), ("c", 1), ("e", 1)):  # what is not planted now stays in the file
        monkeypatch.setattr(sys, "argv", ["run_planted", "--only", only, "--out", str(out)])
        assert run_planted.main() == code
    written = {entry["name"]: entry for entry in json.loads(out.read_text())["faults"]}
    for planted, outcome, detail in EXPECTED:
        assert written[planted.name]["outcome"] == outcome, written[planted.name]
        assert detail in written[planted.name]["detail"]
    assert json.loads(out.read_text())["num_found"] == 2
    assert (project / "fp8refit" / "code.py").read_text() == CODE
