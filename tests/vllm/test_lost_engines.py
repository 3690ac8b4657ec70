"""vLLM engines of which a process dies, or whose channel to its workers breaks: told within seconds, and for good.

On the CPU: `conftest.py` says what that does not claim. `layouts.py` says how each engine ends.
"""

import pytest

from tests.vllm.layout_runs import CASES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

LIVED = {
    "the engine core, idle": "multi-process",
    "a worker that writes": "tensor parallel",
    "the engine core of an AsyncLLM, idle": "asynchronous",
    "a replica that writes": "replicas",
}
FRESH = {"a worker, idle": "core in process"}


@pytest.fixture
def ending(victim, layout_runs):
    """What a driver found when a process of its engine was killed."""
    if victim in LIVED:
        return layout_runs.lived(LIVED[victim]).drivers[0]["ending"]
    return layout_runs.fresh(FRESH[victim]).drivers[0]["ending"]


every_victim = pytest.mark.parametrize("victim", [*LIVED, *FRESH])


@every_victim
def test_a_killed_process_is_a_lost_engine_within_seconds(ending):
    assert ending["refit"]["error"] == "EngineLostError"
    assert "restart the engine" in ending["refit"]["message"]
    assert ending["refit"]["seconds"] < 20


@every_victim
def test_later_refits_say_so_at_once(ending):
    assert ending["again"]["error"] == "EngineLostError"
    assert ending["again"]["seconds"] < 1


@pytest.mark.parametrize("entry", ["generate", "add_request"])
@every_victim
def test_a_lost_engine_refuses_requests_within_a_second(entry, ending):
    assert ending[entry]["error"] == "EngineDirtyError"
    assert "the engine is lost" in ending[entry]["message"]
    assert ending[entry]["seconds"] < 1


@every_victim
def test_a_lost_engine_can_be_closed(ending):
    assert ending["close"] is None


@pytest.mark.parametrize("engine", ["lived", "fresh"])
@pytest.mark.parametrize("layout", CASES)
def test_no_process_outlives_its_engine(layout, engine, layout_runs):
    if (layout, engine) == ("tensor parallel", "fresh"):
        pytest.skip("its driver is killed: the next test")
    assert getattr(layout_runs, engine)(layout).left == []


VLLMS_OWN = ("VLLM::EngineCore", "VLLM::Worker_TP", "multiprocessing.resource_tracker")
"""What outlives the killed driver of a multi-process engine without fp8refit too (vLLM 0.32)."""


def test_what_outlives_a_driver_killed_before_the_ranks_vote_on_their_write_is_vllms_own(layout_runs):
    killed = layout_runs.fresh("tensor parallel")
    before, written = killed.drivers[0]["ending"]["shared_files"]
    assert set(written) <= set(before), "vLLM's own, from the time before the refit"
    assert [line for line in killed.left if not any(name in line for name in VLLMS_OWN)] == []


def test_a_rank_whose_neighbour_died_before_the_vote_on_their_write_is_lost_and_stays_dirty(layout_runs):
    _, survivor = layout_runs.lived("external launcher").drivers
    assert survivor["ending"]["refit"]["error"] == survivor["ending"]["again"]["error"] == "EngineLostError"
    assert survivor["ending"]["refit"]["seconds"] < 20
    assert survivor["ending"]["again"]["seconds"] < 1
    assert survivor["ending"]["dirty"]
    assert survivor["ending"]["generate"]["error"] == "EngineDirtyError"


def test_a_rank_whose_neighbour_is_gone_before_a_refit_is_lost_with_nothing_written(layout_runs):
    survivor, _ = layout_runs.fresh("external launcher").drivers
    assert survivor["ending"]["refit"]["error"] == survivor["ending"]["again"]["error"] == "EngineLostError"
    assert survivor["ending"]["refit"]["seconds"] < 20
    assert survivor["ending"]["again"]["seconds"] < 1
    assert survivor["ending"]["live"] == survivor["fresh"]["live"]
    assert survivor["ending"]["generate"]["error"] == "EngineDirtyError"


def test_refits_go_on_after_another_method_raised_on_every_rank(layout_runs):
    (driver,) = layout_runs.lived("core in process").drivers
    ending = driver["ending"]
    assert "injected into the channel" in ending["raised"]
    assert [ending[call] for call in ("refit", "again", "generate", "add_request", "close")] == [None] * 5
    assert not ending["dirty"]
