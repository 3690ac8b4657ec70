"""The benchmarks on real vLLM engines, on the CPU: vLLM's own ways to take weights end with the bytes that a refit writes."""

import pytest

from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]


@pytest.fixture(scope="module", params=[False, True], ids=["checkpoint", "online"])
def result(request, run_engine):
    return run_engine("bench", online=request.param)


@pytest.mark.parametrize("name", ["reload_weights", "reload_weights-kernel-format"])
def test_vllms_own_ways_end_with_the_same_bytes(name, result):
    (found,) = [other for other in result["others"] if other["name"] == name]
    assert found["equals_ours"] and found["is_repeatable"]
    assert found["wall_ms"]["count"] == 2


@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_per_tensor"])
def test_engines_of_other_formats_are_timed_beside_their_own_reload(quantization, run_engine):
    found = run_engine("bench", online=True, quantization=quantization, strategies=("reload_weights", "generator"))
    assert [(other["equals_ours"], other["is_repeatable"]) for other in found["others"]] == [(True, True)] * 2
    assert found["settings"]["quantization"] == quantization
    assert f"--online --quantization {quantization} " in found["command"]


def test_refits_are_timed_phase_by_phase(result):
    assert result["is_repeatable"]
    assert {"plan", "flush", "fill", "verify"} <= result["phases_ms"].keys()
    assert result["settings"]["load_format"] == "dummy"
    assert ("--online" in result["command"]) == ("quantization" in result["settings"])


def test_trainers_ways_with_the_drop_in_and_without_end_with_the_same_bytes(run_engine):
    """In turn with refits, on one engine: the drop-in comes and goes."""
    ways = ("drop-in-tensors", "load_weights-tensors", "reload_weights", "update-512mib", "generator", "lora")
    result = run_engine("bench", online=True, strategies=ways)
    assert [other["name"] for other in result["others"]] == list(ways)
    assert [other["name"] for other in result["others"] if not other["equals_ours"]] == ["lora"]
    assert all(other["is_repeatable"] for other in result["others"])
    assert [other["first_ms"] is None for other in result["others"]] == [way == "reload_weights" for way in ways]


def bench_elsewhere(starter, folder, **asked):
    """In processes that find the tests' kernel by a plugin."""
    environment = {"FP8REFIT_TEST_KERNEL": "fp32", "VLLM_PLUGINS": "fp8refit,fp8refit_cpu_kernel"}
    (found,) = run_scenario(starter, "bench", asked, folder, timeout_s=280, environment=environment).drivers
    assert found["is_repeatable"]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_ways_into_another_process_end_with_the_same_bytes(model, starter, tmp_path):
    ways = ["cpu", "new-memory", "verify", "changes-counted", "broadcast", "nccl"]
    ways += ["stacked"] if model != "tiny" else ["broadcast-1gib"]
    found = bench_elsewhere(starter, tmp_path, place="outside", model=model, strategies=ways)
    assert [other["name"] for other in found["others"] if other["equals_ours"]] == ways


@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_a_server_answers_every_client_while_it_is_refitted(in_flight, starter, tmp_path):
    found = bench_elsewhere(starter, tmp_path, place="server", clients=2, in_flight=in_flight, strategies=["broadcast"])
    assert [other["equals_ours"] for other in found["others"]] == [True]
    assert found["clients"]["requests"] > 2 and found["clients"]["failed"] == 0
    how = "" if in_flight == "wait" else f"--in-flight {in_flight} "
    asked = f"--place server --clients 2 {how}--rounds 2 --warm-up 0 --seed 0 --strategies 'broadcast'"
    assert found["command"].endswith(asked)


def test_engines_of_the_rollout_benchmark_hold_the_same_policy_in_the_format_that_was_asked_for(starter, tmp_path):
    environment = {"FP8REFIT_TEST_KERNEL": "fp32"}
    (found,) = run_scenario(
        starter, "rollouts", {"work": tmp_path}, tmp_path, timeout_s=110, environment=environment
    ).drivers
    assert found["loaded"] == found["fresh"] != found["booted"]
    assert found["formats"] == ["fp32_dividing scales per row"]
