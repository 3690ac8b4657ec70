"""Engines and ranks that are actors of Ray. What is and is not real here: `conftest.py`, and of the ranks `ray_platform.py`."""

import importlib.util
import json

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.timeout(560),
]


def test_the_example_prints_what_both_engines_say_of_every_version(run_engine, tmp_path):
    found = run_engine("ray", within_s=520, work=tmp_path)
    assert found["code"] == 0, found["log"]
    lines = [line for line in found["lines"] if line.startswith("version")]
    versions, said = zip(*(line.split(": rollouts ") for line in lines), strict=True)
    assert versions == ("version 1", "version 2", "version 3")
    for rollouts in map(json.loads, said):
        assert rollouts[0] == rollouts[1] and len(rollouts[0]) == 8


@pytest.fixture(scope="module")
def ranks(run_engine, tmp_path_factory):
    """What an engine says and holds whose two ranks are actors: vLLM's Ray executor."""
    return run_engine("ray executor", work=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("way", ["broadcast", "new"])
def test_ranks_that_ray_places_hold_and_say_what_those_of_a_fresh_engine_do(way, ranks, layout_runs):
    (fresh,) = (driver["fresh"] for driver in layout_runs.fresh("tensor parallel").drivers)
    assert ranks[way]["live"] == fresh["live"]
    assert ranks[way]["outputs"] == fresh["outputs"]


def test_a_policy_comes_back_to_ranks_that_ray_places(ranks):
    assert ranks["again"] == ranks["old"]
    assert ranks["again"]["live"] != ranks["new"]["live"]


def test_nan_leaves_ranks_that_ray_places_refusing(ranks):
    assert ranks["nan"]["error"] == "NonFiniteError"
    assert ranks["dirty"]["generate"]["error"] == "EngineDirtyError"
