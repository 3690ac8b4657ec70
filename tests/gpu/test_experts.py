"""Mixtures of experts and latent attention on real GPUs: bytes, tokens and log-probabilities.

    python -m pytest tests/gpu/test_experts.py                        # everything that fits this machine's GPUs and engines
    FP8REFIT_EXPERTS=experts,experts-eager python -m pytest ...       # some of `CASES`

Each engine runs in processes of its own (`models_modes.py`), those it is compared with in others that our fill never touched.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.judging import comparison
from tests.gpu.scripts import run_scenario, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]

WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "experts"
TIMEOUT_S = float(os.environ.get("FP8REFIT_TIMEOUT_S", "300"))
NUM_GPUS = torch.cuda.device_count()
PLAIN_KERNELS = {"VLLM_USE_DEEP_GEMM": "0"}
"""Those of DeepGEMM are compiled for every shape of every layout, which takes minutes."""
DEEP_GEMM_EXPERTS = {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MOE_USE_DEEP_GEMM": "1"}


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    tp: int = 1
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = tuple(PLAIN_KERNELS.items())
    engine: str = "vllm"


MOE, MLA, GLM = "qwen3-moe-small", "deepseek-small", "glm4-moe-small"
MLA_OF_SGLANG = ("--attention", "triton")
"""FlashAttention 3 is large, and a host may have been given it without the head sizes of latent attention."""
CASES = {
    "experts": Case(shape=MOE),
    "experts-eager": Case(shape=MOE, options=("--eager",)),
    "experts-deepgemm": Case(shape=MOE, environment=tuple(DEEP_GEMM_EXPERTS.items())),
    "experts-tp2": Case(shape=MOE, tp=2),
    "experts-ep2": Case(shape=MOE, tp=2, options=("--ep",)),
    "experts-tp4": Case(shape=MOE, tp=4),
    "experts-ep4": Case(shape=MOE, tp=4, options=("--ep",)),
    "latent": Case(shape=MLA, environment=()),
    "latent-eager": Case(shape=MLA, options=("--eager",)),
    "latent-tp2": Case(shape=MLA, tp=2),
    "sglang_experts": Case(shape=MOE, engine="sglang"),
    "sglang_experts-eager": Case(shape=MOE, options=("--eager",), engine="sglang"),
    "sglang_experts-tp2": Case(shape=MOE, tp=2, engine="sglang"),
    "sglang_experts-ep2": Case(shape=MOE, tp=2, options=("--ep",), engine="sglang"),
    "sglang_latent": Case(shape=MLA, options=MLA_OF_SGLANG, engine="sglang"),
    "sglang_latent-tp2": Case(shape=MLA, tp=2, options=MLA_OF_SGLANG, engine="sglang"),
    "sglang_glm": Case(shape=GLM, engine="sglang"),
    "sglang_glm-tp2": Case(shape=GLM, tp=2, engine="sglang"),
    "sglang_glm-ep2": Case(shape=GLM, tp=2, options=("--ep",), engine="sglang"),
}
"""GLM's shared expert lies among the others in SGLang, but for ranks that share experts out."""
ASKED = os.environ.get("FP8REFIT_EXPERTS", ",".join(CASES)).split(",")
RUN = [
    name for name, case in CASES.items() if name in ASKED and case.tp <= NUM_GPUS and find_spec(case.engine) is not None
]


def command_of(*names):
    return f"FP8REFIT_EXPERTS={','.join(names)} python -m pytest tests/gpu/test_experts.py"


def run(mode, name, case):
    """Run one engine in its own processes and give what it found."""
    return run_scenario(
        "models",
        [
            *(mode, "--engine", case.engine, "--shape", case.shape, "--tp", case.tp, "--name", name),
            *("--work", WORK / name, *case.options),
        ],
        out=WORK / f"{mode}-{name}.json",
        log=f"experts-{mode}-{name}",
        timeout_s=TIMEOUT_S,
        environment=dict(case.environment),
    )


@pytest.fixture(scope="module", params=RUN)
def engines(request):
    """What an engine held and said after refits, and what a fresh one does."""
    name = request.param
    return name, run("refit", name, CASES[name]), run("fresh", name, CASES[name])["fresh"]


def kinds_of(refitted):
    return {kind: refitted[kind] for kind in ("stacked", "single", "after_reload")}


def test_live_bytes_of_every_rank_equal_those_of_a_freshly_booted_engine(engines):
    name, refitted, fresh = engines
    assert len(fresh["live"]) == CASES[name].tp
    for kind, found in kinds_of(refitted).items():
        assert found["live"] == fresh["live"], kind
    assert not refitted["moved"]


def test_tokens_and_log_probabilities_equal_those_of_a_freshly_booted_engine(engines):
    _, refitted, fresh = engines
    for kind, found in kinds_of(refitted).items():
        assert found["generated"] == fresh["generated"], kind
    assert refitted["noise"]["generated"]["tokens"] != fresh["generated"]["tokens"]


def test_cuda_graphs_replayed_unless_the_engine_is_eager(engines):
    name, refitted, _ = engines
    replays = min(refitted["after_reload"]["graph_replays"])
    assert (replays == 0) is ("--eager" in CASES[name].options)


def test_write_the_result(engines):
    name, refitted, fresh = engines
    case = CASES[name]
    result = {
        "what": f"{case.engine}, {case.shape} shape, {case.tp} rank(s) {' '.join(case.options)}",
        "command": command_of(name),
        "gpu": refitted["gpu"],
        "versions": refitted["versions"],
        "kernels": refitted["kernels"],
        "num_tensors": {
            kind: refitted[key]["num_tensors"] if key else refitted["num_tensors"]
            for kind, key in {"stacked": None, "single": "single"}.items()
        },
        "live_tensors_compared": sum(map(len, fresh["live"])),
        "equal_to_fresh_boot": {
            kind: comparison(found, fresh) | {"graph_replays": found["graph_replays"]}
            for kind, found in kinds_of(refitted).items()
        },
    }
    write_result(f"experts_{name}", result)
