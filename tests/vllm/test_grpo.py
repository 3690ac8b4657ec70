"""The example of reinforcement learning, its rollouts by real vLLM on the CPU. What is and is not real here: `conftest.py`."""

import json
from pathlib import Path

import pytest

from tests.vllm.processes import run_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
KERNEL = {"FP8REFIT_TEST_KERNEL": "fp32"}
TINY = ["--set", "enforce_eager=true", "--set", "num_gpu_blocks_override=64", "--prompts", "8", "--target", "0.05"]


VARIANTS = ["bf16", "fp8kv+token", "fp8kv-stale"]


def test_every_step_is_sampled_by_the_engine_that_was_refitted(environment, tmp_path):
    arguments = [EXAMPLE, "--engine", "vllm", "--variants", ",".join(VARIANTS), "--lr", "1e-2", "--steps", "3", *TINY]
    run_python([*arguments, "--out", tmp_path], environment | KERNEL, tmp_path, timeout_s=280)
    runs = {run["variant"]: run["steps"] for run in json.loads((tmp_path / "grpo.json").read_text())["runs"]}
    assert set(runs) == set(VARIANTS)
    *refitted, stale = (runs[variant] for variant in VARIANTS)
    for steps in refitted:
        assert len(steps["step"]) == 3
        assert all(0 < k3 < 0.05 for k3 in steps["k3"])  # a policy that moved this far would be elsewhere
        assert stale["k3"][-1] > 10 * max(steps["k3"])


def test_the_short_example_refits_vllm_after_every_step(environment, tmp_path):
    short = EXAMPLE.with_name("grpo_short.py")
    ended = run_python([short, "--engine", "vllm", "--steps", "2"], environment | KERNEL, tmp_path, timeout_s=280)
    assert "version 2: reward 0." in ended
