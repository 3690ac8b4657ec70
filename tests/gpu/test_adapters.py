"""Real vLLM on a GPU with LoRA adapters: bytes, tokens and log-probabilities of one that is refitted, against one from files.

python -m pytest tests/gpu/test_adapters.py
"""

import os
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import torch

from fp8refit.bench.code import INSIDE
from tests.gpu.scripts import run_scenario, write_result

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-0.6b-untied")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "adapters"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(400),
]
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def found():
    arguments = ["--shape", SHAPE, "--work", WORK]
    return run_scenario("adapters", arguments, out=WORK / "refit.json", log="adapters", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("what", ["held", "said"])
def test_a_refitted_adapter_equals_one_that_vllm_loads_from_files(what, found):
    assert found["refitted"][what] == found["loaded"][what] != found["old"][what]


def test_cuda_graphs_replayed(found):
    assert found["graph_replays"] > 0


def test_base_weights_stay(found):
    assert found["is_base_untouched"]


def test_fifty_refits_take_no_memory(found):
    assert found["grown_bytes"] <= 2 * MIB
    assert found["last"] == found["refitted"]


def test_write_the_result(found):
    result = {
        "what": f"vLLM, {SHAPE} shape in FP8 per block, LoRA of rank 16 on every linear layer, matrices on the GPU",
        "command": "python -m pytest " + shlex.join(sys.argv[1:]),
        "gpu": found["gpu"],
        "versions": found["versions"],
        **{name: found[name] for name in ("num_matrices", "num_bytes", "first_ms", "phases_ms", "grown_bytes")},
        "median_ms": statistics.median(found["times_ms"]),
        "median_load_ms": statistics.median(found["loads_ms"]),
        "equals_loaded": found["refitted"] == found["loaded"],
    }
    write_result("adapters_vllm", result, INSIDE)
