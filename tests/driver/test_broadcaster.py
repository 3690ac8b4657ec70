"""One trainer and several engines: all serve the new policy or none does, and what every rank of the trainer hears."""

import asyncio
import json
import socket
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

import fp8refit.driver.adapters
from fp8refit import (
    Broadcaster,
    CacheFlushError,
    EngineBusyError,
    EngineLostError,
    InvalidOptionError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    Refitter,
    UnsupportedEngineError,
)
from fp8refit.driver.engine_group import EngineGroup
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Reply
from fp8refit.remote.servers.http_client import Server
from tests.fake_ranks import (
    K_PROJ,
    Q_PROJ,
    Client,
    ClientEngine,
    ClientEntryPoint,
    Cluster,
    Drivers,
    Remote,
    arm,
    fail_once,
    manifest_of,
)
from tests.fake_server import URL, Running, entry_point_of
from tests.sharded_push import push_shards, push_stacks
from tests.trainer_ranks import TrainerRanks

TIMEOUT_S = 40.0


class Replicas:
    """Engines of one kind, each with a driver of its own, and one trainer for all."""

    def __init__(self, layouts=("tensor", "tensor"), *, suspends=(), **options):
        self.remotes = [Remote(Cluster(layout), suspends=place in suspends) for place, layout in enumerate(layouts)]
        self.broadcaster = Broadcaster(
            [remote.client for remote in self.remotes], **{"timeout_s": TIMEOUT_S, **options}
        )
        self.clusters = [remote.cluster for remote in self.remotes]

    def make_policy(self, seed):
        return self.clusters[0].make_policy(seed)

    def assert_hold(self, policy, *, version):
        for remote in self.remotes:
            remote.cluster.assert_holds(policy, version=version)
            assert remote.client.blocked is None

    def heals(self):
        policy = self.make_policy(9)
        report = self.broadcaster.push(policy)
        self.assert_hold(policy, version=report.version)

    @property
    def states(self):
        return [state for cluster in self.clusters for state in cluster.states]

    @property
    def blocked(self):
        return [remote.client.blocked is not None for remote in self.remotes]


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [ClientEntryPoint()])


@pytest.fixture(params=["during", "ahead"])
def replicas(request):
    opened = Replicas(collective={"stage": request.param})
    opened.is_ahead = request.param == "ahead"
    yield opened
    opened.broadcaster.close()


def test_every_replica_gets_every_byte_of_one_broadcast(replicas):
    for version in (1, 2):
        policy = replicas.make_policy(version)
        report = replicas.broadcaster.push(policy)
        replicas.assert_hold(policy, version=version)
        assert [rank.rank for rank in report.ranks] == [0, 1, 2, 3]
        assert report.version == replicas.broadcaster.version == version
    steps = [remote.channel.steps for remote in replicas.remotes]
    assert steps[0] == steps[1] == ["hello", "describe", "join", *["prepare", "take"] * 2]
    assert len(set(replicas.broadcaster.fingerprints())) == 2, "rank by rank the same"


def test_engines_are_prepared_then_paused_and_flushed_then_written(replicas):
    events = []
    for remote in replicas.remotes:
        remote.client.events = events
        remote.channel.on_request = lambda request: events.append(request.order.step)
    replicas.broadcaster.push(replicas.make_policy(1))
    order = [event for event in events if event in ("prepare", "pause", "flush", "take", "resume")]
    assert order == [step for step in ("prepare", "pause", "flush", "take", "resume") for _ in range(2)]


def test_a_single_engine(monkeypatch):
    single = Replicas(["pipeline"])
    policy = single.make_policy(1)
    single.broadcaster.push(policy)
    single.assert_hold(policy, version=1)
    single.broadcaster.close()


def test_engines_of_other_sizes_and_versions_come_to_the_same_version(replicas):
    alone = Refitter(replicas.remotes[1].client)
    for seed in (5, 6):
        alone.refit(replicas.make_policy(seed))
    assert replicas.broadcaster.version == 2
    policy = replicas.make_policy(1)
    assert replicas.broadcaster.push(policy).version == 3
    replicas.assert_hold(policy, version=3)


def want_powers_of_two(cluster):
    """Give one tensor of an engine other scales."""
    for shard in cluster.shards:
        shard._slots[:] = [
            replace(slot, format=BlockFormat(scale_format=ScaleFormat.UE8M0)) if slot.name == K_PROJ else slot
            for slot in shard._slots
        ]


def test_a_tensor_that_replicas_want_in_different_formats_travels_unquantized(replicas):
    want_powers_of_two(replicas.clusters[1])
    policy = replicas.make_policy(1)
    replicas.broadcaster.push(policy)
    replicas.assert_hold(policy, version=1)
    channel = replicas.remotes[0].channel
    (offer,) = [r.order.source for r in channel.requests if isinstance(r.order, messages.Prepare)]
    forms = {tensor.name: tensor.dtype for tensor in offer.tensors}
    assert (forms[K_PROJ], forms[Q_PROJ]) == ("bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize("fault", ["ready", "judged", "prepared"])
def test_an_error_before_writing_leaves_every_replica_serving(fault, replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    arm(replicas.clusters[1].targets[0], fault, RuntimeError("injected"))
    with pytest.raises(RankFailedError, match="injected"):
        replicas.broadcaster.push(replicas.make_policy(2))
    replicas.assert_hold(replicas.make_policy(1), version=1)
    replicas.heals()


@pytest.mark.parametrize("what", ["busy", "flush"])
def test_an_engine_that_cannot_stop_leaves_every_replica_serving(what, replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    client = replicas.remotes[1].client
    client.is_busy, client.flush_fails = what == "busy", what == "flush"
    with pytest.raises(EngineBusyError if what == "busy" else CacheFlushError):
        replicas.broadcaster.push(replicas.make_policy(2))
    replicas.assert_hold(replicas.make_policy(1), version=1)
    client.is_busy = client.flush_fails = False
    replicas.heals()


def test_a_compiler_that_fails_leaves_every_replica_serving(replicas, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(RankFailedError, match="No space left on device"):
        patched.setattr(ReferenceTable, "compile", Mock(side_effect=OSError("No space left on device")))
        replicas.broadcaster.push(replicas.make_policy(1))
    assert replicas.states == [(False, 0)] * 4
    replicas.heals()


@pytest.mark.parametrize("fault", ["begun", "filled", "finished", "written"])
def test_an_error_while_writing_leaves_every_replica_dirty(fault, replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    arm(replicas.clusters[1].targets[0], fault, RuntimeError("injected"))
    start_s = time.monotonic()
    with pytest.raises(RankFailedError, match="injected"):
        replicas.broadcaster.push(replicas.make_policy(2))
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    assert replicas.states == [(True, 1)] * 4
    assert replicas.blocked == [True, True]
    assert replicas.broadcaster.is_dirty
    replicas.heals()


def test_nan_leaves_every_replica_dirty_unless_it_is_sent_before_they_are_paused(replicas):
    policy = replicas.make_policy(1)
    policy[Q_PROJ][0, 0] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        replicas.broadcaster.push(policy)
    assert caught.value.names == (Q_PROJ,)
    assert replicas.states == [(not replicas.is_ahead, 0)] * 4
    assert replicas.blocked == [not replicas.is_ahead] * 2
    replicas.heals()


def test_a_replica_that_is_lost_ends_the_others_soon(replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    gone, left = replicas.remotes

    def die(request):
        if request.order.step == "take":
            raise EngineLostError("the server is gone")

    gone.channel.on_request = die
    start_s = time.monotonic()
    with pytest.raises(EngineLostError, match="the server is gone"):
        replicas.broadcaster.push(replicas.make_policy(2))
    assert time.monotonic() - start_s < TIMEOUT_S
    assert left.cluster.states == [(True, 1)] * 2
    assert replicas.blocked == [True, True]
    rest = Broadcaster([left.client], timeout_s=TIMEOUT_S)
    policy = replicas.make_policy(3)
    rest.push(policy)
    left.cluster.assert_holds(policy, version=2)
    rest.close()


@pytest.mark.parametrize("step", ["prepare", "pause"])
def test_a_replica_that_is_lost_before_writing_leaves_the_others_serving(step, replicas, monkeypatch):
    replicas.broadcaster.push(replicas.make_policy(1))
    left, gone = replicas.remotes
    lost = EngineLostError("the server is gone")

    async def pause(config):
        raise lost

    def die(request):
        raise lost

    if step == "pause":
        monkeypatch.setattr(gone.client._fp8refit_engine.engine, "pause", pause)
    else:
        gone.channel.on_request = die
    with pytest.raises(EngineLostError, match="the server is gone"):
        replicas.broadcaster.push(replicas.make_policy(2))
    left.cluster.assert_holds(replicas.make_policy(1), version=1)
    assert left.client.blocked is None


def test_of_errors_on_all_that_of_the_replica_that_is_lost_is_raised(replicas):
    def die(request):
        if request.order.step == "take":
            raise EngineLostError("the server is gone")

    replicas.broadcaster.push(replicas.make_policy(1))
    replicas.remotes[1].channel.on_request = die
    with pytest.raises(EngineLostError, match="the server is gone"):
        replicas.broadcaster.push(replicas.make_policy(2))
    assert replicas.blocked == [True, True]


def test_a_refit_of_one_replica_keeps_the_broadcast_out(replicas):
    turn = replicas.remotes[1].client._fp8refit_engine.turn
    assert turn.take("somebody else")
    with pytest.raises(EngineBusyError):
        replicas.broadcaster.push(replicas.make_policy(1))
    turn.end("somebody else")
    replicas.heals()


def test_replicas_of_which_some_are_asynchronous(monkeypatch):
    monkeypatch.setattr(ClientEngine, "is_asynchronous", True)
    replicas = Replicas(suspends=(0, 1))
    policy = replicas.make_policy(1)
    asyncio.run(replicas.broadcaster.push_async(policy))
    replicas.assert_hold(policy, version=1)
    asyncio.run(replicas.broadcaster.close_async())


@pytest.mark.parametrize("engines", [0, 2])
def test_what_cannot_be_broadcast_to_is_refused(engines):
    client = Client(Drivers(Cluster("pipeline")).clients[0].ranks)
    with pytest.raises(UnsupportedEngineError, match="in this process" if engines else "no engine"):
        Broadcaster([client] * (engines > 0))


@pytest.mark.parametrize("engines", [None, 5, "http://127.0.0.1:8000"])
def test_what_is_no_list_of_engines_is_refused(engines):
    with pytest.raises(TypeError, match=r"engines is of type \w+; pass a list"):
        Broadcaster(engines)
    with pytest.raises(TypeError, match="config is of type int"):
        Broadcaster([], config=5)


def test_an_engine_that_is_named_twice_is_refused(replicas):
    client = replicas.remotes[0].client
    with pytest.raises(UnsupportedEngineError, match="twice"):
        Broadcaster([client, client])


def test_a_stream_without_manifest_is_refused(replicas):
    with pytest.raises(InvalidSourceError, match="manifest"):
        replicas.broadcaster.push(iter(replicas.make_policy(1).items()))
    replicas.heals()


def answers_of(answers):
    return [Reply.model_validate_json(answer) for answer in answers]


def test_a_policy_on_the_same_shapes_is_not_announced_again(replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    replicas.broadcaster.push({name: torch.clone(tensor) for name, tensor in replicas.make_policy(2).items()})
    offers = [r.order.source for r in replicas.remotes[1].channel.requests if isinstance(r.order, messages.Prepare)]
    assert offers[0].tensors is not None and offers[1].tensors is None


def test_a_rank_that_fails_once_while_it_fills(replicas):
    fail_once(replicas.clusters[0].targets[1], "push", RuntimeError("injected"))
    with pytest.raises(RankFailedError, match="injected"):
        replicas.broadcaster.push(replicas.make_policy(1))
    assert replicas.states == [(True, 0)] * 4
    replicas.heals()


def test_a_group_of_engines_is_verified_engine_by_engine(replicas):
    policy = replicas.make_policy(1)
    replicas.broadcaster.push(policy)
    together = Refitter(EngineGroup([remote.client for remote in replicas.remotes]))
    assert together.verify(policy).is_equal
    assert not together.verify(replicas.make_policy(2)).is_equal


def test_a_server_takes_broadcasts_and_after_it_was_started_again_too(monkeypatch):
    running = Running()
    entry_point = entry_point_of(running)
    monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [entry_point])
    broadcaster = Broadcaster([URL], timeout_s=TIMEOUT_S)
    try:
        for seed in (1, 2):
            broadcaster.push(running.cluster.make_policy(seed))
            running.cluster.assert_holds(running.cluster.make_policy(seed), version=seed)
            heard, running.orders[:], running.events[:] = (running.orders[:], running.events[:]), [], []
        assert heard == (["hello", "pause", "send 2"], ["pause", "flush", "publish 2", "resume"])
        running.start()
        broadcaster.push(running.cluster.make_policy(3))
        running.cluster.assert_holds(running.cluster.make_policy(3), version=1)
    finally:
        broadcaster.close()
        running.close()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Two ranks of a trainer."""
    ranks = TrainerRanks(2, str(tmp_path_factory.mktemp("trainer") / "store"))
    yield ranks
    ranks.close()


def test_every_rank_of_a_trainer_pushes_its_shards_and_hears_the_same(trainer):
    assert trainer.run(push_shards) == [["pushed", "NonFiniteError", "EngineBusyError", "pushed"]] * 2


@pytest.mark.parametrize("layout", ["experts in parts", "experts apart"])
def test_stacks_of_experts_are_gathered_and_sent_expert_by_expert(layout, trainer):
    assert trainer.run(push_stacks, layout) == [["float8_e4m3fn"], []]


# Engines that come and go.


def die_at(remote, *steps):
    """Make an engine answer nothing from one of these steps on."""
    gone = []

    def die(request):
        if gone or request.order.step in steps:
            gone.append(request)
            raise EngineLostError("the server is gone")

    remote.channel.on_request = die


@pytest.mark.parametrize("stage", ["during", "ahead"])
@pytest.mark.parametrize("step", ["prepare", "take"])
def test_a_lost_engine_is_dropped_and_the_others_get_the_policy_in_the_same_push(step, stage):
    replicas = Replicas(["tensor"] * 3, on_lost="drop", collective={"stage": stage})
    replicas.broadcaster.push(replicas.make_policy(1))
    lost, *others = replicas.remotes[1], replicas.remotes[0], replicas.remotes[2]
    die_at(lost, step)
    policy = replicas.make_policy(2)
    report = replicas.broadcaster.push(policy)
    assert replicas.broadcaster.engines == tuple(remote.client for remote in others)
    assert len(report.ranks) == 4
    for remote in others:
        remote.cluster.assert_holds(policy, version=report.version)
        assert remote.client.blocked is None
    replicas.broadcaster.push(replicas.make_policy(3))
    replicas.broadcaster.close()


def test_a_stream_that_was_read_when_an_engine_was_lost_is_not_read_again():
    replicas = Replicas(on_lost="drop")
    replicas.broadcaster.push(replicas.make_policy(1))
    lost, left = replicas.remotes
    die_at(lost, "take")
    policy = replicas.make_policy(2)
    with pytest.raises(EngineLostError):
        replicas.broadcaster.push(iter(policy.items()), manifest=manifest_of(policy))
    assert replicas.broadcaster.engines == (left.client,)
    report = replicas.broadcaster.push(policy)
    left.cluster.assert_holds(policy, version=report.version)
    assert left.client.blocked is None
    replicas.broadcaster.close()


def test_the_last_engine_that_is_lost_is_an_error():
    replicas = Replicas(on_lost="drop")
    for remote in replicas.remotes:
        die_at(remote, "prepare")
    with pytest.raises(EngineLostError):
        replicas.broadcaster.push(replicas.make_policy(1))
    assert len(replicas.broadcaster.engines) == 2
    with pytest.raises(InvalidOptionError, match='choose "raise" or "drop"'):
        Broadcaster([replicas.remotes[0].client], on_lost="ignore")


def test_an_engine_that_joins_refuses_until_it_serves_what_the_others_do(replicas):
    for seed in (1, 2, 3):
        replicas.broadcaster.push(replicas.make_policy(seed))
    late, blocked = Remote(Cluster("tensor")), []
    late.channel.on_request = lambda request: blocked.append((request.order.step, late.client.blocked))
    report = replicas.broadcaster.add(late.client, replicas.make_policy(3))
    assert report.version == replicas.broadcaster.version == 3
    late.cluster.assert_holds(replicas.make_policy(3), version=3)
    assert late.client.blocked is None
    assert all("has not got their policy yet" in why for step, why in blocked if step in ("prepare", "join"))
    assert replicas.broadcaster.engines[-1] is late.client
    replicas.clusters.append(late.cluster)
    replicas.remotes.append(late)
    replicas.heals()
    replicas.broadcaster.remove(late.client)
    assert late.client not in replicas.broadcaster.engines
    before = late.cluster.live_bytes()
    replicas.broadcaster.push(replicas.make_policy(5))
    assert late.cluster.live_bytes() == before


def test_an_engine_that_joins_with_another_policy_than_the_others_serve_refuses_and_is_not_added(replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    late = Remote(Cluster("tensor"))
    with pytest.raises(InvalidSourceError, match="is not the policy that the other engines serve"):
        replicas.broadcaster.add(late.client, replicas.make_policy(2))
    assert "could not join others" in late.client.blocked
    assert len(replicas.broadcaster.engines) == 2
    assert replicas.broadcaster.add(late.client) is None, "it gets the next one"
    policy = replicas.make_policy(3)
    report = replicas.broadcaster.push(policy)
    late.cluster.assert_holds(policy, version=report.version)
    assert late.client.blocked is None


def test_an_engine_of_another_layout_joins(replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    late = Remote(Cluster("tensor"))
    want_powers_of_two(late.cluster)
    replicas.broadcaster.add(late.client, replicas.make_policy(1))
    late.cluster.assert_holds(replicas.make_policy(1), version=1)


@pytest.mark.parametrize("fault", ["judged", "filled"])
def test_an_engine_that_cannot_take_the_policy_is_not_added_and_refuses(fault, replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    late = Remote(Cluster("tensor"))
    arm(late.cluster.targets[0], fault, RuntimeError("injected"))
    with pytest.raises(RankFailedError, match="injected"):
        replicas.broadcaster.add(late.client, replicas.make_policy(1))
    assert late.client.blocked is not None
    assert len(replicas.broadcaster.engines) == 2
    replicas.heals()


def test_what_is_not_pushed_to_is_not_removed_and_the_last_one_stays(replicas):
    with pytest.raises(ValueError, match="is not pushed to"):
        replicas.broadcaster.remove(Remote(Cluster("tensor")).client)
    with pytest.raises(UnsupportedEngineError, match="named twice"):
        replicas.broadcaster.add(replicas.remotes[0].client)
    replicas.broadcaster.remove(replicas.remotes[0].client)
    with pytest.raises(UnsupportedEngineError, match="no engine to broadcast to"):
        replicas.broadcaster.remove(replicas.remotes[1].client)


def test_engines_of_event_loops_are_added_and_dropped(monkeypatch):
    monkeypatch.setattr(ClientEngine, "is_asynchronous", True)
    replicas = Replicas(suspends=(0, 1), on_lost="drop")

    async def drive():
        await replicas.broadcaster.push_async(replicas.make_policy(1))
        late = Remote(Cluster("tensor"), suspends=True)
        await replicas.broadcaster.add_async(late.client, replicas.make_policy(1))
        die_at(replicas.remotes[0], "prepare")
        await replicas.broadcaster.push_async(replicas.make_policy(2))
        await replicas.broadcaster.close_async()
        return late

    late = asyncio.run(drive())
    for cluster in (late.cluster, replicas.clusters[1]):
        cluster.assert_holds(replicas.make_policy(2), version=2)
    assert replicas.broadcaster.engines == (replicas.remotes[1].client, late.client)


@pytest.mark.parametrize("what", ["flush", "fleet"])
def test_an_engine_that_could_not_join_refuses_whatever_failed(what, replicas, monkeypatch):
    replicas.broadcaster.push(replicas.make_policy(1))
    late = Remote(Cluster("tensor"))
    late.client.flush_fails = what == "flush"
    if what == "fleet":
        ranks = replicas.broadcaster._fleet.attached[0].engine.ranks
        monkeypatch.setattr(ranks, "layout", Mock(side_effect=RankFailedError("does not describe itself")))
    with pytest.raises(CacheFlushError if what == "flush" else RankFailedError):
        replicas.broadcaster.add(late.client, replicas.make_policy(1))
    assert late.client.blocked is not None
    monkeypatch.undo()
    monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [ClientEntryPoint()])
    late.client.flush_fails = False
    replicas.broadcaster.add(late.client, replicas.make_policy(1))
    late.cluster.assert_holds(replicas.make_policy(1), version=late.cluster.targets[0].version)
    assert late.client.blocked is None


def test_a_dead_engine_does_not_keep_its_successor_out(replicas):
    replicas.broadcaster.push(replicas.make_policy(1))
    die_at(replicas.remotes[0], "hello", "describe", "prepare")
    late = Remote(Cluster("tensor"))
    replicas.broadcaster.add(late.client, replicas.make_policy(1))
    late.cluster.assert_holds(replicas.make_policy(1), version=1)
    replicas.broadcaster.remove(replicas.remotes[0].client)
    report = replicas.broadcaster.push(replicas.make_policy(2))
    for cluster in (late.cluster, replicas.clusters[1]):
        cluster.assert_holds(replicas.make_policy(2), version=report.version)


def test_a_joiner_of_a_fixed_port_finds_it_free(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    replicas = Replicas(collective={"port": port})
    replicas.broadcaster.push(replicas.make_policy(1))
    late = Remote(Cluster("tensor"))
    replicas.broadcaster.add(late.client, replicas.make_policy(1))
    replicas.broadcaster.push(replicas.make_policy(2))
    late.cluster.assert_holds(replicas.make_policy(2), version=2)
    replicas.broadcaster.close()


def test_engines_neither_come_nor_go_while_a_policy_is_pushed(replicas, monkeypatch):
    late, heard = Remote(Cluster("tensor")), []
    replicas.broadcaster.push(replicas.make_policy(1))

    def change(request):
        if request.order.step == "take":
            for change in (
                lambda: replicas.broadcaster.add(late.client),
                lambda: replicas.broadcaster.add(late.client, replicas.make_policy(1)),
                lambda: replicas.broadcaster.remove(replicas.remotes[1].client),
            ):
                with pytest.raises(EngineBusyError) as caught:
                    change()
                heard.append(caught.value)

    replicas.remotes[0].channel.on_request = change
    report = replicas.broadcaster.push(replicas.make_policy(2))
    assert len(heard) == 3 and late.client.blocked is None and len(replicas.broadcaster.engines) == 2
    replicas.assert_hold(replicas.make_policy(2), version=report.version)


def test_an_engine_that_answers_but_is_busy_is_not_dropped(monkeypatch):
    replicas = Replicas(["tensor"] * 3, on_lost="drop")
    replicas.broadcaster.push(replicas.make_policy(1))
    die_at(replicas.remotes[0], "prepare")

    def busy(request):
        if request.order.step == "hello":
            raise EngineBusyError("another driver refits this server")

    replicas.remotes[1].channel.on_request = busy
    policy = replicas.make_policy(2)
    replicas.broadcaster.push(policy)
    assert replicas.broadcaster.engines == tuple(remote.client for remote in replicas.remotes[1:])


def test_an_asynchronous_engine_is_not_added_without_its_event_loop(replicas, monkeypatch):
    late = Remote(Cluster("tensor"), suspends=True)
    monkeypatch.setattr(ClientEngine, "is_asynchronous", property(lambda engine: engine._model is late.client))
    with pytest.raises(UnsupportedEngineError, match="await add_async"):
        replicas.broadcaster.add(late.client, replicas.make_policy(1))
    assert late.client.blocked is None and not late.client.events


# Servers behind a router.


class Routed:
    """Two servers that a router knows, and one that it learns of later."""

    urls = ("http://fake:1", "http://fake:2", "http://fake:3")
    router = "http://router:1"

    def __init__(self, monkeypatch):
        self.servers = {url: Running() for url in self.urls}
        self.listed = dict.fromkeys(self.urls[:2], True)
        self.absent = set()
        routed = self

        def recognise(server):
            if server.url in routed.absent:
                raise EngineLostError("it is gone")
            return server.url in (*routed.urls, routed.router)

        def send(server, route, body, **_):
            assert route == "/workers"
            if server.url != routed.router:
                return 404, '{"detail": "Not Found"}'
            workers = [{"url": url, "is_healthy": healthy, "load": 0} for url, healthy in routed.listed.items()]
            return routed.status, json.dumps({"workers": workers, "total": len(workers)})

        kind = self.servers[URL].kind
        self.status = 200
        kind.recognise = recognise
        kind.deliver = lambda server, message, *, timeout_s: routed.servers[server.url].answer(message)
        monkeypatch.setattr(Server, "send", send)
        monkeypatch.delattr(kind, "send")
        entry_point = entry_point_of(self.servers[URL])
        monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [entry_point])

    def make_policy(self, seed):
        return self.servers[URL].cluster.make_policy(seed)

    def held(self):
        return [self.servers[url].cluster.states[0][1] for url in self.urls]

    def close(self):
        for server in self.servers.values():
            server.close()


@pytest.fixture
def routed(monkeypatch):
    made = Routed(monkeypatch)
    yield made
    made.close()


def test_a_push_goes_to_the_servers_that_are_behind_the_router_then(routed):
    with Broadcaster(router=routed.router, timeout_s=TIMEOUT_S) as broadcaster:
        broadcaster.push(routed.make_policy(1))
        assert (broadcaster.engines, routed.held()) == (routed.urls[:2], [1, 1, 0])
        routed.listed = dict.fromkeys(routed.urls[1:], True)
        report = broadcaster.push(policy := routed.make_policy(2))
        assert (broadcaster.engines, routed.held()) == (routed.urls[1:], [1, 2, 2])
        for url in routed.urls[1:]:
            routed.servers[url].cluster.assert_holds(policy, version=report.version)
        routed.listed = {routed.urls[0] + "/": True, routed.urls[2] + "@0": True, routed.urls[2] + "@1": True}
        broadcaster.push(routed.make_policy(3))
        assert (set(broadcaster.engines), routed.held()) == ({routed.urls[0], routed.urls[2]}, [3, 2, 3])


def test_engines_that_are_passed_stay_whatever_the_router_says(routed):
    with Broadcaster([URL], router=routed.router, timeout_s=TIMEOUT_S) as broadcaster:
        broadcaster.push(routed.make_policy(1))
        assert broadcaster.engines == routed.urls[:2]
        routed.listed = {}
        broadcaster.push(routed.make_policy(2))
        assert (broadcaster.engines, routed.held()) == ((URL,), [2, 1, 0])


@pytest.mark.parametrize("on_lost", ["raise", "drop"])
@pytest.mark.parametrize("is_healthy", [True, False])
def test_a_server_behind_the_router_that_does_not_answer(on_lost, is_healthy, routed):
    with Broadcaster(router=routed.router, on_lost=on_lost, timeout_s=TIMEOUT_S) as broadcaster:
        broadcaster.push(routed.make_policy(1))
        routed.listed[routed.urls[2]] = is_healthy
        routed.absent.add(routed.urls[2])
        if on_lost == "raise":
            with pytest.raises(EngineLostError, match="it is gone"):
                broadcaster.push(routed.make_policy(2))
            assert routed.held() == [1, 1, 0]
        else:
            broadcaster.push(routed.make_policy(2))
            assert routed.held() == [2, 2, 0]
        routed.absent.clear()
        routed.listed[routed.urls[2]] = True
        report = broadcaster.push(routed.make_policy(3))
        assert routed.held() == [report.version] * 3


def test_a_server_that_the_router_takes_for_ill_gets_the_policy_if_it_answers(routed):
    with Broadcaster(router=routed.router, on_lost="drop", timeout_s=TIMEOUT_S) as broadcaster:
        routed.listed[routed.urls[1]] = False
        broadcaster.push(routed.make_policy(1))
        assert routed.held() == [1, 1, 0]


@pytest.mark.parametrize("on_lost", ["raise", "drop"])
def test_a_server_that_is_gone_when_a_broadcaster_is_made(on_lost, routed):
    routed.absent.add(routed.urls[1])
    if on_lost == "raise":
        with pytest.raises(EngineLostError, match="it is gone"):
            Broadcaster(router=routed.router, timeout_s=TIMEOUT_S)
        return
    with Broadcaster(router=routed.router, on_lost="drop", timeout_s=TIMEOUT_S) as broadcaster:
        assert broadcaster.engines == routed.urls[:1]


def test_a_server_that_was_added_before_the_router_had_it_leaves_with_it(routed):
    with Broadcaster(router=routed.router, timeout_s=TIMEOUT_S) as broadcaster:
        broadcaster.push(policy := routed.make_policy(1))
        broadcaster.add(routed.urls[2], policy)
        broadcaster.push(routed.make_policy(2))
        assert broadcaster.engines == routed.urls
        routed.listed[routed.urls[2]] = True
        broadcaster.push(routed.make_policy(3))
        del routed.listed[routed.urls[2]]
        broadcaster.push(routed.make_policy(4))
        assert broadcaster.engines == routed.urls[:2]
        with pytest.raises(UnsupportedEngineError, match="is behind the router, and would come back"):
            broadcaster.remove(routed.urls[1])


def test_no_server_is_written_if_the_router_cannot_be_asked_or_knows_none(routed):
    with Broadcaster(router=routed.router, timeout_s=TIMEOUT_S) as broadcaster:
        routed.status = 503
        with pytest.raises(UnsupportedEngineError, match="is no router: it does not answer /workers"):
            broadcaster.push(routed.make_policy(1))
        routed.status, routed.listed = 200, {}
        with pytest.raises(UnsupportedEngineError, match="no engine to broadcast to"):
            broadcaster.push(routed.make_policy(1))
        assert routed.held() == [0, 0, 0]
    with pytest.raises(UnsupportedEngineError, match="no engine to broadcast to"):
        Broadcaster(router=routed.router)


@pytest.mark.parametrize("make", [Refitter, lambda url: Broadcaster([url])])
def test_a_router_is_no_engine(make, routed):
    with pytest.raises(
        UnsupportedEngineError, match=r"is a router, with 2 servers behind it \(http://fake:1, .*router="
    ):
        make(routed.router)
