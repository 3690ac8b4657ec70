"""Every fault can be planted into the code as it is now. That its finder finds it, `nox -s planted` shows."""

import ast
import importlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = sorted(file.stem for file in HERE.glob("faults_*.py"))
FAULTS = [fault for module in MODULES for fault in importlib.import_module(f"tests.planted.{module}").FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_code(fault):
    source = (ROOT / fault.path).read_text()
    planted = fault.planted(source)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
    finder = fault.found_by.split()[0].partition("::")[0]
    assert (ROOT / finder).is_file()


def test_faults_have_names_of_their_own():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
