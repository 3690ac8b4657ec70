"""What must come of `adapters.py`. The tests of an engine import these, and have the fixture `runs`: what an engine found whose
adapter was `refitted`, and a `fresh` one that loads the same from files.
"""

import pytest

ADAPTER = "lora.one.model.layers.1.mlp.down_proj.lora_B.weight"
WRONG = {
    "NaN": ("NonFiniteError", [ADAPTER, "Nothing was written"]),
    "missing": ("InvalidSourceError", [ADAPTER, "missing", "send every matrix"]),
    "unknown": ("InvalidSourceError", ["layers.0.self_attn.k_proj.lora_A", "no such matrix", "leave it out"]),
    "a weight": ("InvalidSourceError", ["layers.0.self_attn.q_proj.weight", "no such matrix"]),
    "rank": ("InvalidSourceError", [ADAPTER, "[256, 8]", "[256, 4]", "load an adapter of this shape"]),
    "twice": ("InvalidSourceError", ["q_proj.lora_A.weight", "send one of them"]),
    "unknown adapter": ("UnsupportedEngineError", ["'nobody'", "one, two", "Load it first"]),
    "whole config": ("InvalidOptionError", ["lora_alpha", "model.peft_config[name]"]),
}


def test_a_refitted_adapter_equals_one_that_a_fresh_engine_loads(runs):
    """Stacked bytes and weights on every rank; tokens and log-probabilities with it, with another adapter, and without."""
    assert runs.refitted["new"] == runs.fresh["new"]
    before, new = runs.refitted["before"], runs.refitted["new"]
    assert before["live"] == new["live"]
    assert all(one != other for one, other in zip(before["adapters"], new["adapters"], strict=True))
    assert before["said"]["one"] != new["said"]["one"]
    assert {name: before["said"][name] == new["said"][name] for name in ("two", "None")} == {"two": True, "None": True}


def test_it_may_come_from_a_file(runs):
    assert runs.refitted["from_file"] == runs.fresh["new"]


def test_a_refit_of_an_adapter_is_a_version_and_drops_the_prefix_cache(runs):
    assert runs.refitted["versions"] == [2, 3]
    assert runs.refitted["cached"] == 0


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong, runs):
    error, names = WRONG[wrong]
    found = runs.refitted["wrong"][wrong]
    assert found["error"] == error
    assert [name for name in names if name not in found["message"]] == []


def test_nothing_is_written_of_what_is_refused(runs):
    assert runs.refitted["after_wrong"] == runs.refitted["new"]
    assert not runs.refitted["dirty_after_wrong"]


@pytest.mark.parametrize(("what", "incomplete"), [("adapter", "lora.one."), ("weights", "model.norm.weight")])
def test_a_write_that_fails_leaves_the_engine_dirty_until_the_same_is_refitted(what, incomplete, runs):
    found = runs.refitted["torn"][what]
    assert "injected" in found["failed"]["message"] and found["dirty"]
    assert found["asked"]["error"] == "EngineDirtyError"
    assert found["wrong"]["error"] == "InvalidSourceError"
    assert incomplete in found["wrong"]["message"] and "a failed refit has overwritten it" in found["wrong"]["message"]
    assert found["state"] == runs.fresh["new"] and not found["dirty_after"]
