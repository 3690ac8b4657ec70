"""The example of reinforcement learning, its rollouts by real SGLang on the CPU. What is real here: `conftest.py`."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(280)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
CPU = {"device": "cpu", "max_total_tokens": 2048, "disable_cuda_graph": True, "log_level": "warning"}


def test_every_step_is_sampled_by_the_engine_that_was_refitted(run_engine, tmp_path):
    settings = [part for name, value in CPU.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    arguments = ["--engine", "sglang", "--variants", "fp8+token", "--lr", "1e-2", "--steps", "2", *settings]
    tiny = ["--prompts", "8", "--target", "0.05", "--out", str(tmp_path)]
    run_engine("script", within_s=250, script=EXAMPLE, arguments=[*arguments, *tiny])
    (run,) = json.loads((tmp_path / "grpo.json").read_text())["runs"]
    assert len(run["steps"]["step"]) == 2
    assert all(0 < k3 < 0.05 for k3 in run["steps"]["k3"])  # a policy that moved this far would be elsewhere
