"""The lock of the tools for development."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
LOCKED = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "tests/tools-lock.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("group", [each["include-group"] for each in GROUPS["tools"]])
def test_it_has_a_version_of_every_tool_that_pyproject_allows(group):
    wanted = {each.name: each.specifier for each in map(Requirement, GROUPS[group])}
    assert wanted.keys() <= LOCKED.keys()
    assert [name for name, specifier in wanted.items() if not specifier.contains(LOCKED[name])] == []
