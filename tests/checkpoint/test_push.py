"""`fp8refit push`, to fake servers: what it sends where, what it writes, and its exit codes."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fp8refit import RefitConfig
from fp8refit.checkpoint import push_checkpoint
from fp8refit.cli import commands as cli
from fp8refit.errors import EngineBusyError, EngineLostError
from fp8refit.remote.servers import order_handler
from fp8refit.remote.servers.orders import Place
from tests.fake_ranks import NORM, Q_PROJ, arm
from tests.fake_server import URL, Running, entry_point_of

OTHER = "http://fake:2"


@pytest.fixture
def running(monkeypatch):
    running = Running()
    entry_point = entry_point_of(running)
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [entry_point])
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
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
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


ABSENT = "http://127.0.0.1:1"


def test_each_server_is_told_about_also_one_that_is_not_there(running, replica, policy, checkpoint):
    result = push(checkpoint, "--to", URL, "--to", ABSENT, "--to", OTHER, "--json")
    assert result.exit_code == cli.EXIT_FAILED
    took, absent, too = json.loads(result.stdout)["servers"]
    assert [each["report"]["version"] for each in (took, too)] == [1, 1]
    assert (absent["url"], absent["engine"], absent["read_by"]) == (ABSENT, None, None)
    assert f"{ABSENT} is no server of an engine" in absent["error"]
    said = push(checkpoint, "--to", URL, "--to", ABSENT)
    for url, state in ((URL, " 2 "), (ABSENT, " failed ")):
        assert [state in line for line in said.stdout.splitlines() if url in line] == [True]
    assert f"{ABSENT}: UnsupportedEngineError: " in said.stderr


def test_no_server_takes_a_broadcast_while_one_is_not_there(running, replica, checkpoint):
    result = push(checkpoint, "--to", ABSENT, "--to", URL, "--to", OTHER, "--transport", "collective")
    assert result.exit_code == cli.EXIT_REFUSED
    assert f"{ABSENT} is no server of an engine" in result.stderr
    for url in (URL, OTHER):
        assert f"{url}: nothing was sent to any server, because of {ABSENT}" in result.stderr
    assert running.events == replica.events == []


def test_a_config_is_not_needed(running, replica, policy, checkpoint):
    assert not push_checkpoint(checkpoint, [URL]).failed
    assert push_checkpoint(str(checkpoint), [URL, OTHER], transport="collective").transport == "collective"
    running.cluster.assert_holds(policy, version=2)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--in-flight", "drop"], "--in-flight: 'drop': Input should be 'wait', 'abort', 'keep' or 'continue'"),
        (["--transport", "pigeon"], "--transport: 'pigeon': Input should be 'auto' or 'collective'"),
        (["--host", "10.0.0.1"], "--host: needs --transport collective"),
        (["--transport", "collective", "--host", 300 * "a"], "at most 255 characters"),
    ],
)
def test_options_that_are_none_are_refused(options, said, running, checkpoint):
    result = push(checkpoint, "--to", URL, *options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert running.events == []


# All or none.


def push_together(checkpoint, *options):
    return push(checkpoint, "--to", URL, "--to", OTHER, "--transport", "collective", "--timeout-s", "40", *options)


def test_replicas_that_see_no_file_take_one_broadcast_together(running, replica, policy, checkpoint, monkeypatch):
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
    result = push_together(checkpoint, "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["transport"] == "collective"
    assert [(each["url"], each["read_by"], each["report"]["version"]) for each in said["servers"]] == [
        (URL, "driver", 1),
        (OTHER, "driver", 1),
    ]
    for each in (running, replica):
        each.cluster.assert_holds(policy, version=1)
        assert "take" in each.controls.channel.steps


def test_servers_on_other_hosts_are_told_where_to_meet(running, replica, policy, checkpoint):
    replica.handler._place = Place(boot_id="another host", pid_namespace=1)
    result = push_together(checkpoint)
    assert result.exit_code == cli.EXIT_REFUSED
    assert f"the server at {OTHER} runs on another host" in result.stderr
    assert "--host" in result.stderr
    assert running.events == replica.events == []
    assert push_together(checkpoint, "--host", "127.0.0.1").exit_code == 0
    replica.cluster.assert_holds(policy, version=1)


def fail_to_pause(replica):
    async def pause(config):
        raise EngineBusyError("requests still run")

    replica.controls.pause = pause


def fail_to_prepare(replica):
    arm(replica.cluster.targets[1], "prepared", RuntimeError("injected"))


@pytest.mark.parametrize(
    ("fail", "said"), [(fail_to_pause, "requests still run"), (fail_to_prepare, "RuntimeError: injected")]
)
def test_one_that_refuses_is_named_and_leaves_the_others_as_they_were(fail, said, running, replica, checkpoint):
    assert push_together(checkpoint).exit_code == 0
    before = [each.cluster.live_bytes() for each in (running, replica)]
    fail(replica)
    result = push_together(checkpoint)
    assert result.exit_code == cli.EXIT_REFUSED
    for url in (URL, OTHER):
        (line,) = [line for line in result.stderr.splitlines() if line.startswith(f"{url}: ")]
        assert said in line
        assert line.endswith(f"; from the server at {OTHER}")
    assert [each.cluster.live_bytes() for each in (running, replica)] == before
    assert running.cluster.states == replica.cluster.states == [(False, 1)] * 2
    assert running.events[-1] == "resume"


def test_an_error_in_mid_transfer_leaves_all_refusing_and_the_next_push_heals(
    running, replica, policy, checkpoint, tmp_path
):
    bad = tmp_path / "bad.safetensors"
    save_file(policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)}, bad)
    result = push_together(bad, "--json")
    assert result.exit_code == cli.EXIT_REFUSED
    assert [(each["report"], each["is_dirty"]) for each in json.loads(result.stdout)["servers"]] == [(None, True)] * 2
    for each in (running, replica):
        assert each.cluster.states == [(True, 0)] * 2
        assert each.events[-1].startswith("refuse: ")
    bad.unlink()
    assert push_together(checkpoint).exit_code == 0
    for each in (running, replica):
        each.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_progress_counts_bytes_that_are_read(transport, running, replica, policy, checkpoint, monkeypatch):
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
    seen = {URL: [], OTHER: []}
    push_checkpoint(
        checkpoint,
        [URL, OTHER],
        RefitConfig(transport=transport),
        on_progress=lambda url, done, total: seen[url].append((done, total)),
    )
    num_bytes = sum(tensor.nbytes for tensor in policy.values())
    for steps in seen.values():
        assert steps == sorted(steps)
        assert len({done for done, _ in steps}) == len(policy)
        assert steps[-1] == (num_bytes, num_bytes)


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_a_file_that_is_cut_short_while_it_is_read_is_named_and_the_next_push_heals(
    transport, running, policy, tmp_path, monkeypatch
):
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
    first, last = ({name: policy[name] for name in names} for names in (list(policy)[:1], list(policy)[1:]))
    save_file(first, tmp_path / "1.safetensors")
    save_file(last, tmp_path / "2.safetensors")

    def on_progress(url, done, total):
        os.truncate(tmp_path / "2.safetensors", 100)

    result = push_checkpoint(tmp_path, [URL], RefitConfig(transport=transport), on_progress=on_progress)
    (pushed,) = result.failed
    assert f"{tmp_path}/2.safetensors: changed after it was checked" in pushed.error
    assert pushed.is_dirty
    assert running.events[-1].startswith("refuse: ")
    save_file(last, tmp_path / "2.safetensors")
    assert push(tmp_path, "--to", URL, "--transport", transport).exit_code == 0
    running.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(transport, running, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
    (tmp_path / "checkpoint").mkdir()
    save_file(policy, tmp_path / "checkpoint" / "model.safetensors")
    save_file({name: -tensor for name, tensor in policy.items()}, tmp_path / "next")

    def on_progress(url, done, total):
        if (tmp_path / "next").exists():
            (tmp_path / "next").rename(tmp_path / "checkpoint" / "model.safetensors")

    config = RefitConfig(transport=transport)
    result = push_checkpoint(tmp_path / "checkpoint", [URL], config, on_progress=on_progress)
    assert not result.failed and not (tmp_path / "next").exists()
    running.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_names_of_files_are_translated_here(transport, running, policy, tmp_path):
    save_file({f"actor.{name}": tensor for name, tensor in policy.items()}, tmp_path / "model.safetensors")
    said = push(tmp_path, "--to", URL, "--transport", transport, "--rename", "actor.=", "--json")
    assert json.loads(said.stdout)["servers"][0]["read_by"] == "driver"
    running.cluster.assert_holds(policy, version=1)
    said = push(tmp_path, "--to", URL, "--rename", "actor.")
    assert said.exit_code == 2 and "--rename" in said.output
