"""Real vLLM engines whose experts move between two ranks while they run (EPLB), with copies of some: bytes, tokens, refusals.

vLLM's own code moves them (`cpu_eplb.py`), and a fresh engine's to the same places.
"""

import pytest

from fp8refit.checkpoint import quantize_checkpoint
from tests.tiny_models import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]
FAMILY = "qwen3_moe"
AT_FIRST = "at first"
KINDS = (AT_FIRST, "mapped", "mapped again", "stream", "files", "broadcast", "broadcast again")
FORMATS = [("qwen3_moe", "fp8_per_tensor"), ("qwen3_moe_many", "modelopt, nvfp4 in tiles")]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moved")
    save_model(FAMILY, 2, folder / "bf16")
    quantize_checkpoint(folder / "bf16", folder / "fp8")
    return folder


@pytest.fixture(scope="module")
def refitted(run_engine, work):
    return run_engine("moved experts", model=work / "bf16", kernel="fp32")


@pytest.fixture(scope="module")
def fresh(run_engine, work):
    return run_engine("fresh moved experts", model=work / "fp8", kernel="fp32")


@every_kind
def test_every_byte_of_every_rank_equals_that_of_a_fresh_engine_with_experts_at_the_same_places(kind, refitted, fresh):
    assert len(refitted[kind]["live"]) == 2
    assert refitted[kind]["places"] == fresh[kind]["places"]
    assert refitted[kind]["live"] == fresh[kind]["live"]
    assert (kind == AT_FIRST) == (refitted[kind]["live"] == refitted[AT_FIRST]["live"])


@every_kind
def test_every_place_holds_what_a_fresh_engine_loads_for_the_expert_that_is_there(kind, refitted, fresh):
    for layer, places in enumerate(refitted[kind]["places"]):
        assert set(places) == set(range(4)) and len(places) == 6
        loaded = [row for rank in fresh[AT_FIRST]["rows"] for row in rank[layer]]
        now = [row for rank in refitted[kind]["rows"] for row in rank[layer]]
        assert len(set(loaded[:4])) == 4
        assert now == [loaded[expert] for expert in places]


@every_kind
def test_tokens_log_probabilities_and_fingerprints_equal_those_of_the_fresh_engine(kind, refitted, fresh):
    assert refitted[kind]["outputs"] == fresh[kind]["outputs"]
    assert refitted[kind]["fingerprints"] == fresh[kind]["fingerprints"]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_policy_is_found_where_its_experts_have_moved(kind, refitted):
    assert refitted[kind]["verified"] == [True, True]


def test_a_policy_without_an_expert_is_refused_by_name(refitted):
    faults = refitted["faults"]
    assert faults["lacking"]["error"] == "InvalidSourceError"
    assert faults["lacking"]["named"] == ["model.layers.1.mlp.experts.down_proj: missing, whole and expert by expert"]
    assert faults["untouched"]


def test_nothing_is_written_if_experts_move_after_a_refit_was_prepared(refitted):
    faults = refitted["faults"]
    assert faults["moved"]["error"] == "LiveTensorMovedError"
    assert "has moved experts" in faults["moved"]["message"]
    assert not faults["dirty"] and faults["kept"] and faults["refitted"]


def test_experts_of_the_old_policy_that_are_being_moved_in_the_background_are_discarded(refitted, fresh):
    found = refitted["background"]
    assert found["is_begun"] == [True, True]
    assert found["moving"] == [[False, False]] * 2
    assert found["places"] == refitted["mapped"]["places"]
    assert found["live"] == found["live_after_steps"] == fresh["mapped"]["live"]


@pytest.fixture(scope="module")
def formats(run_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    for family, _ in FORMATS:
        save_model(family, 1, folder / family)
    return run_engine("moved formats", cases=FORMATS, work=folder)


@pytest.mark.parametrize("container", [container.partition(" in ")[0] for _, container in FORMATS])
def test_experts_in_other_formats_are_refitted_where_vllm_has_moved_them(container, formats):
    found = formats[container]
    assert found["verified"]
    assert found["live"] == found["moved"]
    assert len(found["formats"]) == 1
