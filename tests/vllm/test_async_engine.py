"""Refits of a vLLM `AsyncLLM` that answers: requests that run when a refit begins, and requests that come meanwhile.

On the CPU: `conftest.py` says what that does not claim. All tests read what one engine found (`async_engine.py`).
"""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]

NUM_RUNNING = 2
FAILING = ["failing: keep", "failing: continue"]
UNATTENDED = ["unattended: keep", "unattended: continue"]
ATTEMPTS = [
    "in flight: wait",
    "in flight: abort",
    "in flight: keep",
    "in flight: continue",
    "kept under the same policy",
    "continued under the same policy",
    *FAILING,
    *UNATTENDED,
    "too slow",
    "cancelled while it writes",
]


@pytest.fixture(params=["asynchronous", "replicas"])
def found(request, layout_runs):
    (driver,) = layout_runs.lived(request.param).drivers
    return driver


@pytest.fixture
def of_one_core(layout_runs):
    (driver,) = layout_runs.lived("asynchronous").drivers
    return driver


@pytest.fixture
def old(found):
    """What the policy before the refit says."""
    return found["undisturbed"]["old"]


@pytest.fixture
def new(found):
    """What the policy after the refit says."""
    return found["undisturbed"]["new"]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_no_request_is_stuck(attempt, found):
    assert found[attempt]["stuck"] == 0


@pytest.mark.parametrize("attempt", [*ATTEMPTS, "paused by the user", "sharing", "new scales"])
def test_the_next_refit_gives_the_same_bytes_and_outputs_as_before(attempt, found):
    assert found[attempt]["healed"]


def test_wait_lets_running_requests_finish_under_the_old_policy(found, old):
    waited = found["in flight: wait"]
    assert waited["refit"] is None
    assert waited["num_interrupted"] == 0
    assert [request["tokens"] for request in waited["running"]] == old["running"]
    assert all(request["versions"] in (None, [str(waited["version"] - 1)]) for request in waited["running"])
    assert len(waited["running"]) == NUM_RUNNING


def test_abort_ends_running_requests_with_what_they_have(found, old):
    aborted = found["in flight: abort"]
    assert aborted["refit"] is None
    assert aborted["num_interrupted"] == NUM_RUNNING
    for request, undisturbed in zip(aborted["running"], old["running"], strict=True):
        assert request["reason"] == "abort"
        assert request["tokens"] == undisturbed[: len(request["tokens"])]
        assert 0 < len(request["tokens"]) < len(undisturbed)


def test_a_core_whose_step_was_running_looks_for_work_after_the_write(run_engine):
    """With a scheduler that works ahead, which a CPU has not."""
    assert run_engine("core loop") == {"waits": True, "said": "resumed", "goes_on": True, "has_work": True}


@pytest.mark.parametrize("attempt", UNATTENDED)
def test_frozen_requests_go_on_although_nobody_says_anything_to_the_core(attempt, found):
    assert found[attempt]["num_interrupted"] == NUM_RUNNING


def test_the_core_itself_stops_frozen_requests_and_lets_them_go_on(of_one_core):
    for mode in ("keep", "continue"):
        report = of_one_core[f"unattended: {mode}"]
        assert 0 < report["still_s"] == report["standstill_s"] < report["total_s"]
        attended = of_one_core[f"in flight: {mode}"]
        assert 0 < attended["standstill_s"] < attended["total_s"]
    waited = of_one_core["in flight: wait"]
    assert waited["still_s"] == 0 < waited["standstill_s"] < waited["total_s"]


@pytest.mark.parametrize("mode", ["keep", "continue"])
def test_a_frozen_request_goes_on_under_the_new_policy_and_every_token_says_whose_it_is(mode, found, old):
    kept = found[f"in flight: {mode}"]
    assert kept["refit"] is None
    assert kept["num_interrupted"] == NUM_RUNNING
    for request, undisturbed in zip(kept["running"], old["running"], strict=True):
        assert request["reason"] == "length"
        assert len(request["tokens"]) == len(undisturbed)
        assert request["tokens"][0] == undisturbed[0]
        assert request["tokens"] != undisturbed
        assert request["versions"] in (None, [str(kept["version"] - 1), str(kept["version"])])


def test_a_request_that_continues_goes_on_with_the_keys_and_values_of_the_old_policy(found):
    shared = found["sharing"]
    if "went_on" not in shared:
        pytest.skip("this vLLM does not say which policy wrote which token")
    assert shared["went_on"] != shared["recomputed"]


def test_no_later_request_shares_a_block_with_one_that_continues(found):
    shared = found["sharing"]
    assert [each["said"] for each in shared["later"]] == [each["said"] for each in shared["alone"]]
    assert shared["later"][0]["num_cached"] == 0


def test_later_requests_share_blocks_among_themselves(of_one_core):
    assert [each["num_cached"] for each in of_one_core["sharing"]["later"]] == [0, 128]


def test_what_would_change_the_scales_of_keys_and_values_that_stay_is_refused(found):
    scales = found["new scales"]
    assert {name: said.partition(":")[0] for name, said in scales["refused"].items()} == {
        "calibration": "InvalidOptionError",
        "alone": "InvalidOptionError",
        "in the policy": "InvalidSourceError",
    }
    assert all('in_flight="continue"' in said and 'choose "keep"' in said for said in scales["refused"].values())
    assert scales["untouched"] and not scales["dirty"]


@pytest.mark.parametrize("attempt", ["kept under the same policy", "continued under the same policy"])
def test_a_frozen_request_under_the_same_policy_says_what_it_says_undisturbed(attempt, found, old):
    kept = found[attempt]
    assert kept["num_interrupted"] == NUM_RUNNING
    assert [request["tokens"] for request in kept["running"]] == old["running"]
    assert all(request["versions"] is None or len(request["versions"]) == 2 for request in kept["running"])


@pytest.mark.parametrize("attempt", [f"in flight: {mode}" for mode in ("wait", "abort", "keep", "continue")])
def test_a_request_that_comes_meanwhile_is_answered_by_the_new_policy(attempt, found, new, old):
    late = found[attempt]["late"]
    assert late["tokens"] == new["late"] != old["late"]
    assert late["versions"] in (None, [str(found[attempt]["version"])])


@pytest.mark.parametrize("attempt", FAILING)
def test_a_failed_refit_refuses_the_requests_that_wait_and_those_that_come(attempt, found):
    failed = found[attempt]
    assert failed["refit"]["error"] == "NonFiniteError"
    assert failed["dirty"]
    assert failed["late"]["error"] == failed["after"]["error"] == "EngineDirtyError"
    assert failed["after_s"] < 1
    assert failed["num_unfinished"] == 0


@pytest.mark.parametrize("attempt", FAILING)
def test_a_failed_refit_ends_frozen_requests_with_what_they_have(attempt, found, old):
    for request, undisturbed in zip(found[attempt]["running"], old["running"], strict=True):
        assert request["reason"] == "abort"
        assert request["tokens"] == undisturbed[: len(request["tokens"])]


def test_requests_that_take_too_long_to_wait_for_go_on_as_if_nothing_had_been_asked(found, old):
    slow = found["too slow"]
    assert slow["refit"]["error"] == "EngineBusyError"
    assert [request["tokens"] for request in slow["running"]] == old["running"]
    assert slow["late"]["tokens"] == old["late"]
    assert slow["untouched"]
    assert not slow["dirty"]
    assert slow["traces"] == []


def test_a_scheduler_that_the_user_paused_stays_paused(found):
    paused = found["paused by the user"]
    assert paused["paused"]
    assert not paused["answered"]
    assert paused["said"] == paused["new"]


def test_a_refit_cancelled_while_it_writes_leaves_the_engine_dirty(found):
    cancelled = found["cancelled while it writes"]
    assert cancelled["cancelled"]
    assert cancelled["dirty"]
    assert cancelled["late"]["error"] == "EngineDirtyError"
    assert cancelled["num_unfinished"] == 0
