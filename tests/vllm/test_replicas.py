"""Two running vLLM servers of two ranks each are refitted together, by gloo instead of NCCL. See `conftest.py`."""

import json
import re
import signal

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def found(run_engine, tmp_path_factory):
    return run_engine("replicas", work=tmp_path_factory.mktemp("replicas"), tensor_parallel_size=2)


@pytest.fixture
def policy(found):
    """What a server holds and says after an ordinary refit."""
    one, other = found["ordinary"]
    assert one == other
    return one


def test_push_brings_a_checkpoint_to_all_together(found, policy):
    push = found["push"]
    assert push["code"] == 0, push["log"]
    assert [(server["read_by"], server["error"]) for server in json.loads(push["said"])["servers"]] == [
        ("driver", None)
    ] * 2
    assert push["state"] == [policy] * 2


def test_the_example_prints_what_both_say_of_every_version(found):
    assert found["example"]["code"] == 0, found["example"]["log"]
    versions, said = zip(*(line.split(": rollouts ") for line in found["example"]["lines"]), strict=True)
    assert len(set(versions)) == 3 and all("on 4 ranks" in version for version in versions)
    for rollouts in map(json.loads, said):
        assert rollouts[0] == rollouts[1] and len(rollouts[0]) == 8


@pytest.fixture(scope="module")
def explored(run_engine, tmp_path_factory):
    return run_engine("explore", work=tmp_path_factory.mktemp("explore"))


def test_the_example_that_explores_moves_engines_of_two_precisions_together(explored):
    assert explored["script"]["code"] == 0, explored["script"]["log"]
    first, second = explored["script"]["lines"]
    said = r"version {}: reward [\d.]+, k3 of the explorer ([\d.e+-]+), of the scorer ([\d.e+-]+)"
    assert re.fullmatch(said.format(2), first) and re.fullmatch(said.format(3), second)
    explorer, scorer = (float(each) for each in re.fullmatch(said.format(3), second).groups())
    assert 0 <= scorer < explorer < 0.1


def test_engines_of_two_precisions_hold_one_policy_or_keep_the_last(explored):
    assert explored["together"] == explored["after"] == explored["alone"]
    assert explored["refused"]["error"] == "NonFiniteError"
    quantized, plain = (each["live"] for each in explored["together"])
    assert quantized != plain


def test_a_driver_killed_in_mid_broadcast_leaves_all_refusing_until_the_next(found, policy):
    killed = found["killed driver"]
    assert killed["code"] == -signal.SIGKILL
    for answer in killed["statuses"]:
        assert answer["status"] == 503
        assert "the driver of a refit died, part way" in answer["body"]["error"]["message"]
    assert killed["seconds"] < TIMEOUT_S / 2
    assert killed["next"] == 0
    assert killed["state"] == [policy] * 2


def test_a_server_that_died_is_named_and_leaves_the_other_as_it_was(found):
    assert found["gone"]["error"] == "EngineLostError"
    assert "restart it" in found["gone"]["message"]
    assert found["gone"]["untouched"]


def test_a_server_that_died_is_dropped_and_its_successor_joins_with_the_policy_of_the_other(found, policy):
    left = found["left"]
    assert left["engines"] == [True]
    assert left["both"] == left["one"] * 2
    assert left["both"] != [policy] * 2, "another one"
    assert left["versions"][0] == left["versions"][1]


def test_a_server_that_was_started_again_is_found_by_the_same_broadcaster_and_refitter(found, policy):
    assert found["back"]["together"] == [policy] * 2
    assert found["back"]["alone"] == [policy]


def test_a_server_killed_in_mid_broadcast_leaves_the_other_refusing_until_the_next_refit(found, policy):
    killed = found["killed server"]
    assert killed["error"] == "EngineLostError"
    assert killed["seconds"] < TIMEOUT_S
    assert killed["status"]["status"] == 503
    assert "cannot be reached" in killed["status"]["body"]["error"]["message"]
    assert killed["healed"] == [policy]
