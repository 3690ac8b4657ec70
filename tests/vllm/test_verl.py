"""verl's own rollout worker, from its wheel and unmodified, over real vLLM on the CPU. Ours are `verl_steps.py` and
`verl_server_steps.py`."""

import importlib.util
import json
import uuid

import pytest

from tests.vllm.processes import HERE, run_python, run_scenario

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="`nox -s tests_verl` has verl"),
]
ENVIRONMENT = {
    "FP8REFIT_TEST_KERNEL": "fp32",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_platform",
    "FP8REFIT_QUANTIZATION": "fp8_per_block",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # to look into verl's server
    "RAY_USAGE_STATS_ENABLED": "0",
}
ON = ENVIRONMENT | {"FP8REFIT_DROP_IN": "1"}


def train(environment, folder, num_ranks, script="verl_steps.py"):
    folder.mkdir()
    environment = environment | {"VERL_RAY_JOB_ID": uuid.uuid4().hex[:8]}
    run_python([HERE / script, folder, num_ranks], environment, folder, timeout_s=450)
    return json.loads((folder / "found.json").read_text())


ENGINES = {
    "one rank": ("verl_steps.py", 1),
    "two ranks": ("verl_steps.py", 2),
    "two ranks of verl's server": ("verl_server_steps.py", 2),
}


@pytest.fixture(scope="module", params=ENGINES)
def trained(request, named, starter, tmp_path_factory):
    """What the engine held after each step, and what fresh engines hold that boot from the trainer's weights of that step."""
    work = tmp_path_factory.mktemp("verl")
    script, num_ranks = ENGINES[request.param]
    found = train(named | ON, work / "on", num_ranks, script)
    layout = {1: "multi-process", 2: "core in process"}[num_ranks]
    fresh = []
    for step in range(len(found["steps"])):
        asked = {"layout": layout, "model": work / "on" / f"policy-{step}"}
        fresh.append(run_scenario(starter, "drop-in fresh ranks", asked, work, timeout_s=100).drivers[0])
    return found | {"fresh": fresh}


def test_after_each_step_every_rank_holds_what_that_of_a_fresh_engine_boots(trained):
    assert trained["error"] == ""
    assert [set(step["versions"]) for step in trained["steps"]] == [{1}, {2}, {3}]
    for step, fresh in zip(trained["steps"], trained["fresh"], strict=True):
        assert step["live"] == fresh["live"]


def test_no_live_tensor_moves(trained):
    first, *others = (step["places"] for step in trained["steps"])
    assert all(places == first for places in others)


def test_log_probabilities_move_with_every_step(trained):
    said = [str(step["said"]["logprobs"]) for step in trained["steps"]]
    assert len(set(said)) == len(said) == 3


def test_without_the_drop_in_the_same_worker_does_not_get_there(named, tmp_path):
    found = train(named | ENVIRONMENT, tmp_path / "off", 1)
    assert found["error"]
    assert not found["steps"]
