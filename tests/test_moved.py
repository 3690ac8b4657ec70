"""Old import paths: each works in every form of import, warns once, and names the new path and the release."""

import subprocess
import sys
from importlib import import_module

import pytest

from fp8refit.moved import MOVED, REMOVED_IN

NAMES = {
    "fp8refit.correction": "importance_weights",
    "fp8refit.megatron": "MegatronNames",
    "fp8refit.peft": "merged",
    "fp8refit.precision": "unify",
    "fp8refit.live.tracing.inventory": "inventory_of",
    "fp8refit.live.tracing.proof": "with_proof",
    "fp8refit.live.tracing.reading": "read_inventory",
    "fp8refit.live.tracing.rules": "KernelRules",
    "fp8refit.live.tracing.twin": "trace_twin",
    "fp8refit.remote.channel": "Channel",
}
FORMS = [
    "from {old} import {name} as found",
    "import {old}; found = {old}.{name}",
    "import {old} as module; found = module.{name}",
    "from {parent} import {leaf} as module; found = module.{name}",
]


def test_every_module_that_moved_is_tried():
    assert {*NAMES, "fp8refit.live.tracing"} == {*MOVED}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("old", NAMES)
def test_an_old_path_works_and_warns(old, form):
    parent, _, leaf = old.rpartition(".")
    found = {}
    with pytest.warns(DeprecationWarning) as warned:
        exec(form.format(old=old, name=NAMES[old], parent=parent, leaf=leaf), found)
    assert found["found"] is getattr(import_module(MOVED[old]), NAMES[old])
    (only,) = warned
    assert str(only.message) == f"{old} moved to {MOVED[old]}; the old path goes with fp8refit {REMOVED_IN}"
    assert only.filename == "<string>"


@pytest.mark.parametrize("old", NAMES)
def test_an_old_path_has_no_other_names(old):
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        exec(f"from {old} import nothing_of_this_name")


def test_looking_at_all_modules_neither_warns_nor_imports():
    looks = """
import inspect, sys, warnings
import fp8refit
warnings.simplefilter("error")
inspect.getmodule(inspect.currentframe())
assert [name for name in sys.modules if name.startswith("fp8refit.training")] == []
"""
    subprocess.run([sys.executable, "-c", looks], check=True)
