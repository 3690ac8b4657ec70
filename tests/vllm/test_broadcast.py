"""Policies broadcast to the ranks of a real vLLM engine, by gloo instead of NCCL. What is real here: `conftest.py`."""

import pytest

FAMILY, TIMEOUT_S = "qwen2_wide", 20
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


@pytest.mark.parametrize("seed", ["1", "2"])
def test_what_is_sent_ahead_is_the_same_and_nan_in_it_changes_nothing(seed, found):
    ahead, ordinary = found["ahead"][seed], found["ordinary"][seed]
    assert (ahead["live"], ahead["outputs"]) == (ordinary["live"], ordinary["outputs"])
    assert ahead["phases"][:3] == ["plan", "stage", "pause"]
    assert ahead["refused"]["error"] == "NonFiniteError" and "Nothing was written" in ahead["refused"]["message"]
    assert ahead["kept"] == {name: ahead[name] for name in ahead["kept"]}


def test_a_rank_receives_little_more_than_half(found):
    assert max(found["num_bytes"]["received"]) < 0.6 * found["num_bytes"]["sent"]


def test_kv_scales_after_a_broadcast_are_those_after_an_ordinary_refit(found):
    assert found["kv"]["broadcast"] == found["kv"]["ordinary"]
    scales = found["kv"]["ordinary"]["scales"]
    assert len(set(scales.values())) > 2 and 1.0 not in scales.values()
    copies = {f"{name.rpartition('.')[0]}.attn._{name.rpartition('.')[2]}": scale for name, scale in scales.items()}
    assert all(copies.items() <= of_rank.items() for of_rank in found["kv"]["broadcast"]["copies"])


def test_a_rank_that_is_killed_loses_the_engine_and_nobody_waits(found):
    assert found["killed"]["error"] == "EngineLostError"
    assert found["killed"]["seconds"] < TIMEOUT_S
    assert found["killed"]["generate"] is not None
