"""Real vLLM on a GPU: bytes, tokens, log-probabilities, speed and memory of a refit. Writes a result for the documentation.

    python -m pytest tests/gpu                          # the Qwen3-8B shape; FP8REFIT_GPU_SHAPE=qwen3-0.6b for a quick look

Each engine runs in a process of its own (`run_vllm.py`): the fresh engine that a refitted one is compared with was never
touched by our fill.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import RESULTS, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]
pytest.importorskip("vllm")

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit"))
MIB = 1 << 20
COMMAND = "python -m pytest " + shlex.join(sys.argv[1:])
FAMILIES = ("llama", "llama_tied", "qwen2", "mistral")


def run(mode, shape=SHAPE):
    """Run one engine in its own process and give what it found."""
    out = WORK / f"{mode}.json"
    WORK.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("run_vllm.py")
    command = [sys.executable, str(script), mode, "--shape", shape, "--work", str(WORK / shape), "--out", str(out)]
    with open(RESULTS / f"vllm-{mode}.log", "w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def refitted():
    RESULTS.mkdir(parents=True, exist_ok=True)
    return run("refit")


@pytest.fixture(scope="module")
def fresh(refitted):
    return run("fresh")


@pytest.fixture(scope="module")
def baseline(fresh):
    return run("baseline")


@pytest.fixture(scope="module")
def families(baseline):
    return run("families", "families"), run("fresh_families", "families")


@pytest.fixture(scope="module")
def slept(families):
    return run("sleep", "qwen3-0.6b")


def median(rows, key):
    return statistics.median(row[key] for row in rows)


def test_live_bytes_equal_those_of_a_freshly_booted_engine(refitted, fresh):
    assert refitted["live"] == fresh["live"]


def test_tokens_and_log_probabilities_equal_those_of_a_freshly_booted_engine(refitted, fresh):
    assert refitted["generated"] == fresh["generated"]


def test_cuda_graphs_replayed_on_both_sides(refitted, fresh):
    assert refitted["graph_replays_in_generate"] > 0
    assert fresh["graph_replays_in_generate"] > 0


def test_fifty_policies_are_each_served_exactly(refitted):
    assert len(refitted["steps"]) == 50
    assert refitted["wrong_slots_first"] == 0
    assert [step["wrong_slots"] for step in refitted["steps"]] == [0] * 50
    assert len({step["token"] for step in refitted["steps"]}) > 10


def test_the_first_policy_comes_back_byte_for_byte_after_fifty(refitted):
    assert refitted["live_again"] == refitted["live"]
    assert refitted["generated_again"] == refitted["generated"]


def test_nothing_moves_and_nothing_grows(refitted):
    assert refitted["moved"] == []
    assert max(step["grown_bytes"] for step in refitted["steps"]) <= 0


def test_extra_memory_is_small(refitted):
    assert max(step["peak_extra_bytes"] for step in [refitted["first_refit"], *refitted["steps"]]) <= 64 * MIB


def test_bad_input_is_named_refused_and_healed(refitted):
    bad = refitted["bad_input"]
    name = "model.layers.7.mlp.up_proj.weight"
    assert bad["strict"] == {"names": [name], "untouched": True, "dirty": False}
    assert bad["fused"] == {"names": [name], "dirty": True}
    assert bad["refused_s"] < 1
    assert bad["left_behind"] == 0
    assert bad["healed"]
    assert bad["busy"]


def test_streams_give_the_same_bytes_in_two_buckets(refitted):
    for kind, stream in refitted["streams"].items():
        assert stream["same_bytes"], kind
        assert stream["peak_extra_bytes"] <= 2 * 256 * MIB + 64 * MIB, kind


def test_fill_runs_at_copy_speed(refitted, baseline):
    for run_, rows in ((refitted, refitted["steps"]), (baseline, baseline["ours"])):
        roofline_s = run_["num_bytes"] / run_["copy_gb_per_s"] / 1e9
        assert median(rows, "fill_device_s") / roofline_s <= 1.10


def test_forty_times_faster_than_the_engines_own_reload(baseline):
    assert [row["wrong_slots"] for row in baseline["ours"] if row["wrong_slots"] is not None] == [0, 0]
    assert [row["wrong_slots"] for row in baseline["reload_weights"] if row["wrong_slots"] is not None] == [0, 0]
    assert median(baseline["reload_weights"], "s") / median(baseline["ours"], "s") >= 40


def test_first_refit_and_host_time(refitted, baseline):
    assert baseline["first_refit"]["wall_s"] <= 1.0
    assert median(refitted["steps"], "first_launch_s") <= 2e-3


def test_write_the_result(refitted, fresh, baseline):
    steps, ours, reloads = refitted["steps"], baseline["ours"], baseline["reload_weights"]
    roofline_s = baseline["num_bytes"] / baseline["copy_gb_per_s"] / 1e9
    result = {
        "what": f"vLLM, {SHAPE} shape with outlier channels, BF16 CUDA tensors into a live block-FP8 engine",
        "command": COMMAND,
        "gpu": refitted["gpu"],
        "versions": refitted["versions"],
        "kernels": refitted["kernels"],
        "num_tensors": refitted["num_tensors"],
        "bytes_read_and_written": refitted["num_bytes"],
        "equal_to_fresh_boot": {
            "live_tensors_compared": len(fresh["live"]),
            "live_bytes": refitted["live"] == fresh["live"],
            "tokens": refitted["generated"]["tokens"] == fresh["generated"]["tokens"],
            "log_probabilities": refitted["generated"] == fresh["generated"],
            "graph_replays_in_generate": refitted["graph_replays_in_generate"],
        },
        "fifty_refits": {
            "wrong_slots": sum(step["wrong_slots"] for step in steps),
            "moved_tensors": len(refitted["moved"]),
            "max_grown_bytes": max(step["grown_bytes"] for step in steps),
            "max_peak_extra_bytes": max(step["peak_extra_bytes"] for step in steps),
            "wall_ms_median": median(steps, "wall_s") * 1e3,
            "fill_device_ms_median": median(steps, "fill_device_s") * 1e3,
            "first_launch_ms_median": median(steps, "first_launch_s") * 1e3,
            "copy_gb_per_s": refitted["copy_gb_per_s"],
            "fill_over_roofline": median(steps, "fill_device_s")
            * refitted["copy_gb_per_s"]
            * 1e9
            / refitted["num_bytes"],
        },
        "first_refit_cold_kernel_cache": refitted["first_refit"],
        "first_refit_warm_kernel_cache": baseline["first_refit"],
        "against_reload_weights": {
            "rounds": len(ours),
            "ours_plan_fill_verify_ms_median": median(ours, "s") * 1e3,
            "ours_phases_ms_median": {
                phase: statistics.median(row["phases_s"][phase] for row in ours) * 1e3 for phase in ours[0]["phases_s"]
            },
            "ours_first_launch_ms_median": median(ours, "first_launch_s") * 1e3,
            "ours_fill_device_ms_median": median(ours, "fill_device_s") * 1e3,
            "copy_gb_per_s": baseline["copy_gb_per_s"],
            "roofline_ms": roofline_s * 1e3,
            "fill_over_roofline": median(ours, "fill_device_s") / roofline_s,
            "reload_weights_ms_median": median(reloads, "s") * 1e3,
            "reload_weights_peak_extra_bytes": max(row["peak_extra_bytes"] for row in reloads),
            "flush_ms": baseline["flush_s"] * 1e3,
            "times_faster": median(reloads, "s") / median(ours, "s"),
            "ours_ms": [row["s"] * 1e3 for row in ours],
            "reload_weights_ms": [row["s"] * 1e3 for row in reloads],
        },
        "streams": refitted["streams"],
        "bad_input": refitted["bad_input"],
    }
    write_result(f"vllm_{SHAPE}", result)


def test_other_families_equal_a_fresh_boot_too(families):
    refitted, fresh = families
    for family in FAMILIES:
        assert refitted[family]["live"] == fresh[family]["live"], family
        assert refitted[family]["tokens"] == fresh[family]["tokens"], family
        assert refitted[family]["logprobs"] == fresh[family]["logprobs"], family


def test_sleep_mode(slept):
    checks = {key: value for key, value in slept.items() if key.startswith("level")}
    assert len(checks) == 3
    for kind, check in checks.items():
        assert "asleep" in check["refused"], kind
        assert check["same_bytes"], kind
        assert check["same_output"], kind
        if kind.endswith("kv_cache first"):
            assert "kv_cache awake" in check["refused"], kind


def test_write_the_result_of_families_and_sleep(families, slept):
    refitted, fresh = families
    result = {
        "what": "vLLM, small eager engines of the other dense families; Qwen3-0.6B shape under sleep mode",
        "command": COMMAND,
        "gpu": slept["gpu"],
        "versions": slept["versions"],
        "families": {
            family: {
                "kernels": refitted[family]["kernels"],
                "aliases": refitted[family]["aliases"],
                "live_tensors_compared": len(fresh[family]["live"]),
                "live_bytes_equal": refitted[family]["live"] == fresh[family]["live"],
                "tokens_and_log_probabilities_equal": (refitted[family]["tokens"], refitted[family]["logprobs"])
                == (fresh[family]["tokens"], fresh[family]["logprobs"]),
            }
            for family in FAMILIES
        },
        "sleep_qwen3-0.6b": {key: value for key, value in slept.items() if key.startswith("level")},
    }
    write_result("vllm_families_sleep", result)
