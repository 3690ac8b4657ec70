"""Real SGLang on one GPU: bytes, tokens, log-probabilities and memory of refits. Writes a result for the documentation.

    python -m pytest tests/gpu/test_sglang.py                   # the Qwen3-8B shape: refitted, and booted afresh
    FP8REFIT_SGLANG=sleep,families python -m pytest ...         # some of: refit, fresh, sleep, families
    FP8REFIT_ONLINE=fp8 python -m pytest ...                    # SGLang quantizes by itself, in the fresh engine too

Every engine is in a process of its own (`refits_modes.py`), and its scheduler in another. What is not asked for is taken from
the working folder, if it was found there before.
"""

import json
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.judging import comparison, grown_bytes, over_roofline
from tests.gpu.scripts import run_scenario, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang"),
    pytest.mark.timeout(1200),
]

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
SMALL_SHAPE = "qwen3-0.6b"
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "sglang"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
ASKED = os.environ.get("FP8REFIT_SGLANG", "refit,fresh").split(",")
ONLINE = os.environ.get("FP8REFIT_ONLINE", "")
SET = {"FP8REFIT_ONLINE": ONLINE, "FP8REFIT_SGLANG": ",".join(ASKED)}
COMMAND = " ".join(
    [*(f"{name}={value}" for name, value in SET.items() if value), "python -m pytest", shlex.join(sys.argv[1:])]
)
MIB = 1 << 20
NUM_WARM_UP = 6


def run(mode, shape):
    """Run one engine and give what it found."""
    arguments = [mode, "--engine", "sglang", "--shape", shape, "--work", WORK / shape]
    arguments += ["--online", ONLINE] if ONLINE else []
    return run_scenario("refits", arguments, out=WORK / f"{mode}.json", log=f"sglang-{mode}", timeout_s=TIMEOUT_S)


def take(mode, shape):
    """What an engine found, now or before."""
    if mode in ASKED:
        return run(mode, shape)
    out = WORK / f"{mode}.json"
    if not out.exists():
        pytest.skip(f"{mode} was not asked for")
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def refitted():
    return take("refit", SHAPE)


@pytest.fixture(scope="module")
def fresh(refitted):
    if "fresh" in ASKED:
        run("checkpoint", SHAPE)
    return take("fresh", SHAPE)


@pytest.fixture(scope="module")
def slept():
    found = take("sleep", SMALL_SHAPE)
    if "unavailable" in found:
        pytest.skip(f"no sleep mode here: {found['unavailable']}")
    return found


@pytest.fixture(scope="module")
def families():
    return take("families", "families")["families"]


def test_live_bytes_equal_those_of_a_freshly_booted_engine(refitted, fresh):
    assert refitted["live"] == fresh["live"]


def test_tokens_and_log_probabilities_equal_those_of_a_freshly_booted_engine(refitted, fresh):
    assert refitted["generated"] == fresh["generated"]


def test_cuda_graphs_replayed_on_both_sides(refitted, fresh):
    assert min(refitted["graph_replays"]) > 0
    assert min(fresh["graph_replays"]) > 0


def test_fifty_refits_between_generations_hold_the_same_bytes_and_do_not_grow(refitted):
    steps = refitted["steps"]
    assert len(steps) == 50
    assert all(step["same_bytes"] for step in steps)
    assert refitted["policies_differ"] and not refitted["moved"]
    assert grown_bytes(steps) <= 2 * MIB  # one granule of the driver's
    assert len({tuple(step["num_files"]) for step in steps[NUM_WARM_UP:]}) == 1
    assert (refitted["again"]["live"], refitted["again"]["generated"]) == (refitted["live"], refitted["generated"])


def test_fill_runs_at_copy_speed(refitted):
    assert over_roofline(refitted["steps"], refitted["copy_gb_per_s"][0]) <= 1.10


def test_bad_values_are_named_refused_and_healed(refitted):
    bad = refitted["bad_input"]
    names = ["model.layers.0.mlp.up_proj.weight"]
    assert bad["strict"] == {"names": names, "untouched": True, "dirty": False}
    assert bad["fused"] == {"names": names, "dirty": True}
    assert bad["refused_s"] < 1
    assert bad["healed"] and bad["answers"]


def test_write_the_result(refitted, fresh):
    result = {
        "what": f"SGLang, its scheduler in another process, {SHAPE} shape with outlier channels, BF16 tensors on the same GPU",
        "command": COMMAND,
        "gpu": refitted["gpu"],
        "versions": refitted["versions"],
        "attention_backend": refitted["attention_backend"],
        "kernels": [" ".join(kernel) for kernel in refitted["kernels"]],
        "num_tensors": refitted["num_tensors"],
        "bytes_read_and_written": refitted["steps"][-1]["num_bytes"],
        "equal_to_fresh_boot": {
            "live_tensors_compared": len(fresh["live"][0]),
            **comparison(refitted, fresh),
            "graph_replays_in_generate": refitted["graph_replays"],
        },
        "fifty_refits": describe_steps(refitted),
        "first_refit_ms": refitted["first_refit"]["wall_s"] * 1e3,
        "bad_input": refitted["bad_input"],
    }
    write_result(f"sglang_{f'{ONLINE}_' if ONLINE else ''}{SHAPE}", result)


def describe_steps(refitted):
    steps = refitted["steps"]
    return {
        "max_extra_bytes": max(step["ranks"][0]["extra_bytes"] for step in steps),
        "max_grown_bytes": grown_bytes(steps),
        "all_bytes_right": all(step["same_bytes"] for step in steps),
        "moved": bool(refitted["moved"]),
    }


def unlike_fresh(found):
    """Live tensors that differ from those of the fresh boot."""
    refitted, fresh = found["refitted"]["live"][0], found["fresh"]["live"][0]
    return sorted(name for name in refitted.keys() | fresh.keys() if refitted.get(name) != fresh.get(name))


def has_scales_of_checkpoint(found):
    live = found["refitted"]["live"][0]
    return bool(found["scales"]) and all(live[name] == digest for name, digest in found["scales"].items())


def test_other_families_equal_a_fresh_boot_too(families):
    assert list(families) == ["qwen2", "llama_tied"]
    for family, found in families.items():
        assert has_scales_of_checkpoint(found), family
        # SGLang loads no block scale into a Llama (sgl-project/sglang#30234): a fresh one has what was in the memory.
        left_out = set(found["scales"]) if family == "llama_tied" else set()
        assert set(unlike_fresh(found)) <= left_out, family
        assert unlike_fresh(found) or found["refitted"]["generated"] == found["fresh"]["generated"], family


def test_memory_that_is_released_and_resumed(slept):
    assert len(slept["sleep"]) == 2
    for order, check in slept["sleep"].items():
        assert check["released_bytes"] > 100 * MIB, order
        assert all(check["refused"]), order
        assert check["unlike"] == [] and check["same_output"], order


def test_write_the_result_of_families(families):
    result = {
        "what": "SGLang, small engines of other dense families",
        "command": COMMAND,
        **origin("families"),
        "families": {
            family: {
                "kernels": found["kernels"],
                "aliases": found["aliases"],
                "live_tensors_compared": len(found["fresh"]["live"][0]),
                "live_tensors_unlike": unlike_fresh(found),
                "scales_equal_the_checkpoint": has_scales_of_checkpoint(found),
                "tokens_and_log_probabilities_equal": found["refitted"]["generated"] == found["fresh"]["generated"],
                "graph_replays_in_generate": found["refitted"]["graph_replays"],
            }
            for family, found in families.items()
        },
    }
    write_result("sglang_families", result)


def test_write_the_result_of_sleep(slept):
    what = f"SGLang, {SMALL_SHAPE} shape, refitted between release_memory_occupation and resume_memory_occupation"
    result = {"what": what, "command": COMMAND, **origin("sleep"), "sleep": slept["sleep"]}
    write_result(f"sglang_sleep_{SMALL_SHAPE}", result)


def origin(mode):
    found = json.loads((WORK / f"{mode}.json").read_text())
    return {"gpu": found["gpu"], "versions": found["versions"]}
