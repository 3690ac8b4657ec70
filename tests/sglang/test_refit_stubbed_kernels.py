"""Refitted SGLang engines with stubbed kernels against fresh ones: bytes of every rank, tokens, log-probabilities.

The fresh engine loads the block-FP8 checkpoint that `quantize_checkpoint` wrote, in schedulers into which no refit ever came.
`observer.py` reads what every rank holds, in that rank's own process. What is and is not real here: `conftest.py`.
"""

import pytest

from tests.cross_engine import DIGEST
from tests.sglang.conftest import REFITTED

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

SOURCES = [
    "mapping",
    "safetensors",
    "block-FP8 safetensors",
    "function",
    "one-shot iterator",
    "one-shot iterator with manifest",
    "gathered",
    "fp32",
    "wrapped names",
]


def test_a_refit_reaches_every_rank(refits):
    rounds = refits.found["policies"]["rounds"]
    assert [one["version"] for one in rounds] == [1, 2, 3]
    assert [one["ranks"] for one in rounds] == [list(range(refits.num_ranks))] * 3
    assert [len(one["live"]) for one in rounds] == [refits.num_ranks] * 3


def test_every_byte_of_every_rank_equals_that_of_a_fresh_engine(refits, fresh):
    assert all(len(live) > 20 for live in fresh[refits.name]["live"])
    assert refits.found["policies"]["rounds"][1]["live"] == fresh[refits.name]["live"]


def test_tokens_and_log_probabilities_equal_those_of_a_fresh_engine(refits, fresh):
    assert refits.found["policies"]["rounds"][1]["outputs"] == fresh[refits.name]["outputs"]


def test_a_policy_comes_back_byte_for_byte(refits):
    first, second, third = refits.found["policies"]["rounds"]
    assert first["live"] == third["live"] != second["live"]
    assert first["outputs"] == third["outputs"] != second["outputs"]


def test_a_repeated_prompt_does_not_meet_the_old_policys_cache(refits):
    for one in refits.found["policies"]["rounds"]:
        assert [output["num_cached"] for output in one["outputs"]] == [0, 0]
        assert [output["num_cached"] for output in one["again"]] == [23, 199]


def test_tensors_of_every_rank_keep_identity_address_and_layout(refits):
    assert all(count > 20 for count in refits.found["policies"]["num_tensors"])
    assert refits.found["policies"]["moved"] == [[]] * refits.num_ranks


def test_padding_rows_of_the_vocabulary_are_zero_after_a_dummy_boot(refits):
    assert refits.found["policies"]["booted"]["padding"][-1]["num_set"] > 0
    for one in refits.found["policies"]["rounds"]:
        assert [padding["num_set"] for padding in one["padding"]] == [0] * refits.num_ranks


def test_nothing_is_left_on_the_engine_after_success(refits):
    assert refits.found["policies"]["traces"] == []


def test_broadcasts_leave_what_other_refits_do(refits):
    first, second, _ = refits.found["policies"]["rounds"]
    for one, other in zip(refits.found["broadcasts"], [second, first] * 2, strict=True):
        assert (one["live"], one["outputs"]) == (other["live"], other["outputs"])


def test_ranks_are_asked_for_no_more_than_they_need_to_take_what_they_know(refits):
    first, second, *others = (one["asked"] for one in refits.found["broadcasts"])
    assert first[-3:] == ["prepare", "flush", "take"] and "join" in first
    in_one_conversation = ["prepare and", "flush and", "take"]
    assert second[-3:] == in_one_conversation
    assert others == [in_one_conversation] * 2


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_bytes(kind, refits):
    assert refits.found["sources"]["live"][kind] == refits.found["policies"]["rounds"][0]["live"]


@pytest.mark.parametrize("source", ["refit", "files"])
def test_strict_finds_nan_of_the_last_rank_before_anything_is_written(source, refits):
    found = refits.found["strict"]
    assert found[source]["error"] == "NonFiniteError"
    assert found[source]["named"] == ["model.layers.1.mlp.down_proj.weight"]
    assert not found["dirty"]
    assert found["untouched"]


def test_nan_of_the_last_rank_is_named_and_leaves_every_rank_dirty(refits):
    found = refits.found["bad values"]
    assert found["refit"]["error"] == "NonFiniteError"
    assert found["refit"]["named"] == ["model.layers.1.mlp.down_proj.weight"]
    assert found["dirty"]
    assert found["changed"] == [True] * refits.num_ranks


def test_a_fault_of_the_last_rank_is_told_and_leaves_the_engine_dirty(refits):
    found = refits.found["rank fault"]
    assert found["armed"] == [False] * (refits.num_ranks - 1) + [True]
    assert found["refit"]["error"] == "RankFailedError"
    assert "injected" in found["refit"]["message"]
    assert found["dirty"]


@pytest.mark.parametrize("entry", ["generate", "stream", "async_generate"])
@pytest.mark.parametrize("attempt", ["bad values", "rank fault"])
def test_a_dirty_engine_refuses_requests_within_a_second(attempt, entry, refits):
    refusal = refits.found[attempt]["entries"][entry]
    assert refusal["error"] == "EngineDirtyError"
    assert refusal["seconds"] < 1
    assert refits.found[attempt]["num_unfinished"] == 0


@pytest.mark.parametrize("attempt", ["strict", "bad values", "rank fault"])
def test_the_next_good_refit_heals(attempt, refits):
    assert refits.found[attempt]["healed"]


@pytest.mark.parametrize("refits", [("qwen3", 1)], indirect=True, ids=["qwen3-1"])
def test_a_refit_leaves_the_same_weights_and_scales_as_in_other_engines(refits):
    assert refits.found["cross engine"]["digest"] == DIGEST


@pytest.mark.parametrize("family", REFITTED)
def test_an_engine_booted_from_a_checkpoint_is_refitted_to_what_the_public_quantizer_gives(family, fresh):
    """Mistral's scales SGLang itself does not load, and Phi-3 and GLM-4 are fused in the checkpoint."""
    found = fresh[f"{family}-1"]
    assert found["is_first"] == [True]
    assert len(found["live"][0]) > 20
    assert found["wrong_after_refit"] == []
