"""vLLM's `external_launcher`: one driver per rank, and drivers that do not do the same. On the CPU, two processes.

`conftest.py` says what that does not claim. All tests read what one engine found (`launcher_engine.py`).
"""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
ATTEMPTS = ["missing on one rank", "NaN on one rank", "busy on one rank", "mismatch in mid-stream", "gathered"]


@pytest.fixture
def drivers(layout_runs):
    return layout_runs.lived("external launcher").drivers


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(attempt, drivers):
    assert [driver[attempt]["healed"] for driver in drivers] == [True, True]
    assert all(driver[attempt]["seconds"] < 20 for driver in drivers)


def test_a_name_that_one_rank_lacks_is_told_by_both_and_nothing_is_written(drivers):
    for driver in drivers:
        found = driver["missing on one rank"]
        assert found["refit"]["error"] == "InvalidSourceError"
        assert found["refit"]["named"] == [f"{NORM}: missing"]
        assert found["untouched"]
        assert not found["dirty"]


def test_nan_that_one_driver_was_given_is_told_by_both(drivers):
    for driver in drivers:
        found = driver["NaN on one rank"]
        assert found["strict"]["error"] == found["refit"]["error"] == "NonFiniteError"
        assert found["strict"]["named"] == found["refit"]["named"] == [NORM]
        assert found["untouched"]
        assert found["dirty"]
        assert found["generate"]["error"] == "EngineDirtyError"


@pytest.mark.parametrize(("refit", "count"), [("refit", "num_given"), ("without_manifest", "num_given_without")])
def test_a_rank_that_may_not_begin_keeps_the_other_out_of_the_trainers_collective(refit, count, drivers):
    for driver in drivers:
        found = driver["busy on one rank"]
        assert found[refit]["error"] == "EngineBusyError"
        assert "rank 0: the engine has unfinished requests" in found[refit]["message"]
        assert found[count] == 0
        assert found["untouched"]
        assert not found["dirty"]


def test_a_rank_whose_stream_does_not_fit_goes_through_the_collective_with_the_other(drivers):
    for driver in drivers:
        found = driver["mismatch in mid-stream"]
        assert found["refit"]["error"] == "InvalidSourceError"
        assert found["refit"]["named"][0].startswith(f"{DOWN_PROJ}: arrived as bfloat16 [1, 512]")
        assert found["num_given"] == found["num_announced"]
        assert found["dirty"]
        assert found["generate"]["error"] == "EngineDirtyError"


def test_a_stream_that_gathers_gives_the_bytes_of_a_mapping(drivers):
    assert [driver["gathered"]["equal"] for driver in drivers] == [True, True]
