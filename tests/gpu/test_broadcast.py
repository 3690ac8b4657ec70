"""A trainer on one GPU, vLLM on others: bytes of a broadcast against those of a direct refit. `fp8refit bench refit` times it.

python -m pytest tests/gpu/test_broadcast.py                  # every case that fits the GPUs of this machine
FP8REFIT_BROADCAST=tp1 python -m pytest tests/gpu/test_broadcast.py
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import run_scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(1200),
]

SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-8b")
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "broadcast"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "420"))
NUM_WARM_UP = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    tp: int = 1
    replicas: int = 1

    @property
    def num_gpus(self) -> int:
        return 1 + self.tp * self.replicas


CASES = {"tp1": Case(), "tp2": Case(tp=2), "three-replicas": Case(replicas=3)}
ASKED = os.environ.get("FP8REFIT_BROADCAST", ",".join(CASES)).split(",")
RUN = [name for name, case in CASES.items() if name in ASKED and case.num_gpus <= torch.cuda.device_count()]


@pytest.fixture(scope="module", params=RUN)
def case(request):
    name, case = request.param, CASES[request.param]
    arguments = ["--shape", SHAPE, "--tp", case.tp, "--replicas", case.replicas, "--work", WORK / name]
    found = run_scenario(
        "broadcast",
        arguments,
        out=WORK / f"{name}.json",
        log=f"broadcast-{name}",
        timeout_s=TIMEOUT_S,
        environment={"VLLM_USE_DEEP_GEMM": "0"},
    )
    return name, found


def test_every_way_gives_the_same_bytes_on_every_rank(case):
    name, found = case
    digests = found["fingerprints"]
    assert len(digests["pull 1"]) == CASES[name].tp * CASES[name].replicas
    for seed in (1, 2):
        assert digests[f"fp8 {seed}"] == digests[f"bf16 {seed}"] == digests[f"pull {seed}"]
    assert digests["pull 1"] != digests["pull 2"]


def test_a_rank_receives_about_its_part(case):
    name, found = case
    for kind, of_rank in found["wire_bytes_of_rank"].items():
        assert max(of_rank) <= 1.1 * found["wire_bytes"][kind] / CASES[name].tp


def test_pushes_between_requests_fail_none_and_grow_nothing(case):
    _, found = case
    load = found["load"]
    assert len(load["tokens"]) == 50
    assert load["tokens"][0::2] == [load["tokens"][0]] * 25
    assert load["tokens"][1::2] == [load["tokens"][1]] * 25
    grown = [was - left for was, left in zip(load["free_bytes"][NUM_WARM_UP], load["free_bytes"][-1], strict=True)]
    assert max(grown) < 16 << 20


def test_nan_is_named_and_healed(case):
    _, found = case
    assert found["nan"] == {"names": ["model.layers.1.mlp.down_proj.weight"], "was_dirty": True, "healed": True}
