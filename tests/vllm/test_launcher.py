"""vLLM's `external_launcher`: one driver per rank, and drivers that do not do the same. On the CPU, two processes.

`conftest.py` says what that does not claim. All tests read what one engine found (`launcher_engine.py`).
"""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

ATTEMPTS = ["busy on one rank", "gathered"]


@pytest.fixture
def drivers(layout_runs):
    return layout_runs.lived("external launcher").drivers


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(attempt, drivers):
    assert [driver[attempt]["healed"] for driver in drivers] == [True, True]
    assert all(driver[attempt]["seconds"] < 20 for driver in drivers)


@pytest.mark.parametrize(("refit", "count"), [("refit", "num_given"), ("without_manifest", "num_given_without")])
def test_a_rank_that_may_not_begin_keeps_the_other_out_of_the_trainers_collective(refit, count, drivers):
    for driver in drivers:
        found = driver["busy on one rank"]
        assert found[refit]["error"] == "EngineBusyError"
        assert "rank 0: the engine has unfinished requests" in found[refit]["message"]
        assert found[count] == 0
        assert found["untouched"]
        assert not found["dirty"]


def test_a_stream_that_gathers_gives_the_bytes_of_a_mapping(drivers):
    assert [driver["gathered"]["equal"] for driver in drivers] == [True, True]
