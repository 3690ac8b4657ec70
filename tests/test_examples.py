"""What a user copies works."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DOCS = Path(__file__).parents[1] / "docs"
QUICKSTART = DOCS / "quickstart.md"


def blocks_of(page, language):
    return re.findall(rf"^```{language}\n(.+?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", ["trainer-lora.md", "trainer-megatron.md"])
def test_the_script_of_a_trainers_page_prints_what_the_page_says(page):
    """But for what follows it, which needs ranks."""
    (script, *_), (said,) = blocks_of(page, "python"), blocks_of(page, "text")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == said


@pytest.mark.parametrize(
    ("page", "example"), [("trainer-fsdp2.md", "fsdp_trainer.py"), ("trainer-ray.md", "ray_trainer.py")]
)
def test_what_a_trainers_page_shows_of_an_example_is_in_it(page, example):
    whole = [line.strip() for line in (EXAMPLES / example).read_text().splitlines()]
    for block in blocks_of(page, "python"):
        shown = [line.strip() for line in block.splitlines()]
        assert any(whole[start : start + len(shown)] == shown for start in range(len(whole))), block


def test_the_script_for_trl_sets_only_what_the_test_with_trl_sets():
    """Which runs TRL's trainer with a tiny model: `nox -s tests_trl`."""
    (script,) = blocks_of("trainer-trl.md", "python")
    tested = (DOCS.parent / "tests" / "vllm" / "trl_steps.py").read_text()
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    settings = {keyword.arg for call in calls for keyword in call.keywords}
    assert len(settings) > 8
    assert {name for name in settings if not re.search(rf"\b{name}\b", tested)} == set()


def test_a_weight_synchronizer_for_nemo_rl_refits_and_says_what_failed():
    script = str(EXAMPLES / "nemo_rl_synchronizer.py")
    lines = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.splitlines()
    *said, refused = blocks_of("trainer-nemo-rl.md", "text")[0].splitlines()
    assert lines[:3] == said == [f"version {version}, stale: False" for version in (1, 2, 3)]
    assert lines[3].startswith(refused)


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
