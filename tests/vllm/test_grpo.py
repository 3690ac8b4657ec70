"""The example of reinforcement learning, its rollouts by real vLLM on the CPU. What is and is not real here: `conftest.py`."""

import json
from pathlib import Path

import pytest

from tests.vllm.processes import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
TINY = ["--set", "enforce_eager=true", "--set", "num_gpu_blocks_override=64", "--prompts", "8", "--target", "0.05"]


VARIANTS = {"bf16": ("bf16",), "fp8kv": ("fp8kv+token", "fp8kv-stale")}
"""By the precision of their engine."""


@pytest.fixture
def run_example(starter, tmp_path):
    """Run an example with vLLM, and give what it prints."""

    def run(example, *arguments):
        asked = {"script": example, "arguments": ["--engine", "vllm", *arguments]}
        (found,) = run_scenario(
            starter, "script", asked, tmp_path, timeout_s=280, environment={"FP8REFIT_TEST_KERNEL": "fp32"}
        ).drivers
        return found["output"]

    return run


def test_every_step_is_sampled_by_the_engine_that_was_refitted(run_example, tmp_path):
    for variants in VARIANTS.values():
        few = ["--variants", ",".join(variants), "--lr", "1e-2", "--steps", "3", *TINY]
        run_example(EXAMPLE, *few, "--out", str(tmp_path))
    runs = {run["variant"]: run["steps"] for run in json.loads((tmp_path / "grpo.json").read_text())["runs"]}
    assert runs.keys() == {variant for variants in VARIANTS.values() for variant in variants}
    stale = runs.pop("fp8kv-stale")
    for steps in runs.values():
        assert len(steps["step"]) == 3
        assert all(0 < k3 < 0.05 for k3 in steps["k3"])  # a policy that moved this far would be elsewhere
        assert stale["k3"][-1] > 10 * max(steps["k3"])


def test_the_short_example_refits_vllm_after_every_step(run_example):
    assert "version 2: reward 0." in run_example(EXAMPLE.with_name("grpo_short.py"), "--steps", "2")
