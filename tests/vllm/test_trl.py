"""TRL's GRPO trainer, imported from its wheel and unmodified, over real vLLM on the CPU. `trl_steps.py` is all that is ours."""

import importlib.util
import json

import pytest

from tests.vllm.processes import HERE, run_python, run_scenario

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="`nox -s tests_trl` has TRL"),
]
ENVIRONMENT = {"FP8REFIT_TEST_KERNEL": "fp32", "FP8REFIT_QUANTIZATION": "fp8_per_block", "MASTER_ADDR": "127.0.0.1"}
ON = ENVIRONMENT | {"FP8REFIT_DROP_IN": "1"}


def train(environment, folder, *options):
    folder.mkdir()
    run_python([HERE / "trl_steps.py", folder, *options], environment, folder, timeout_s=280)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module", params=[(), ("sleep",)], ids=["awake", "asleep between"])
def trained(request, environment, starter, tmp_path_factory):
    """What TRL's engine held at each step, and what fresh engines hold that boot from the trainer's weights of that step."""
    work = tmp_path_factory.mktemp("trl")
    found = train(environment | ON, work / "on", *request.param)
    fresh = [
        run_scenario(starter, "drop-in fresh", {"work": work / "on", "policy": f"policy-{step}"}, work, timeout_s=100)
        for step in range(len(found["steps"]))
    ]
    return found | {"fresh": [outcome.drivers[0] for outcome in fresh]}


def test_after_each_step_the_engine_holds_what_a_fresh_one_boots(trained):
    assert trained["error"] == ""
    assert [step["version"] for step in trained["steps"]] == [1, 2, 3]
    for step, fresh in zip(trained["steps"], trained["fresh"], strict=True):
        assert step["live"] == fresh["live"]


def test_log_probabilities_move_with_every_step(trained):
    said = [str(step["said"]["logprobs"]) for step in trained["steps"]]
    assert len(set(said)) == len(said) == 3


def test_without_the_drop_in_the_same_trainer_does_not_get_there(environment, tmp_path):
    found = train(environment | ENVIRONMENT, tmp_path / "off")
    assert found["error"]
    assert not found["steps"]
