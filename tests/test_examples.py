"""What a user copies works."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICKSTART = Path(__file__).parents[1] / "docs" / "quickstart.md"


def test_the_transformers_loop_serves_every_version():
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "transformers_loop.py")], capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]


def test_the_quickstart_runs_as_it_stands_and_prints_what_it_says():
    """But for its last block, which needs an engine."""
    *blocks, last = re.findall(r"^```python\n(.+?)^```$", QUICKSTART.read_text(), re.MULTILINE | re.DOTALL)
    assert "vllm" in last
    result = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["engine", "transformers"],
        *(["version", "3"], ["tensors", "25"], ["quantized", "14"]),
    ]
    assert 'names begin with `actor.` and fit without it; pass rename=("actor.", "")' in result.stdout
    assert "fp8refit/fill_s " in result.stdout


def test_a_weight_synchronizer_for_nemo_rl_refits_and_says_what_failed():
    script = str(EXAMPLES / "nemo_rl_synchronizer.py")
    lines = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:3] == [f"version {version}, stale: False" for version in (1, 2, 3)]
    assert lines[3].startswith("refused, stale: True: weight sync failed: NaN or Inf in 1 tensor(s): lm_head.weight")


def test_an_fsdp_trainer_keeps_the_engine_of_its_first_rank_up_to_date():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launch, str(EXAMPLES / "fsdp_trainer.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]


def test_the_short_grpo_is_short_learns_and_leaves_its_engine_equal_to_the_policy():
    script = EXAMPLES / "grpo_short.py"
    assert len(script.read_text().splitlines()) <= 150
    command = [sys.executable, str(script), "--steps", "40"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    rewards = [float(re.match(r"version \d+: reward (.+?), k3 ", line)[1]) for line in lines]
    assert len(rewards) == 5
    assert rewards[-1] > 1.5 * rewards[0]


def test_grpo_learns_from_fp8_rollouts_and_goes_on_where_its_time_was_over(tmp_path):
    arguments = ["--variants", "fp8kv+token", "--steps", "12", "--target", "0.05", "--out", tmp_path]
    command = [sys.executable, EXAMPLES / "grpo.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, "--minutes", "0"], env=environment, capture_output=True, timeout=240)
    assert ended.returncode == 75 and b"run the same command again" in ended.stdout
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=240)
    results = json.loads((tmp_path / "grpo.json").read_text())
    (run,) = results["runs"]
    steps = run["steps"]
    assert steps["step"] == list(range(1, 13))
    assert steps["expected_reward"][-1] > run["warm_up_reward"] + 0.03
    assert all(0 < k3 < 0.02 for k3 in steps["k3"]) and all(ess > 0.9 for ess in steps["ess"])
    assert any("fp32" in kernel for kernel in run["kernels"])
    assert {"reward.png", "mismatch.png", "density.png"} <= {file.name for file in tmp_path.iterdir()}


def test_grpo_runs_several_runs_at_once_from_one_warm_up(tmp_path):
    arguments = ["--variants", "fp8", "--lr", "1e-5,1e-4", "--steps", "2", "--target", "0.005", "--prompts", "2"]
    command = [sys.executable, EXAMPLES / "grpo.py", *arguments, "--at-once", "2", "--out", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=280)
    results = json.loads((tmp_path / "grpo.json").read_text())
    assert {run["lr"] for run in results["runs"]} == {1e-5, 1e-4} and len(results["runs"]) == 2
    assert len({run["warm_up_reward"] for run in results["runs"]}) == 1
    assert "--at-once" in results["command"] and "--beside-others" not in results["command"]
    assert not any("refit_share" in row for row in results["summary"])  # times of runs beside others say nothing
    assert ended.stdout.decode().count("1 seed(s)") == 2
