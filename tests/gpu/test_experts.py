"""Mixtures of experts and latent attention on real GPUs: bytes, tokens, log-probabilities, and the speed of 30B-A3B in vLLM.

    python -m pytest tests/gpu/test_experts.py                        # everything that fits this machine's GPUs and engines
    FP8REFIT_EXPERTS=speed,experts,experts-eager python -m pytest ... # some of `CASES`, and speed

Each engine runs in processes of its own (`models_modes.py`), those it is compared with in others that our fill never touched.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fp8refit.bench.code import INSIDE
from tests.gpu.judging import comparison, median, over_roofline, phases_ms, plan_fill_verify_s
from tests.gpu.scripts import run_scenario, write_result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(1200),
]

SPEED_SHAPE = os.environ.get("FP8REFIT_GPU_SHAPE", "qwen3-30b-a3b")
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
ASKED = os.environ.get("FP8REFIT_EXPERTS", ",".join(["speed", *CASES])).split(",")
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


@pytest.fixture(scope="module")
def speed():
    if "speed" not in ASKED or find_spec("vllm") is None:
        pytest.skip("not asked for, or no vLLM here")
    return run("speed", "speed", Case(shape=SPEED_SHAPE, environment=()))


def of(speed, kind):
    return [round_[kind] for round_ in speed["rounds"]]


@pytest.mark.parametrize("kind", ["single", "stacked"])
def test_experts_are_filled_at_copy_speed_and_right(speed, kind):
    wrong = [round_[kind]["wrong_slots"] for round_ in speed["rounds"]]
    assert [count for count in wrong if count is not None] == [0, 0]
    assert over_roofline(of(speed, kind), median(speed["rounds"], "copy_gb_per_s")) <= 1.15


def test_twenty_times_faster_than_the_engines_own_reload(speed):
    assert median(speed["rounds"], "reload_s") / median(of(speed, "single"), "wall_s") >= 20


def test_host_work_is_a_microsecond_a_tensor(speed):
    for kind in ("single", "stacked"):
        host_s = median(of(speed, kind), "wall_s") - median(of(speed, kind), "fill_device_s")
        assert host_s <= 10e-3 + 1e-6 * speed["rounds"][0][kind]["num_tensors"], kind


def test_extra_memory_is_small(speed):
    for kind in ("single", "stacked"):
        assert max(round_[kind]["peak_extra_bytes"] for round_ in speed["rounds"]) <= 64 << 20


def test_write_the_result_of_speed(speed):
    rounds = speed["rounds"]
    reload_s, copy_gb_per_s = median(rounds, "reload_s"), median(rounds, "copy_gb_per_s")
    result = {
        "what": f"vLLM, {SPEED_SHAPE} shape with outlier channels, BF16 CUDA tensors into a live block-FP8 engine",
        "command": command_of("speed"),
        "gpu": speed["gpu"],
        "versions": speed["versions"],
        "copy_gb_per_s": copy_gb_per_s,
        "reload_weights_ms_median": reload_s * 1e3,
        "reload_weights_peak_extra_bytes": max(round_["reload_peak_extra_bytes"] for round_ in rounds),
        **{
            kind: {
                "num_tensors": rows[0]["num_tensors"],
                "bytes_read_and_written": rows[0]["num_bytes"],
                "wall_ms_median": median(rows, "wall_s") * 1e3,
                "plan_fill_verify_ms_median": plan_fill_verify_s(rows) * 1e3,
                "fill_device_ms_median": median(rows, "fill_device_s") * 1e3,
                "fill_over_roofline": over_roofline(rows, copy_gb_per_s),
                "phases_ms_median": phases_ms(rows),
                "max_peak_extra_bytes": max(row["peak_extra_bytes"] for row in rows),
                "times_faster": reload_s / median(rows, "wall_s"),
            }
            for kind in ("single", "stacked")
            for rows in [of(speed, kind)]
        },
        "first_refit": speed["first_refit"],
        "first_stacked_refit": speed["first_stacked_refit"],
        "rounds": rounds,
    }
    write_result(f"experts_{SPEED_SHAPE}", result, INSIDE)
