"""Policies broadcast to the ranks of a real vLLM engine, by gloo instead of NCCL. What is real here: `conftest.py`."""

import pytest

FAMILY, DOWN_PROJ, TIMEOUT_S = "qwen2_wide", "model.layers.1.mlp.down_proj.weight", 20
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]


@pytest.fixture(scope="module")
def found(run_ranks):
    return run_ranks("broadcast", FAMILY)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_rank_holds_and_says_what_it_does_after_an_ordinary_refit(seed, found):
    broadcast, ordinary = found["broadcast"][seed], found["ordinary"][seed]
    assert len(broadcast["live"]) == 2
    assert broadcast["live"] == ordinary["live"]
    assert broadcast["outputs"] == ordinary["outputs"]
    assert found["ordinary"]["1"]["live"] != found["ordinary"]["2"]["live"]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_broadcast_like_the_last_is_one_exchange_with_the_engine_core(seed, found):
    steady, ordinary = found["steady"][seed], found["ordinary"][seed]
    assert steady["calls"] == ["fp8refit_pair"]
    assert (steady["live"], steady["outputs"]) == (ordinary["live"], ordinary["outputs"])


@pytest.mark.parametrize("seed", ["1", "2"])
def test_workers_in_other_processes_do_not_wait_for_the_core_to_drop_its_caches(seed, found):
    assert found["steady"][seed]["waits_for_flush"] == [False, False]
    assert found["steady"][seed]["outputs"] == found["ordinary"][seed]["outputs"], "of cached keys of the policy before"


def test_ranks_that_another_trainer_refitted_are_joined_again_in_time(found):
    steady, ordinary = found["steady"]["after another trainer"], found["ordinary"]["2"]
    assert steady["calls"][0] == steady["calls"][-1] == "fp8refit_pair"
    assert steady["calls"][1:-1] == ["collective_rpc"] * 3
    assert (steady["live"], steady["outputs"]) == (ordinary["live"], ordinary["outputs"])
    assert steady["seconds"] < TIMEOUT_S / 2


def test_a_rank_receives_little_more_than_half(found):
    assert max(found["num_bytes"]["received"]) < 0.6 * found["num_bytes"]["sent"]


def test_the_same_with_bf16_on_the_wire(found):
    assert found["bf16"] == found["ordinary"]["1"]["live"]


def test_the_second_broadcast_compiles_nothing(found):
    assert [found["broadcast"][seed]["is_first"] for seed in ("1", "2")] == [True, False]
    assert [found["broadcast"][seed]["version"] for seed in ("1", "2")] == [3, 4]


@pytest.mark.parametrize(
    "way", ["calibration", "calibration of what is gathered", "kv_scales", "among the weights", "healed"]
)
def test_kv_scales_after_a_broadcast_are_those_after_an_ordinary_refit(way, found):
    assert found["kv"][way] == found["kv"]["ordinary"]
    scales = found["kv"]["ordinary"]["scales"]
    assert len(set(scales.values())) > 2 and 1.0 not in scales.values()
    copies = {f"{name.rpartition('.')[0]}.attn._{name.rpartition('.')[2]}": scale for name, scale in scales.items()}
    assert all(copies.items() <= of_rank.items() for of_rank in found["kv"][way]["copies"])


def test_a_rank_that_fails_while_it_measures_leaves_the_engine_dirty(found):
    fault = found["kv"]["fault"]
    assert fault["push"]["error"] == "RankFailedError" and "rank 1" in fault["push"]["message"]
    assert fault["generate"]["error"] == "EngineDirtyError"


def test_nan_leaves_the_engine_dirty_and_the_next_broadcast_heals_it(found):
    assert found["nan"]["push"]["error"] == "NonFiniteError"
    assert found["nan"]["push"]["named"] == [DOWN_PROJ]
    assert found["nan"]["dirty"]
    assert found["nan"]["generate"]["error"] == "EngineDirtyError"
    assert found["nan"]["healed"] == found["ordinary"]["2"]["live"]


def test_a_source_that_raises_ends_the_broadcast_and_the_next_one_heals(found):
    assert found["source"]["error"] == "OSError"
    assert found["source"]["seconds"] < TIMEOUT_S
    assert found["source"]["healed"] == found["ordinary"]["1"]["live"]


def test_a_rank_that_is_killed_loses_the_engine_and_nobody_waits(found):
    assert found["killed"]["error"] == "EngineLostError"
    assert found["killed"]["seconds"] < TIMEOUT_S
    assert found["killed"]["generate"] is not None
