"""Real vLLM on a GPU: bytes, tokens, log-probabilities and memory of a refit. Writes a result for the documentation.

    python -m pytest tests/gpu                          # the Qwen3-8B shape; FP8REFIT_GPU_SHAPE=qwen3-0.6b for a quick look
    FP8REFIT_ONLINE=mxfp8 python -m pytest tests/gpu/test_vllm.py       # vLLM quantizes by itself, in the fresh engine too

Each engine runs in a process of its own (`refits_modes.py`): the fresh engine that a refitted one is compared with was never
touched by our fill.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from fp8refit.bench.code import INSIDE
from fp8refit.bench.shapes import CHECKPOINTS
from tests.gpu.judging import comparison, grown_bytes, median, over_roofline
from tests.gpu.scripts import run_scenario, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]
pytest.importorskip("vllm")

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
ONLINE = os.environ.get("FP8REFIT_ONLINE", "")
HOW = "--checkpoint" if ONLINE in CHECKPOINTS else "--online"
INSIDE_OPTIONS = ("--inside", *((HOW, ONLINE) if ONLINE else ()))
OVER_COPY = {"mxfp8": 1.30, "nvfp4": 1.40}
"""Of formats whose fill may take longer than 1.1 times a copy of as many bytes."""
WAITING = {"nvfp4": 192, "fp8_per_tensor": 192}
"""MiB of a stream that wait until all that shares a scale has come: gate and up projections of a layer."""
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit"))
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "900"))
MIB = 1 << 20
COMMAND = "python -m pytest " + shlex.join(sys.argv[1:])
FAMILIES = ("llama", "llama_tied", "qwen2", "mistral")


def run(mode, shape=SHAPE, options=INSIDE_OPTIONS):
    """Run one engine in its own process and give what it found."""
    arguments = [mode, "--shape", shape, "--work", WORK / shape, *options]
    return run_scenario("refits", arguments, out=WORK / f"{mode}.json", log=f"vllm-{mode}", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def refitted():
    return run("refit")


@pytest.fixture(scope="module")
def fresh(refitted):
    return run("fresh")


@pytest.fixture(scope="module")
def families(fresh):
    return run("families", "families", ())["families"]


@pytest.fixture(scope="module")
def slept(families):
    return run("sleep", "qwen3-0.6b")


def test_live_bytes_equal_those_of_a_freshly_booted_engine(refitted, fresh):
    assert refitted["live"] == fresh["live"]


def test_tokens_and_log_probabilities_equal_those_of_a_freshly_booted_engine(refitted, fresh):
    assert refitted["generated"] == fresh["generated"]


def test_cuda_graphs_replayed_on_both_sides(refitted, fresh):
    assert min(refitted["graph_replays"] + fresh["graph_replays"]) > 0


def test_fifty_policies_are_each_served_exactly(refitted):
    assert len(refitted["steps"]) == 50
    assert refitted["first_refit"]["wrong_slots"] == 0
    assert [step["wrong_slots"] for step in refitted["steps"]] == [0] * 50
    assert len({step["tokens"][0][0] for step in refitted["steps"]}) > 10


def test_the_first_policy_comes_back_byte_for_byte_after_fifty(refitted):
    assert (refitted["again"]["live"], refitted["again"]["generated"]) == (refitted["live"], refitted["generated"])


def test_nothing_moves_and_nothing_grows(refitted):
    assert refitted["moved"] == []
    assert grown_bytes(refitted["steps"]) <= 0


def test_extra_memory_is_small(refitted):
    """Of every refit but the first, which proves its trace."""
    assert max(step["peak_extra_bytes"] for step in refitted["steps"]) <= 64 * MIB


def test_bad_input_is_named_refused_and_healed(refitted):
    bad = refitted["bad_input"]
    name = "model.layers.0.mlp.up_proj.weight"
    assert bad["strict"] == {"names": [name], "untouched": True, "dirty": False}
    assert bad["fused"] == {"names": [name], "dirty": True}
    assert bad["refused_s"] < 1
    assert bad["left_behind"] == 0
    assert bad["healed"]
    assert bad["busy"]


def test_streams_give_the_same_bytes_in_two_buckets(refitted):
    for kind, stream in refitted["sources"].items():
        assert stream["same_bytes"], kind
        assert stream["peak_extra_bytes"] <= (2 * 256 + 64 + WAITING.get(ONLINE, 0)) * MIB, kind


def test_fill_runs_at_copy_speed(refitted):
    assert over_roofline(refitted["steps"], refitted["copy_gb_per_s"][0]) <= OVER_COPY.get(ONLINE, 1.10)


def test_host_time(refitted):
    """Before its first launch, every refit looks for copies of weights among all that the engine holds: 36 000 references here,
    most of them not in the processor's caches.
    """
    assert median(refitted["steps"], "first_launch_s") <= 15e-3


def test_write_the_result(refitted, fresh):
    steps = refitted["steps"]
    result = {
        "what": f"vLLM, {SHAPE} shape with outlier channels, BF16 CUDA tensors into a live {ONLINE or 'block-FP8'} engine",
        "command": COMMAND,
        "gpu": refitted["gpu"],
        "versions": refitted["versions"],
        "kernels": refitted["kernels"],
        "num_tensors": refitted["num_tensors"],
        "bytes_read_and_written": steps[-1]["num_bytes"],
        "equal_to_fresh_boot": {
            "live_tensors_compared": len(fresh["live"][0]),
            **comparison(refitted, fresh),
            "graph_replays_in_generate": refitted["graph_replays"],
        },
        "fifty_refits": {
            "wrong_slots": sum(step["wrong_slots"] for step in steps),
            "moved_tensors": len(refitted["moved"]),
            "max_grown_bytes": grown_bytes(steps),
            "max_peak_extra_bytes": max(step["peak_extra_bytes"] for step in steps),
        },
        "first_refit_cold_kernel_cache": refitted["first_refit"],
        "streams": {kind: found["same_bytes"] for kind, found in refitted["sources"].items()},
        "bad_input": refitted["bad_input"],
    }
    write_result("_".join(filter(None, ("vllm", ONLINE, SHAPE))), result, INSIDE)


def test_other_families_equal_a_fresh_boot_too(families):
    assert tuple(families) == FAMILIES
    for family, found in families.items():
        assert found["refitted"]["live"] == found["fresh"]["live"], family
        assert found["refitted"]["generated"] == found["fresh"]["generated"], family


def test_sleep_mode(slept):
    assert len(slept["sleep"]) == 3
    for kind, check in slept["sleep"].items():
        assert check["refused"] == [True] * (2 if kind.endswith("kv_cache first") else 1), kind
        assert check["same_bytes"] and check["same_output"], kind


def test_write_the_result_of_families_and_sleep(families, slept):
    result = {
        "what": "vLLM, small eager engines of the other dense families; Qwen3-0.6B shape under sleep mode",
        "command": COMMAND,
        "gpu": slept["gpu"],
        "versions": slept["versions"],
        "families": {
            family: {
                "kernels": found["kernels"],
                "aliases": found["aliases"],
                "live_tensors_compared": len(found["fresh"]["live"][0]),
                "live_bytes_equal": found["refitted"]["live"] == found["fresh"]["live"],
                "tokens_and_log_probabilities_equal": found["refitted"]["generated"] == found["fresh"]["generated"],
            }
            for family, found in families.items()
        },
        "sleep_qwen3-0.6b": slept["sleep"],
    }
    write_result("vllm_families_sleep", result, INSIDE)
