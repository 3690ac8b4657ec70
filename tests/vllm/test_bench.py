"""The benchmarks on real vLLM engines, on the CPU: vLLM's own ways to take weights end with the bytes that a refit writes."""

import pytest

from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]


@pytest.fixture(scope="module", params=[False, True], ids=["checkpoint", "online"])
def result(request, run_engine):
    return run_engine("bench", online=request.param)


@pytest.mark.parametrize("name", ["reload_weights", "reload_weights, kernel format"])
def test_vllms_own_ways_end_with_the_same_bytes(name, result):
    (found,) = [other for other in result["others"] if other["name"] == name]
    assert found["equals_ours"] and found["is_repeatable"]
    assert found["wall_ms"]["count"] == 2


def test_refits_are_timed_phase_by_phase(result):
    assert result["is_repeatable"]
    assert {"plan", "flush", "fill", "verify"} <= result["phases_ms"].keys()
    assert result["settings"]["load_format"] == "dummy"
    assert ("--online" in result["command"]) == ("quantization" in result["settings"])


def test_a_bf16_engine_of_the_rollout_benchmark_holds_the_same_policy_as_others(starter, tmp_path):
    environment = {"FP8REFIT_TEST_KERNEL": "fp32"}
    (found,) = run_scenario(
        starter, "rollouts", {"work": tmp_path}, tmp_path, timeout_s=110, environment=environment
    ).drivers
    assert found["loaded"] == found["fresh"] != found["booted"]
