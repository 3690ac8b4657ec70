"""vLLM's own weight-transfer API, with fp8refit as its backend, on real engines. What is real here: `conftest.py`."""

import signal

import pytest

from tests.vllm.processes import vllm_version

FAMILY, DOWN_PROJ = "qwen2_wide", "model.layers.1.mlp.down_proj.weight"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(118)]


def names_versions() -> bool:
    """Whether vLLM names the version of the weights that it serves. This file is collected where no vLLM is installed, too."""
    return vllm_version() >= (0, 28)


@pytest.fixture(scope="module", autouse=True)
def factories(environment):
    if vllm_version() < (0, 26):
        pytest.skip("this vLLM has no factory for trainers")


@pytest.fixture(scope="module")
def found(run_ranks):
    """What two ranks in processes of their own hold and say."""
    return run_ranks("weight transfer", FAMILY)


@pytest.fixture(scope="module")
def served(run_engine, tmp_path_factory):
    """What a server holds, and an engine in the trainer's process."""
    return run_engine("served transfer", work=tmp_path_factory.mktemp("served"))


def test_every_rank_holds_and_says_what_it_does_after_an_ordinary_refit(found):
    sent, ordinary = found["sent"], found["ordinary"]["2"]
    assert len(sent["live"]) == 2
    assert sent["live"] == ordinary["live"] != found["ordinary"]["1"]
    assert sent["outputs"] == ordinary["outputs"]


def test_kv_scales_are_calibrated_in_the_same_update(found):
    assert found["sent"]["scales"] == found["ordinary"]["2"]["scales"]
    assert any(scale not in (0.0, 1.0) for scale in found["sent"]["scales"][0].values())


def test_a_policy_may_be_broadcast(found):
    assert found["broadcast"] == found["ordinary"]["1"]


def test_trainer_driver_and_engine_name_one_version(found):
    assert found["sent"]["version"] == 4
    assert found["versions"] == [4, 4, "4" if names_versions() else None]


def test_fingerprints_are_those_that_any_driver_sees(found):
    sent, seen = found["fingerprints"]
    assert sent == seen
    assert len(set(sent)) == 2


def test_what_strangers_say_is_refused_and_every_ranks_answers_stay_in_step(found):
    strangers = found["strangers"]
    assert "call init_weight_transfer_engine first" in strangers["letter"]["message"]
    for foreign in ("foreign", "invitation"):
        assert "is not a message of fp8refit" in strangers[foreign]["message"]
    assert strangers["ranks"] == [0, 1]


def test_nan_leaves_the_engine_dirty_and_no_update_passes(found):
    assert found["nan"]["send"]["error"] == "NonFiniteError"
    assert found["nan"]["send"]["named"] == [DOWN_PROJ]
    assert found["nan"]["dirty"]
    assert "parts of two policies" in found["nan"]["finish"]["message"]
    assert found["nan"]["version"] == ("4" if names_versions() else None)


def test_the_next_update_heals(found):
    assert found["healed"] == found["ordinary"]["2"]["live"]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_server_driven_by_vllms_own_client_holds_the_bytes_of_an_ordinary_refit(seed, served):
    assert served[seed]["live"] == served["ordinary"][seed]
    assert served[seed]["told"] == ({"weight_version": seed} if names_versions() else None)
    assert served[seed]["says"]["status"] == 200


def test_the_server_says_what_the_policy_says(served):
    assert served["1"]["says"] != served["2"]["says"] == served["healed"]["says"]


def test_fingerprints_over_http_are_those_that_any_driver_sees(served):
    sent, seen = served["2"]["fingerprints"]
    assert sent == seen


def test_an_engine_in_the_trainers_process_holds_the_same_bytes(served):
    assert served["in process"] == {"live": served["ordinary"]["1"], "version": 3}


def test_draft_models_and_other_backends_are_refused(served):
    assert served["draft"] == served["init"] == 500


def test_a_trainer_killed_in_the_middle_is_replaced_and_the_policy_is_whole(served):
    assert served["killed"]["code"] == -signal.SIGKILL
    assert "another trainer has taken over this engine" in served["killed"]["first"]["message"]
    assert served["healed"]["live"] == served["ordinary"]["2"]
    assert served["healed"]["told"] == ({"weight_version": "3"} if names_versions() else None)
