"""One trainer and several engines: all serve the new policy or none does, and what every rank of the trainer hears."""

import asyncio
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


def test_a_tensor_that_replicas_want_in_different_formats_travels_unquantized(replicas):
    for shard in replicas.clusters[1].shards:
        shard._slots[:] = [
            replace(slot, format=BlockFormat(scale_format=ScaleFormat.UE8M0)) if slot.name == K_PROJ else slot
            for slot in shard._slots
        ]
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
