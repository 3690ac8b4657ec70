"""TRL's GRPO trainer and server, unmodified, over real vLLM on the CPU. Ours: `trl_steps.py` and `cpu_transfer.py`."""

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


@pytest.fixture(scope="module", params=[(), ("sleep",), ("server",)], ids=["awake", "asleep between", "server"])
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
    said = [str(step["said"]) for step in trained["steps"]]
    assert len(set(said)) == len(said) == 3


@pytest.mark.parametrize("options", [(), ("server",)], ids=["colocated", "server"])
def test_without_the_drop_in_the_same_trainer_does_not_get_there(options, environment, tmp_path):
    found = train(environment | ENVIRONMENT, tmp_path / "off", *options)
    assert found["error"]
    assert not found["steps"]


def test_a_server_that_is_sent_nan_answers_nobody_and_the_next_policy_heals_it(environment, starter, tmp_path):
    found = train(environment | ON, tmp_path / "fault", "fault")
    assert found["error"]
    assert found["seconds"] < 60
    assert len(found["steps"]) == 3
    assert "status" in found["dirty"]
    healed = run_scenario(
        starter, "drop-in fresh", {"work": tmp_path / "fault", "policy": "policy-2"}, tmp_path, timeout_s=100
    )
    assert found["steps"][-1]["live"] == healed.drivers[0]["live"]
