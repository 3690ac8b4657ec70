"""What goes wrong on one rank, told by all, and healed by the next refit: in every process layout of a vLLM engine.

On the CPU: `conftest.py` says what that does not claim. All tests of a layout read what one engine found
(`tests/engines/attempts.py`); each thing that went wrong in it was healed before the next. What goes wrong with one rank too is
in `test_conformance.py`.
"""

import pytest

from tests.vllm.layout_runs import CASES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
ATTEMPTS = ["rank fault", "bad values", "strict"]
THAT_LEAVE_IT_DIRTY = ["rank fault", "bad values"]
LAST_RANK = {
    "multi-process": 0,
    "tensor parallel": 1,
    "core in process": 1,
    "external launcher": 1,
    "asynchronous": 0,
    "replicas": 1,
}
every_layout = pytest.mark.parametrize("layout", CASES)


@pytest.fixture
def drivers(layout, layout_runs):
    """What each driver of one engine found."""
    return layout_runs.lived(layout).drivers


@pytest.mark.parametrize("attempt", ATTEMPTS)
@every_layout
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(attempt, drivers):
    assert [driver[attempt]["healed"] for driver in drivers] == [True] * len(drivers)


@pytest.mark.parametrize("attempt", ATTEMPTS)
@every_layout
def test_no_rank_waits_for_another(attempt, drivers):
    assert all(driver[attempt]["seconds"] < 20 for driver in drivers)


@pytest.mark.parametrize("attempt", THAT_LEAVE_IT_DIRTY)
@every_layout
def test_a_failure_after_the_first_byte_leaves_every_rank_written_and_the_engine_dirty(layout, attempt, drivers):
    changed = [rank for driver in drivers for rank in driver[attempt]["changed"]]
    assert changed == [True] * (LAST_RANK[layout] + 1)
    assert all(driver[attempt]["dirty"] for driver in drivers)


@pytest.mark.parametrize("entry", ["generate", "add_request"])
@pytest.mark.parametrize("attempt", THAT_LEAVE_IT_DIRTY)
@every_layout
def test_a_dirty_engine_refuses_requests_within_a_second(attempt, entry, drivers):
    for driver in drivers:
        refusal = driver[attempt]["entries"][entry]
        assert refusal["error"] == "EngineDirtyError"
        assert "the last refit failed part way" in refusal["message"]
        assert refusal["seconds"] < 1
        assert driver[attempt]["num_unfinished"] == 0


@every_layout
def test_a_rank_that_fails_after_its_last_slot_is_named(layout, drivers):
    armed = [rank for driver in drivers for rank in driver["rank fault"]["armed"]]
    assert armed == [False] * LAST_RANK[layout] + [True]
    assert drivers[0]["rank fault"]["refit"]["error"] == "RankFailedError"
    assert "RuntimeError: injected" in drivers[0]["rank fault"]["refit"]["message"]
    if LAST_RANK[layout]:
        assert "rank 1: " in drivers[0]["rank fault"]["refit"]["message"]


def test_a_driver_of_one_rank_raises_what_its_own_rank_raised(layout_runs):
    _, last = layout_runs.lived("external launcher").drivers
    assert last["rank fault"]["refit"]["error"] == "RuntimeError"


@every_layout
def test_nan_that_one_rank_sees_while_it_writes_is_named_everywhere(drivers):
    for driver in drivers:
        assert driver["bad values"]["refit"]["error"] == "NonFiniteError"
        assert driver["bad values"]["refit"]["named"] == [DOWN_PROJ]


@pytest.mark.parametrize("source", ["refit", "files"])
@every_layout
def test_strict_writes_no_rank_if_one_rank_would_see_nan(source, drivers):
    for driver in drivers:
        assert driver["strict"][source]["error"] == "NonFiniteError"
        assert driver["strict"][source]["named"] == [DOWN_PROJ]
        assert "Nothing was written" in driver["strict"][source]["message"]
        assert driver["strict"]["untouched"]
        assert not driver["strict"]["dirty"]


@pytest.mark.parametrize("layout", ["multi-process", "tensor parallel", "core in process"])
def test_ranks_whose_driver_is_interrupted_after_their_vote_serve_the_whole_new_policy(drivers):
    for driver in drivers:
        found = driver["late interrupt"]
        assert found["raised"] == "KeyboardInterrupt"
        assert found["written"] == found["again"]
        assert found["versions"][1] == found["versions"][0] + 1
        assert not found["dirty"] and found["healed"]
