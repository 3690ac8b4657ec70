"""TRL's GRPO trainer and server, unmodified, over real vLLM on the CPU. Ours: `trl_steps.py` and `cpu_transfer.py`."""

import importlib.util
import json

import pytest

from tests.vllm.processes import HERE, Starter, run_scenario

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="`nox -s tests_trl` has TRL"),
]
ENVIRONMENT = {"FP8REFIT_TEST_KERNEL": "fp32", "FP8REFIT_QUANTIZATION": "fp8_per_block", "MASTER_ADDR": "127.0.0.1"}
ON = ENVIRONMENT | {"FP8REFIT_DROP_IN": "1"}


@pytest.fixture(scope="module")
def starter(environment, tmp_path_factory):
    """Of processes that have imported TRL too."""
    starter = Starter(["vllm.v1.worker.cpu_worker", "trl_steps"], environment, tmp_path_factory.mktemp("starter"))
    yield starter
    starter.close()


def train(starter, environment, folder, *options):
    folder.mkdir()
    asked = {"script": HERE / "trl_steps.py", "arguments": [str(folder), *options]}
    run_scenario(starter, "script", asked, folder, timeout_s=280, environment=environment)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module", params=[(), ("sleep",), ("server",)], ids=["awake", "asleep between", "server"])
def trained(request, starter, tmp_path_factory):
    """What TRL's engine held at each step, and what fresh engines hold that boot from the trainer's weights of that step."""
    work = tmp_path_factory.mktemp("trl")
    found = train(starter, ON, work / "on", *request.param)
    fresh = [
        run_scenario(starter, "drop-in fresh", {"work": work / "on", "policy": f"policy-{step}"}, work, timeout_s=100)
        for step in range(len(found["steps"]))
    ]
    return found | {"fresh": [outcome.drivers[0] for outcome in fresh]}


def test_after_each_step_the_engine_holds_what_a_fresh_one_boots(trained):
    assert trained["error"] == ""
    assert [step["version"] for step in trained["steps"]] == [1, 2, 3]
    for step, fresh in zip(trained["steps"], trained["fresh"], strict=True):
        assert step["live"] == [fresh["live"]]


def test_log_probabilities_move_with_every_step(trained):
    said = [str(step["said"]) for step in trained["steps"]]
    assert len(set(said)) == len(said) == 3


def test_without_the_drop_in_the_same_trainer_does_not_get_there(starter, tmp_path):
    found = train(starter, ENVIRONMENT, tmp_path / "off")
    assert found["error"]
    assert not found["steps"]


@pytest.fixture(scope="module", params=["1", "2"], ids=["one rank", "two ranks"])
def failed(request, starter, tmp_path_factory):
    """A server that was sent a NaN in one of many buckets, and then a whole policy."""
    work = tmp_path_factory.mktemp("failed")
    found = train(starter, ON, work / "on", "fault", request.param)
    layout = {"1": "multi-process", "2": "core in process"}[request.param]
    asked = {"layout": layout, "model": work / "on" / "policy-2"}
    fresh = run_scenario(starter, "drop-in fresh ranks", asked, work, timeout_s=100).drivers[0]
    return found | {"fresh": fresh["live"]}


def test_a_server_that_is_sent_nan_says_so_to_its_trainer_and_keeps_nobody_waiting(failed):
    # TRL's client asks again after an error: what failed must not succeed then.
    assert "/finish_weight_update" in failed["error"]
    assert failed["seconds"] < 60


def test_it_answers_nobody_until_the_next_policy_heals_it(failed):
    assert failed["dirty"]["status"] == 503
    assert "this engine refuses requests" in failed["dirty"]["said"]
    assert [step["version"] for step in failed["steps"]] == [1, 2, 3]
    assert failed["steps"][-1]["live"] == failed["fresh"]


def test_without_the_drop_in_a_server_takes_nan(starter, tmp_path):
    # Whole policies come out right there: vLLM quantizes what it reloads, if it quantized the engine itself.
    found = train(starter, ENVIRONMENT, tmp_path / "off", "fault")
    assert [step["version"] for step in found["steps"]] == [None] * 3
    assert "Request failed: 400" in found["error"]  # NaN among the log-probabilities of an answer
