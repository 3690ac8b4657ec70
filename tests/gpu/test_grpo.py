"""Learning with FP8 rollouts by vLLM on a real GPU: `examples/grpo.py`, three seeds a variant.

    python -m pytest tests/gpu/test_grpo.py

It takes a few minutes; `FP8REFIT_MINUTES` (8) ends it sooner, and the same command goes on with the runs that the result in
`FP8REFIT_RESULTS` lacks. All runs share the GPU, 12 processes at a time: about 40 GiB of it, and their times mean nothing. Two
more runs tell the refit's share of a step, each alone. `python -m benchmarks.render` makes the page and pictures of
both. The other figures of that page are commands of the example itself, in the page.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.gpu.scripts import RESULTS, card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(1200),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
WORK = Path(os.environ.get("FP8REFIT_WORK", "/dev/shm/fp8refit")) / "grpo"
MINUTES = os.environ.get("FP8REFIT_MINUTES", "8")
MORE = shlex.split(os.environ.get("FP8REFIT_GRPO", ""))
"""Arguments of the example instead of those here."""
VARIANTS = ("bf16", "fp8", "fp8kv", "fp8+token", "fp8-stale", "unified")
ALONE = ("fp8", "fp8kv")
SEEDS = ("0", "1", "2")
UNFINISHED = 75
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [64, 128, 256]}
SETTINGS = {
    "compilation_config": GRAPHS,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 1 << 28,
    "gpu_memory_utilization": 0.02,  # then only looked for
}
PLAIN_KERNELS = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Which start fast."""


def run_example(name, *arguments):
    """What the example found, kept as `grpo_NAME_GPU.json` even if it failed."""
    kind = card(torch.cuda.get_device_name())
    file, work = RESULTS / f"grpo_{name}_{kind}.json", WORK / name
    work.mkdir(parents=True, exist_ok=True)
    for warm_up in (WORK / "vllm").glob("warm-up-*.pt"):
        if work != warm_up.parent:
            shutil.copy(warm_up, work)
    if file.exists():
        shutil.copy(file, work / "grpo.json")
    command = [sys.executable, EXAMPLE, "--engine", "vllm", "--size", "small", "--updates", "1", *arguments]
    command += ["--out", work, "--minutes", MINUTES]
    command += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    asked = {"FP8REFIT_GRPO_COMMAND": "python -m pytest tests/gpu/test_grpo.py"} if not MORE else {}
    environment = os.environ | PLAIN_KERNELS | asked | {"OMP_NUM_THREADS": "1"}
    with open(work / "log", "w") as log:
        ended = subprocess.run([*map(str, command), *MORE], env=environment, stdout=log, stderr=log)
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(work / "log", RESULTS / f"grpo_{name}.log")
    if (work / "grpo.json").exists():
        shutil.copy(work / "grpo.json", file)
    if ended.returncode == UNFINISHED:
        pytest.skip(f"the time was over; the same command goes on with what {file} lacks")
    assert ended.returncode == 0, (RESULTS / f"grpo_{name}.log").read_text()[-4000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def result():
    return run_example(
        "vllm", "--variants", ",".join(VARIANTS), "--seeds", ",".join(SEEDS), "--steps", "40", "--at-once", "12"
    )


@pytest.fixture(scope="module")
def alone(result):
    return run_example("alone_vllm", "--variants", ",".join(ALONE), "--steps", "12")


@pytest.fixture
def rows(result):
    return {row["variant"]: row for row in result["summary"]}


def test_every_variant_has_every_seed(result):
    ran = {(run["variant"], run["seed"]) for run in result["runs"]}
    assert {(variant, int(seed)) for variant in VARIANTS for seed in SEEDS} <= ran


def test_bf16_learns(rows):
    assert rows["bf16"]["reward"][1] >= rows["bf16"]["warm_up_reward"][1] + 0.3


def test_an_engine_that_is_never_refitted_falls_behind(rows):
    assert rows["fp8-stale"]["reward"][2] < rows["fp8"]["reward"][0] - 0.1
    assert rows["fp8-stale"]["k3"][0] > 3 * rows["fp8"]["k3"][2]


@pytest.mark.parametrize("variant", ["fp8", "fp8kv", "fp8+token", "unified"])
def test_fp8_rollouts_learn_too(rows, variant):
    assert rows[variant]["reward"][1] >= rows[variant]["warm_up_reward"][1] + 0.2
    assert rows[variant]["token_mult_prob_error"][1] < 1.05


def test_a_trainer_in_the_engines_precision_lowers_the_mismatch(rows):
    """About a hundred times, where it was measured on an H200."""
    assert rows["unified"]["k3"][1] <= rows["fp8"]["k3"][1] / 10


def test_refits_are_a_small_part_of_a_step(alone):
    shares = {row["variant"]: row["refit_share"][1] for row in alone["summary"]}
    assert shares["fp8"] < 0.05 and shares["fp8kv"] < 0.3  # a calibration is a prefill of its own
