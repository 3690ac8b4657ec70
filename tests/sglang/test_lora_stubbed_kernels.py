"""SGLang engines that serve LoRA adapters, with stubbed kernels. A refit reaches the base weights under the wrappers, and no
adapter; one of an adapter reaches it, and nothing else. Fresh engines load the same from files.

What is and is not real here: `conftest.py`, `cpu_lora.py`.
"""

from types import SimpleNamespace

import pytest

from tests.engines.adapter_tests import *  # noqa: F403 - tests

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

FAMILIES = {"qwen2": 1, "qwen2_wide": 2}
"""Tied, with biases; and numbers of ranks."""


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request, run_engine):
    """An engine whose adapter was refitted, and a fresh one."""
    found = run_engine("adapters", family=request.param, num_ranks=FAMILIES[request.param])
    return SimpleNamespace(**found, num_ranks=FAMILIES[request.param])


def test_base_weights_under_the_wrappers_have_the_checkpoints_names(runs):
    assert "model.layers.0.self_attn.qkv_proj.base_layer.weight_scale_inv" in runs.refitted["new"]["live"][0]
    names = [slot["name"] for slot in runs.refitted["layout"]["slots"]]
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("base_layer" in name or "lora" in name for name in names)
    assert runs.refitted["verified"]


def test_its_config_says_by_what_products_are_multiplied(runs):
    """Exactly so if the scale is a power of two times that of the files."""
    other, fresh = runs.refitted["other"], runs.fresh["other"]
    assert other["said"] == fresh["said"] != runs.fresh["new"]["said"]
    assert other["adapters"] != fresh["adapters"]


def test_its_copy_in_host_memory_equals_what_a_fresh_engine_reads_from_files(runs):
    """Of its own rows and columns on each of several ranks."""
    copies = runs.refitted["evicted"]["copies"]
    assert runs.num_ranks > 1 or copies == runs.fresh["new copies"]
    assert runs.refitted["are files left"]


def test_an_adapter_that_lost_its_slot_is_refused_and_comes_back_as_it_was_refitted(runs):
    found, fresh = runs.refitted["evicted"], runs.fresh["new"]
    assert found["others"] == [fresh["said"]["two"], runs.fresh["new three"]]
    assert found["refused"]["error"] == "UnsupportedEngineError" and "a request with it" in found["refused"]["message"]
    assert found["one"] == fresh["said"]["one"]
    assert found["state"] == fresh


@pytest.mark.parametrize(("when", "is_dirty"), [("prepared", False), ("written", True)])
def test_no_adapter_is_written_where_another_one_has_come(when, is_dirty, runs):
    found, fresh = runs.refitted["evicted"]["moved"][when], runs.fresh["new"]["said"]
    assert found["error"]["error"] == "LiveTensorMovedError" and found["dirty"] == is_dirty
    assert found["said"] == [fresh["one"], fresh["two"], runs.fresh["new three"]]


def test_a_refit_of_weights_keeps_it_and_one_loaded_anew_is_seen(runs):
    found, fresh = runs.refitted["weights"], runs.fresh["new"]
    assert found["kept"] == []
    assert found["other"]["adapters"] == fresh["adapters"] and found["other"]["said"] != fresh["said"]
    assert found["state"] == fresh
    removed = runs.refitted["removed"]
    assert removed["refused"]["error"] == "UnsupportedEngineError"
    assert removed["again"] == runs.refitted["before"]["said"]["one"]


def test_requests_with_it_wait_end_or_go_on_with_what_it_was_refitted_to(runs):
    if runs.num_ranks > 1:
        pytest.skip("several ranks have one driver, and are looked at elsewhere")
    found = runs.refitted["in flight"]
    assert found["wait"]["answer"]["tokens"] == found["wait"]["before"]
    aborted, before = found["abort"]["answer"], found["abort"]["before"]
    assert aborted["reason"] == "abort" and aborted["tokens"] == before[: len(aborted["tokens"])]
    kept = found["keep"]["answer"]["tokens"]
    assert kept != found["keep"]["before"] and kept[0] == found["keep"]["before"][0]
    assert kept in found["keep"]["goes on"]
