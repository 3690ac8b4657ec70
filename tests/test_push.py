"""`fp8refit push`, to fake servers: what it sends where, what it writes, and its exit codes."""

import json

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from fp8refit import cli
from fp8refit.errors import EngineLostError
from fp8refit.transport import clerk
from tests.fake_ranks import NORM
from tests.fake_server import URL, Running, entry_point_of

OTHER = "http://fake:2"


@pytest.fixture
def running(monkeypatch):
    running = Running()
    entry_point = entry_point_of(running)
    monkeypatch.setattr("fp8refit.engine.entry_points", lambda group: [entry_point])
    yield running
    running.close()


@pytest.fixture
def replica(running):
    """Another server, beside the one of `running`."""
    replica = Running()
    original = running.kind.deliver
    running.kind.recognise = lambda server: server.url in (URL, OTHER)
    running.kind.deliver = lambda server, message, *, timeout_s: (
        replica.answer(message) if server.url == OTHER else original(server, message, timeout_s=timeout_s)
    )
    yield replica
    replica.close()


@pytest.fixture
def policy(running):
    return running.cluster.make_policy(1)


@pytest.fixture
def checkpoint(policy, tmp_path):
    save_file(policy, tmp_path / "model.safetensors")
    return tmp_path


def push(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["push", *map(str, arguments)])


def test_a_checkpoint_is_sent_into_a_server(running, policy, checkpoint):
    result = push(checkpoint, "--to", URL + "/")
    assert result.exit_code == 0, result.output
    running.cluster.assert_holds(policy, version=1)
    assert URL in result.stdout


def test_json_is_alone_on_standard_output(running, policy, checkpoint):
    result = push(checkpoint, "--to", URL, "--json")
    said = json.loads(result.stdout)
    assert said["num_bytes"] == sum(tensor.nbytes for tensor in policy.values())
    (server,) = said["servers"]
    assert (server["url"], server["read_by"], server["error"]) == (URL, "server", None)
    assert server["report"]["version"] == 1


def test_a_file_that_the_server_cannot_see_is_read_here(running, policy, checkpoint, monkeypatch):
    monkeypatch.setattr(clerk, "can_read", lambda path: False)
    result = push(checkpoint / "model.safetensors", "--to", URL, "--json")
    assert json.loads(result.stdout)["servers"][0]["read_by"] == "driver"
    running.cluster.assert_holds(policy, version=1)


def test_every_replica_gets_it(running, replica, policy, checkpoint):
    result = push(checkpoint, "--to", URL, "--to", OTHER, "--json")
    assert result.exit_code == 0
    assert [server["report"]["version"] for server in json.loads(result.stdout)["servers"]] == [1, 1]
    for each in (running, replica):
        each.cluster.assert_holds(policy, version=1)


def test_a_replica_that_fails_is_named_with_what_the_others_hold(running, replica, policy, checkpoint, monkeypatch):
    async def fail(config):
        raise EngineLostError("it is gone")

    monkeypatch.setattr(replica.controls, "pause", fail)
    result = push(checkpoint, "--to", URL, "--to", OTHER)
    assert result.exit_code == cli.EXIT_FAILED
    assert f"{OTHER}: EngineLostError: it is gone" in result.stderr
    running.cluster.assert_holds(policy, version=1)
    assert replica.cluster.states == [(False, 0)] * 2


def test_nothing_is_sent_while_one_server_is_not_there(running, checkpoint):
    result = push(checkpoint, "--to", URL, "--to", "http://127.0.0.1:1")
    assert result.exit_code == cli.EXIT_REFUSED
    assert "is no server of an engine" in result.stderr
    assert running.events == []


def test_a_checkpoint_that_does_not_fit_is_refused(running, tmp_path):
    save_file({NORM: running.cluster.make_policy(1)[NORM]}, tmp_path / "model.safetensors")
    result = push(tmp_path, "--to", URL)
    assert result.exit_code == cli.EXIT_REFUSED
    assert "missing" in result.stderr
    assert running.events == []


def test_what_is_no_checkpoint_is_refused(running, tmp_path):
    assert push(tmp_path, "--to", URL).exit_code == cli.EXIT_REFUSED
    assert push(tmp_path / "nothing", "--to", URL).exit_code == cli.EXIT_REFUSED
    assert running.events == []


def test_in_flight_is_one_of_three(running, checkpoint):
    result = push(checkpoint, "--to", URL, "--in-flight", "drop")
    assert result.exit_code == 2
    assert "wait, abort or keep" in result.stderr
