"""One live vLLM engine between refits: bad input, unfinished requests, caches that stay, sources of every kind.

On the CPU, with the tests' own FP8 product: `conftest.py` says what that does not claim. All tests read what one process
found; each thing that went wrong in it was healed before the next.
"""

import pytest

pytestmark = pytest.mark.vllm

NUM_ROUNDS = 5


@pytest.fixture(scope="module")
def live(run_engine, tmp_path_factory):
    return run_engine("live", work=tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="module")
def rounds(live):
    return live["policies"]["rounds"]


def test_five_policies_are_each_held_byte_for_byte(rounds):
    assert [found["wrong"] for found in rounds] == [[]] * NUM_ROUNDS
    assert [found["version"] for found in rounds] == [1, 2, 3, 4, 5]


def test_five_policies_say_five_things(rounds):
    assert len({str(found["tokens"]) for found in rounds}) == NUM_ROUNDS


def test_tensors_keep_identity_address_and_layout(live):
    assert live["policies"]["num_tensors"] > 30
    assert live["policies"]["moved"] == []


def test_nothing_is_left_on_the_engine_after_success(rounds):
    assert [found["traces"] for found in rounds] == [[]] * NUM_ROUNDS


@pytest.mark.parametrize(
    "name", ["bad_values", "bad_names", "busy", "asleep", "held_block", "two_refitters", "writers", "threads"]
)
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(name, live):
    assert live[name]["healed"]


BAD_TENSORS = ["model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"]


def test_nan_and_inf_found_while_writing_are_named_and_leave_the_engine_dirty(live):
    assert live["bad_values"]["fused"]["error"] == "NonFiniteError"
    assert live["bad_values"]["fused"]["named"] == BAD_TENSORS
    assert live["bad_values"]["dirty"]


def test_strict_names_nan_and_inf_and_writes_nothing(live):
    assert live["bad_values"]["strict"]["error"] == "NonFiniteError"
    assert live["bad_values"]["strict"]["named"] == BAD_TENSORS
    assert live["bad_values"]["strict_untouched"]
    assert not live["bad_values"]["strict_dirty"]


@pytest.mark.parametrize("entry", ["generate", "add_request"])
def test_a_dirty_engine_refuses_requests_within_a_second(entry, live):
    refusal = live["bad_values"][entry]
    assert refusal["error"] == "EngineDirtyError"
    assert BAD_TENSORS[1] in refusal["message"]
    assert refusal["seconds"] < 1
    assert live["bad_values"]["unfinished"] == 0


def test_names_that_do_not_fit_are_told_all_at_once_and_nothing_is_written(live):
    found = live["bad_names"]
    assert found["refit"]["error"] == "InvalidSourceError"
    assert sorted(found["refit"]["named"]) == [
        "model.layers.0.input_layernorm.weight: missing",
        "model.layers.1.mlp.up_proj.weight: has shape [128, 256], this engine's is [512, 256]",
        "model.layers.9.mlp.up_proj.weight: unexpected, this engine has no such weight; leave it out",
    ]
    assert found["live_untouched"]
    assert found["still_generates"]
    assert not found["dirty"]


def test_an_engine_with_unfinished_requests_is_busy(live):
    assert live["busy"]["refit"]["error"] == "EngineBusyError"
    assert live["busy"]["live_untouched"]
    assert not live["busy"]["dirty"]


def test_a_request_that_a_refit_came_across_says_what_it_says_otherwise(live):
    assert len(live["busy"]["disturbed"]) == 1
    assert live["busy"]["disturbed"] == live["busy"]["undisturbed"]


def test_weights_that_are_marked_asleep_are_not_written(live):
    assert live["asleep"]["refit"]["error"] == "EngineAsleepError"
    assert live["asleep"]["live_untouched"]
    assert not live["asleep"]["dirty"]


def test_a_cache_that_vllm_does_not_flush_stops_a_refit_before_anything_is_written(live):
    assert live["held_block"]["refit"]["error"] == "CacheFlushError"
    assert live["held_block"]["live_untouched"]
    assert live["held_block"]["generate"] is None
    assert not live["held_block"]["dirty"]


def test_refitters_of_one_engine_share_its_version(live):
    first, second, refitted, first_again = live["two_refitters"]["versions"]
    assert first == second
    assert refitted == first_again == first + 1


@pytest.mark.parametrize(
    "kind",
    [
        "safetensors",
        "block-FP8 safetensors",
        "function",
        "one-shot iterator",
        "one-shot iterator with manifest",
        "list of pairs",
        "fp32",
        "wrapped names",
    ],
)
def test_every_kind_of_source_gives_the_same_bytes(kind, live):
    assert live["streams"][kind] == live["good"]["live"]


def test_of_two_writers_by_different_ways_the_second_is_refused(live):
    for way, found in live["writers"].items():
        if way != "healed":
            assert found == {"refused": ["EngineBusyError"], "wrong": [], "serves": True}, way


def test_an_llm_and_its_worker_in_two_threads_never_mix_their_policies(live):
    found = live["threads"]
    assert found["wrong"] == []
    assert {error for errors in found["errors"] for error in errors} <= {"EngineBusyError"}
    assert all(len(errors) < 2 for errors in found["errors"])
