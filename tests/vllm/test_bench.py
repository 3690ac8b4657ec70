"""The benchmark on real vLLM engines: vLLM's own ways to take weights end with the bytes that a refit writes. On the CPU."""

import pytest

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
