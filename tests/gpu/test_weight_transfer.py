"""vLLM's weight-transfer API with fp8refit as its backend: the bytes against those of a refit, from the same GPU and another.

python -m pytest tests/gpu/test_weight_transfer.py
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import run_scenario, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "weight_transfer"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
WAYS = ("module", "stream", "broadcast")


@pytest.fixture(scope="module")
def found():
    return run_scenario(
        "weight_transfer",
        ["--shape", SHAPE, "--work", WORK],
        out=WORK / "found.json",
        log="weight-transfer",
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_bytes_are_those_of_a_refit(way, found):
    digests = found["fingerprints"]
    assert digests["refit"][0] != digests["refit"][1]
    assert digests[way] == digests["refit"]


def test_versions_are_those_that_a_refitter_sees(found):
    of_trainer, of_refitter = found["served_versions"]
    assert of_trainer == of_refitter > 0


def test_nan_is_named_and_healed(found):
    assert found["nan"] == {"names": ["model.layers.1.mlp.down_proj.weight"], "was_dirty": True, "healed": True}


def test_write_the_result(found):
    result = {
        "what": f"{SHAPE} by vLLM's weight-transfer API, module and stream on the engine's GPU, broadcast from another by NCCL",
        "command": "python -m pytest tests/gpu/test_weight_transfer.py",
        "gpu": found["gpu"],
        "versions": found["versions"],
        "nan": found["nan"],
        "equal_to_refit": {way: found["fingerprints"][way] == found["fingerprints"]["refit"] for way in WAYS},
    }
    write_result("weight_transfer", result)
