"""A thousand refits of one vLLM engine: nothing grows, nothing moves, none gets slower, and the bytes are those of one refit.

python -m pytest tests/gpu/test_soak.py
FP8REFIT_SOAK=40 FP8REFIT_GPU_SHAPE=tiny python -m pytest tests/gpu/test_soak.py -m ""    # tries it on a CPU
"""

import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from fp8refit.bench.code import INSIDE
from tests.gpu.scripts import run_scenario, write_result

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-0.6b")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "soak"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "1100"))
NUM_REFITS = int(os.environ.get("FP8REFIT_SOAK", "1000"))
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and SHAPE != "tiny", reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]
pytest.importorskip("vllm")


def run(mode):
    arguments = [mode, "--shape", SHAPE, "--refits", NUM_REFITS, "--work", WORK]
    return run_scenario("soak", arguments, out=WORK / f"{mode}.json", log=f"soak-{mode}", timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def soaked():
    return run("soak")


@pytest.fixture(scope="module")
def once(soaked):
    return run("once")


def growth(soaked, key):
    """From the first look, after a tenth of the refits, to the last."""
    return soaked["held"][-1][key] - soaked["held"][0][key]


def test_every_refit_is_a_version(soaked):
    assert [row["version"] for row in soaked["refits"]] == [*range(2, NUM_REFITS + 1)]
    assert soaked["version"] == NUM_REFITS


def test_failures_were_refused_and_healed(soaked):
    assert set(soaked["errors"]) == {"incomplete", "NaN"}
    assert all(all(outcomes) for outcomes in soaked["errors"].values())


def test_tokens_are_those_of_their_policy(soaked):
    assert soaked["wrong_tokens"] == 0
    assert soaked["tokens"]["0"] != soaked["tokens"]["1"]


def test_nothing_grows(soaked):
    assert growth(soaked, "resident_bytes") <= 64 * MIB
    assert growth(soaked, "num_files") <= 0
    assert growth(soaked, "num_threads") <= 0
    if "free_gpu_bytes" in soaked["held"][0]:
        assert growth(soaked, "free_gpu_bytes") >= 0


def test_nothing_moves(soaked):
    assert soaked["moved"] == []


def test_the_last_policy_is_that_of_one_refit(soaked, once):
    assert soaked["fingerprints"] == once["fingerprints"]


def test_no_refit_gets_slower(soaked):
    assert soaked["median_of_the_last_s"] <= 1.2 * soaked["median_s"]


def test_the_result_is_written(soaked, once):
    result = {key: value for key, value in soaked.items() if key != "refits"}
    result["command"] = "python -m pytest " + shlex.join(sys.argv[1:])
    result["fingerprints_of_one_refit"] = once["fingerprints"]
    result["errors"] = {name: len(outcomes) for name, outcomes in soaked["errors"].items()}
    write_result("soak", result, INSIDE)
