"""Engines in actors of Ray, refitted by a trainer in another one. What is and is not real here: `conftest.py`."""

import importlib.util
import json

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.timeout(200),
]


def test_the_example_prints_what_both_engines_say_of_every_version(run_engine, tmp_path):
    found = run_engine("ray", work=tmp_path)
    assert found["code"] == 0, found["log"]
    lines = [line for line in found["lines"] if line.startswith("version")]
    versions, said = zip(*(line.split(": rollouts ") for line in lines), strict=True)
    assert versions == ("version 1", "version 2", "version 3")
    for rollouts in map(json.loads, said):
        assert rollouts[0] == rollouts[1] and len(rollouts[0]) == 8
