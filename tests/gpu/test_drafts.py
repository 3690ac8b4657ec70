"""Real vLLM on a GPU with a model that drafts tokens: bytes and tokens of a refit of both, and what a draft left behind costs.

python -m pytest tests/gpu/test_drafts.py
"""

import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from fp8refit.bench.code import INSIDE
from tests.gpu.scripts import run_scenario, write_result

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-0.6b-untied")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "drafts"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(700),
]
pytest.importorskip("vllm")


def run(mode):
    arguments = [mode, "--shape", SHAPE, "--work", WORK]
    return run_scenario("drafts", arguments, out=WORK / f"{mode}.json", log=f"drafts-{mode}", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def refitted():
    return run("refit")


@pytest.fixture(scope="module")
def fresh(refitted):
    return run("fresh")


@pytest.mark.parametrize("what", ["live", "draft", "generated"])
def test_a_refit_of_both_equals_a_freshly_booted_engine(what, refitted, fresh):
    assert refitted["refitted"][what] == fresh[what]
    assert refitted["refitted"][what] != refitted["back"][what]


def test_cuda_graphs_replayed(refitted, fresh):
    assert min(refitted["refitted"]["graph_replays"] + fresh["graph_replays"]) > 0


def test_a_draft_of_the_same_policy_guesses_as_well_as_after_a_boot(refitted, fresh):
    assert refitted["refitted"]["acceptance"] == fresh["acceptance"] > 0.2
    assert refitted["back"]["acceptance"] > 0.2 < refitted["booted"]["acceptance"]


def test_a_draft_of_another_policy_guesses_worse(refitted):
    stale, back = refitted["stale"], refitted["back"]
    assert stale["acceptance"] < 0.5 * back["acceptance"]
    assert stale["draft"] == refitted["refitted"]["draft"] != back["draft"]
    assert stale["live"] == back["live"]


def test_fifty_refits_take_no_memory(refitted):
    assert refitted["grown_bytes"] <= 2 * MIB
    assert refitted["last"] == {**refitted["refitted"], "graph_replays": refitted["last"]["graph_replays"]}


def test_write_the_result(refitted, fresh):
    states = {name: refitted[name] for name in ("booted", "refitted", "stale", "back")} | {"fresh": fresh}
    times_ms = sorted(refitted["times_ms"])
    result = {
        "what": f"vLLM, {SHAPE} shape with outlier channels, FP8 per block, and a draft model of the same weights",
        "command": "python -m pytest " + shlex.join(sys.argv[1:]),
        "gpu": refitted["gpu"],
        "versions": refitted["versions"],
        "num_slots": refitted["num_slots"],
        "acceptance": {name: state["acceptance"] for name, state in states.items()},
        "guessed": {name: state["guessed"] for name, state in states.items()},
        "median_ms": times_ms[len(times_ms) // 2],
        "grown_bytes": refitted["grown_bytes"],
        "equals_fresh": all(refitted["refitted"][what] == fresh[what] for what in ("live", "draft", "generated")),
    }
    write_result("drafts_vllm", result, INSIDE)
