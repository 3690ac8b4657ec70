"""What is heard of an engine that is dirty, and of calls in its workers that fail. `dirty_engines.py` does it."""

import pytest

from tests.tiny_models import save_model
from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]
OWN_CORE = {"in process": False, "multi-process": True}


@pytest.fixture(scope="module", params=OWN_CORE)
def trained(request, starter, tmp_path_factory):
    """An engine of two ranks with the drop-in, whose trainer sends one weight a call."""
    return run_one(
        starter,
        tmp_path_factory.mktemp("trained"),
        "trainer errors",
        FP8REFIT_DROP_IN="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(OWN_CORE[request.param])),
    )


@pytest.fixture(scope="module")
def asked(starter, tmp_path_factory):
    return run_one(starter, tmp_path_factory.mktemp("asked"), "dirty async")


def run_one(starter, folder, name, **environment):
    family = "qwen2_wide"
    save_model(family, 1, folder / "bf16")
    arguments = {"model": folder / "bf16", "family": family}
    outcome = run_scenario(
        starter,
        name,
        arguments,
        folder,
        timeout_s=180,
        environment={"FP8REFIT_TEST_START_METHOD": "fork"} | environment,
    )
    assert outcome.left == []
    return outcome.drivers[0]


def test_the_sync_after_a_bad_one_is_clean(trained):
    assert trained["first"] == []
    assert any("NaN or Inf" in message for message in trained["bad"]), trained["bad"]
    assert trained["generate"]["error"] == "EngineDirtyError"
    assert trained["again"] == trained["still"] == []
    assert trained["same"]
    assert trained["still the same"]


CALLS = ("after the bad", "start", "finish", "all", "first", "last", "reload", "late")
FAILING = ("finish", "all", "first", "last", "late")


@pytest.mark.parametrize("call", CALLS)
def test_the_ranks_replies_are_those_to_the_call_after_one_that_failed(call, trained):
    found = trained["replies"][call]
    error, replies = (None, found) if call == "after the bad" else found
    assert replies == [[[rank, str(number)] for rank in range(2)] for number in range(3)], (error, replies)
    if call in FAILING:
        assert error is not None


def test_a_dirty_async_llm_raises_our_error_for_running_waiting_and_new_requests(asked):
    assert asked["stuck"] == 0
    assert all("error" in one["found"] for one in asked["updated"])
    for one in [*asked["running"], *asked["new"]]:
        assert one.get("error") == "EngineDirtyError", one
        assert "refuses requests" in one["message"]
    assert all(asked["is ours"])
    assert asked["num_unfinished"] == 0
    assert asked["same"]
