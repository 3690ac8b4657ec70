"""A refit like the last one in one exchange: what waits for the write, and what becomes of it when that does not come."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

import fp8refit.driver.adapters
from fp8refit import (
    Broadcaster,
    CacheFlushError,
    EngineAsleepError,
    EngineBusyError,
    InvalidSourceError,
    Refitter,
    TransportError,
)
from fp8refit.config import Job
from fp8refit.errors import TensorsForgottenError
from fp8refit.remote.protocol.channel import GRACE_S, NUM_VOTES, Answers, send_in_turn
from fp8refit.remote.protocol.messages import Do, Request
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.sources.source import MappingSource, as_source
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.running import InThread
from fp8refit.transport.vote import Ballot
from tests.fake_kv import ATTENTION, K_SCALE, V_SCALE
from tests.fake_ranks import (
    Client,
    ClientEngine,
    Cluster,
    Remote,
    ThreadChannel,
    ThreadGroup,
    arm,
    as_announced_iterator,
    fail_once,
)
from tests.remote.test_rank_server import exporter_of, on_the_gpu
from tests.transport.memory.test_shared_tensors import FakeDriver

FLUSH_S = 5.0
TIMEOUT_S = 40.0


class PairChannel(ThreadChannel):
    """Takes two messages at once, and notes what goes in which exchange, caches among it."""

    num_at_once = num_ahead = 2

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote.servers)
        self.exchanges: list[list[str]] = []
        self.pair_timeouts_s: tuple[float, float] | None = None
        self.keeps_caches = False
        self.while_flushing: Callable[[], None] = lambda: None

    async def exchange(self, messages: Sequence[str], timeouts_s: Sequence[float]) -> Answers:
        self.exchanges.append([])
        answers = await send_in_turn(self._pass_on, self.flush_beside, messages, timeouts_s)
        if len(messages) == 1:
            return answers
        self.pair_timeouts_s = tuple(timeouts_s)
        return answers if answers.is_refused else replace(answers, flush_s=FLUSH_S)

    async def flush_beside(self) -> None:
        self.flush()

    def flush(self) -> None:
        self.exchanges[-1].append("flush")
        self.while_flushing()
        if self.keeps_caches:
            raise CacheFlushError("the prefix cache holds blocks")

    async def _pass_on(self, message: str, timeout_s: float) -> Sequence[str]:
        self.exchanges[-1].append(Request.model_validate_json(message).order.step)
        return await self.call(message, timeout_s)


class PairEngine(ClientEngine):
    """A fake engine whose caches are dropped in an exchange: in one of its own, if nothing waits for the next."""

    async def flush_caches(self) -> None:
        channel = self._model.ranks.client.channel
        channel.exchanges.append([])
        channel.flush()


class PairEntryPoint:
    """Entry point of `PairEngine`."""

    name = "fake"

    def load(self) -> type[PairEngine]:
        return PairEngine


class Steady:
    """An engine that knows what policies look like; every refit brings it another one.

    Args:
        transport: "auto", "collective", or "stream" for a generator.
        driver: Maps memory.
        layout: One of `LAYOUTS`.
    """

    def __init__(self, transport: str, driver: FakeDriver, layout: str) -> None:
        self.remote = Remote(Cluster(layout, kv=[[ATTENTION], [ATTENTION]]))
        self.cluster = self.remote.cluster
        self.channel = PairChannel(self.remote)
        self.ranks = RemoteRanks(self.channel)
        self.client = Client(self.ranks)
        self.is_stream = transport == "stream"
        self.options = {"transport": "auto" if self.is_stream else transport, "timeout_s": TIMEOUT_S}
        self.refitter = Refitter(self.client, **self.options)
        made = self.cluster.make_policy(0)
        self.policy = on_the_gpu(made, driver) if transport == "auto" else made
        self.orders = ["prepare", "flush", {"auto": "write", "collective": "take", "stream": "stream"}[transport]]
        self.ends = [["finish"]] if self.is_stream and len(self.cluster.ranks) > 1 else []
        for seed in range(2):
            self.refit(seed)
        self.first = list(self.channel.exchanges)
        self.channel.exchanges.clear()

    def fill(self, seed: int) -> dict[str, Tensor]:
        """The next policy, where the last one was."""
        for tensor, new in zip(self.policy.values(), self.cluster.make_policy(seed).values(), strict=True):
            tensor.copy_(new)
        return self.policy

    def give(self, seed: int):
        """`fill`, as a trainer gives it."""
        policy = self.fill(seed)
        return iter(policy.items()) if self.is_stream else policy

    def refit(self, seed: int):
        report = self.refitter.refit(self.give(seed))
        self.cluster.assert_holds(self.policy, version=report.version)
        assert (self.ranks.version, self.ranks.is_dirty, self.client.blocked) == (report.version, False, None)
        return report

    def refuse(self, error: type[BaseException], match: str = "") -> None:
        """Check that a refit writes nothing, and that the next one does."""
        before, version = self.cluster.live_bytes(), self.ranks.version
        with pytest.raises(error, match=match):
            self.refitter.refit(self.give(7))
        assert self.cluster.live_bytes() == before
        assert self.cluster.states == [(False, version)] * len(self.cluster.ranks)
        assert (self.ranks.version, self.ranks.is_dirty, self.client.blocked) == (version, False, None)
        self.channel.keeps_caches = False
        exchanges = list(self.channel.exchanges)
        assert self.refit(8).version == version + 1
        self.channel.exchanges[:] = exchanges


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [PairEntryPoint()])


@pytest.fixture
def open_steady(patient, monkeypatch):
    driver, opened = FakeDriver(), []
    monkeypatch.setattr("fp8refit.remote.host.host_route.Exporter", lambda: exporter_of(driver))
    monkeypatch.setattr("fp8refit.remote.rank_orders.Importer", lambda device: Importer(device, driver=driver))

    def open_steady(transport, layout="tensor"):
        opened.append(Steady(transport, driver, layout))
        return opened[-1]

    yield open_steady
    for steady in opened:
        steady.refitter.close()


@pytest.fixture(params=["auto", "collective"])
def steady(open_steady, request):
    return open_steady(request.param)


@pytest.fixture(params=["auto", "collective", "stream", "stream to one rank"])
def any_steady(open_steady, request):
    if request.param == "stream to one rank":
        return open_steady("stream", "alone")
    return open_steady(request.param)


def test_a_refit_like_the_last_is_one_exchange(any_steady):
    for seed in (2, 3):
        report = any_steady.refit(seed)
        assert report.phases_s["flush"] >= FLUSH_S
    assert any_steady.channel.exchanges == [any_steady.orders, *any_steady.ends] * 2


@pytest.mark.parametrize("layout", ["tensor", "alone"])
def test_a_stream_is_read_while_the_ranks_get_ready(layout, open_steady, monkeypatch):
    steady = open_steady("stream", layout)
    policy, is_read = steady.fill(2), threading.Event()

    def read():
        yield from policy.items()
        is_read.set()

    steady.channel.while_flushing = lambda: assert_is_set(is_read)
    report = steady.refitter.refit(read())
    steady.cluster.assert_holds(policy, version=report.version)


@pytest.mark.parametrize("kind", ["kv scales", "verify"])
def test_one_rank_ends_a_stream_that_does_more_than_write(kind, open_steady):
    steady = open_steady("stream", "alone")
    policy = steady.fill(2)
    if kind == "verify":
        assert steady.refitter.verify(iter(policy.items())).differing
        steady.refit(2)
        assert not steady.refitter.verify(iter(policy.items())).differing
    else:
        scales = {K_SCALE: 2.0, V_SCALE: 3.0}
        assert steady.refitter.refit(iter(policy.items()), kv_scales=scales).kv.scales == scales
        steady.cluster.assert_holds(policy, version=3)
        request, timeout_s = steady.channel.requests[-1], steady.channel.timeouts_s[-1]
        assert (request.order.step, timeout_s) == ("stream", NUM_VOTES * TIMEOUT_S + GRACE_S)
    assert ["finish"] not in steady.channel.exchanges
    steady.refit(3)


def assert_is_set(event):
    assert event.wait(TIMEOUT_S)


def test_a_stream_that_is_announced_otherwise_is_judged_before_the_engine_is_paused(open_steady, tmp_path):
    steady = open_steady("stream")
    for is_first in (True, False):
        steady.channel.exchanges.clear()
        policy = steady.fill(2)
        report = steady.refitter.refit(**as_announced_iterator(policy, tmp_path))
        steady.cluster.assert_holds(policy, version=report.version)
        orders = [[step] for step in steady.orders] if is_first else [steady.orders]
        assert steady.channel.exchanges == [*orders, *steady.ends]


@pytest.mark.parametrize("layout", ["tensor", "alone"])
@pytest.mark.parametrize("fault", ["a name", "a dtype", "the end", "an exception"])
def test_a_stream_that_goes_wrong_in_its_exchange_says_what_was_written(fault, layout, open_steady):
    steady = open_steady("stream", layout)
    policy = dict(steady.fill(2))
    name = list(policy)[-1]
    last = {"a name": {"wrong": policy[name]}, "a dtype": {name: policy[name].int()}}.get(fault, {})

    def read():
        yield from list(policy.items())[:-1]
        if fault == "an exception":
            raise ArithmeticError("of the trainer")
        yield from last.items()

    with pytest.raises(ArithmeticError if fault == "an exception" else InvalidSourceError) as raised:
        steady.refitter.refit(read())
    if fault != "an exception":
        assert raised.value.written
    assert steady.ranks.is_dirty and "failed part way" in steady.client.blocked
    steady.refit(3)


@pytest.mark.parametrize("was_dirty", [False, True])
@pytest.mark.parametrize("layout", ["tensor", "alone"])
def test_a_stream_that_is_refused_in_its_exchange_says_that_nothing_was_written(layout, was_dirty, open_steady):
    steady = open_steady("stream", layout)
    for target in steady.cluster.targets:
        target.is_dirty = was_dirty  # by somebody else
        arm(target, "judged", InvalidSourceError(["a tensor that does not fit"]))
    with pytest.raises(InvalidSourceError, match="a tensor that does not fit") as raised:
        steady.refitter.refit(steady.give(2))
    assert steady.channel.exchanges == [["prepare"], ["abandon"]]
    assert not raised.value.written
    assert steady.ranks.is_dirty == was_dirty
    steady.refit(3)


@pytest.mark.parametrize("layout", ["tensor", "alone"])
def test_ranks_that_may_read_the_ring_are_asked_before_it_is_used_again(layout, open_steady, monkeypatch):
    """Both the refit and the order to abandon it were interrupted, while an engine core was at work on them."""
    steady = open_steady("stream", layout)
    one_at_a_time, at_work, may_go_on = threading.Lock(), threading.Event(), threading.Event()
    exchange = steady.channel.exchange
    interrupts = [KeyboardInterrupt()]

    async def exchange_in_turn_or_be_interrupted(messages, timeouts_s):
        while not one_at_a_time.acquire(timeout=0.01):
            if interrupts:
                raise interrupts.pop()
        try:
            return await exchange(messages, timeouts_s)
        finally:
            one_at_a_time.release()

    def work():
        at_work.set()
        assert_is_set(may_go_on)

    def read():
        yield from steady.fill(2).items()
        assert_is_set(at_work)

    def interrupted(answers):
        yield from ()
        raise KeyboardInterrupt

    steady.channel.exchange = exchange_in_turn_or_be_interrupted
    steady.channel.while_flushing = work
    with monkeypatch.context() as patch:
        patch.setattr(InThread, "__await__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steady.refitter.refit(read())
    assert interrupts == []
    steady.channel.while_flushing = lambda: None
    threading.Timer(0.05, may_go_on.set).start()
    steady.refit(3)
    assert ["prepare"] in steady.channel.exchanges
    steady.refit(4)


@pytest.mark.parametrize("is_flushed", [True, False])
def test_tensors_that_a_rank_forgot_are_sent_again_and_caches_dropped_before_they_are_written(is_flushed, open_steady):
    steady = open_steady("auto")
    steady.channel.servers[-1].orders.forget()
    if not is_flushed:
        steady.channel.keeps_caches = True
        steady.refuse(CacheFlushError, "the prefix cache")
        return
    assert steady.refit(2).phases_s["flush"] >= FLUSH_S
    assert steady.channel.exchanges == [["prepare"], ["abandon"], steady.orders]
    steady.refit(3)
    assert steady.channel.exchanges[3:] == [steady.orders]


def test_tensors_that_a_rank_forgot_and_that_cannot_be_sent_with_the_write_again_are_asked_for(
    open_steady, monkeypatch
):
    """Else nobody would drop the caches."""
    steady = open_steady("auto")
    steady.channel.servers[-1].orders.forget()
    answers = iter([True])
    monkeypatch.setattr(steady.ranks.client, "takes_pairs", lambda *, begins: next(answers, False))
    steady.refuse(TensorsForgottenError, "refit again")


def test_ranks_agree_once_before_they_write_what_they_know(steady, monkeypatch):
    phases = []

    def exchange(group, message, *, timeout_s):
        if group.rank == 0:
            phases.append(Ballot.model_validate_json(message).phase)
        return exchange_for_real(group, message, timeout_s=timeout_s)

    exchange_for_real = ThreadGroup.exchange
    monkeypatch.setattr(ThreadGroup, "exchange", exchange)
    steady.refit(2)
    assert phases == ["prepared", "written"]


def test_ranks_that_hold_other_tensors_than_before_are_told_everything_again(steady):
    def forget():
        for server in steady.remote.servers:
            server.orders.rank._agreement.names._known = ("other", "tensors")

    forget()
    if steady.orders[-1] == "write":
        steady.refuse(TransportError, "hold different tensors than at the last refit")
    else:
        steady.refit(2)  # as ranks that another trainer refitted
        assert steady.channel.exchanges[-1] == steady.orders
    steady.refit(3)


def test_a_policy_that_lies_where_the_last_one_did_is_not_looked_at_tensor_by_tensor(steady, monkeypatch):
    policy, looked_at = steady.fill(2), []
    with monkeypatch.context() as patch:
        patch.setattr(MappingSource, "_read", property(lambda source: looked_at.append(source)))
        report = steady.refitter.refit(policy)
    assert looked_at == []
    steady.cluster.assert_holds(policy, version=report.version)
    prefixed = {f"module.{name}": tensor for name, tensor in steady.fill(3).items()}
    for _ in range(2):
        report = steady.refitter.refit(prefixed)
        steady.cluster.assert_holds(policy, version=report.version)


def test_what_is_new_to_the_ranks_is_judged_before_the_engine_is_paused(any_steady):
    steady = any_steady
    place = steady.first.index(["prepare"])
    assert steady.first[place : place + 3] == [[step] for step in steady.orders]


def test_no_request_is_aborted_for_what_ranks_refuse(any_steady):
    steady = any_steady
    steady.refitter = Refitter(steady.client, **steady.options, in_flight="abort")
    steady.refit(2)
    steady.channel.exchanges.clear()
    steady.refit(3)
    assert steady.channel.exchanges == [*([step] for step in steady.orders), *steady.ends]


def test_the_ranks_have_as_long_for_each_of_both_as_for_each_alone(any_steady):
    steady = any_steady
    steady.refit(2)
    alone = {
        request.order.step: s for request, s in zip(steady.channel.requests, steady.channel.timeouts_s, strict=True)
    }
    assert steady.channel.pair_timeouts_s == (alone["prepare"], alone[steady.orders[-1]])
    assert steady.channel.pair_timeouts_s[0] == NUM_VOTES * TIMEOUT_S + GRACE_S


@pytest.mark.parametrize("fault", ["ready", "judged", "prepared"])
def test_what_a_rank_refuses_then_is_refused_as_ever(fault, any_steady):
    steady = any_steady
    arm(steady.cluster.targets[-1], fault, EngineAsleepError("the weights are asleep"))
    steady.refuse(EngineAsleepError, "the weights are asleep")
    assert steady.channel.exchanges == [["prepare"], ["abandon"]]


def test_caches_that_stay_leave_the_old_policy(any_steady):
    steady = any_steady
    steady.channel.keeps_caches = True
    steady.refuse(CacheFlushError, "holds blocks")
    assert steady.channel.exchanges == [["prepare", "flush"], ["abandon"]]


def test_caches_that_stay_do_not_make_a_dirty_engine_whole(any_steady):
    steady = any_steady
    for target in steady.cluster.targets:
        target.is_dirty = True  # by somebody else
    steady.channel.keeps_caches = True
    with pytest.raises(CacheFlushError):
        steady.refitter.refit(steady.give(2))
    assert steady.ranks.is_dirty
    assert "failed part way" in steady.client.blocked
    steady.channel.keeps_caches = False
    steady.refit(3)


def wait_for_the_first_bucket(steady):
    receivers, give_up_s = [server.orders.receiver for server in steady.remote.servers], time.monotonic() + TIMEOUT_S
    while not all(receiver._arriving and receiver._arriving[0].is_done() for receiver in receivers):
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def test_weights_travel_already_while_caches_are_dropped(open_steady):
    steady = open_steady("collective")
    seen = []

    def while_flushing():
        if "prepare" in steady.channel.exchanges[-1]:
            wait_for_the_first_bucket(steady)
            seen.append(steady.cluster.live_bytes())

    steady.channel.while_flushing = while_flushing
    before = steady.cluster.live_bytes()
    steady.refit(2)
    assert seen == [before]
    steady.channel.keeps_caches = True
    start_s = time.monotonic()
    steady.refuse(CacheFlushError, "holds blocks")
    assert len(seen) == 2
    assert time.monotonic() - start_s < 10


def test_whatever_ranks_are_asked_for_before_they_take_it_ends_what_comes(open_steady):
    steady = open_steady("collective")
    before = steady.cluster.live_bytes()

    def ask():
        for server in steady.remote.servers:
            server.handle(Request(id="other", order=Do(step="fingerprint")).encode())

    steady.channel.while_flushing = ask
    with pytest.raises(TransportError, match="not in the trainer's broadcast group"):
        steady.refitter.refit(steady.fill(2))
    assert steady.cluster.live_bytes() == before
    steady.channel.while_flushing = lambda: None
    steady.refit(3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_to_which_nothing_can_come_is_joined_again(rank, open_steady):
    steady = open_steady("collective")
    fail_once(steady.remote.servers[rank].orders.receiver, "receive_ahead", TransportError("a wire broke"))
    steady.refit(2)
    assert steady.channel.exchanges[-1] == steady.orders


def test_an_engine_that_is_not_paused_hears_nothing(any_steady):
    steady = any_steady
    fail_once(steady.refitter._engine, "pause", EngineBusyError("requests run"))
    steady.refuse(EngineBusyError, "requests run")
    assert steady.channel.exchanges == [["abandon"]]


def test_what_comes_in_between_does_not_disturb_what_waits(steady):
    job = Job(config=steady.refitter._config)

    def source():
        return as_source(steady.fill(2))

    ranks = steady.ranks
    finish(ranks.prepare(source, job))
    finish(ranks.fingerprints())
    finish(ranks.write())
    assert (ranks.is_dirty, steady.cluster.states) == (False, [(False, 3)] * 2)
    assert ["prepare"] not in steady.channel.exchanges
    steady.refit(4)


def finish(step):
    """Do what never suspends."""
    with pytest.raises(StopIteration):
        step.send(None)


@pytest.mark.parametrize("step", ["prepare", "last"])
def test_an_interrupt_leaves_what_the_ranks_say(step, any_steady):
    steady = any_steady
    if steady.ends and step == "last":
        step = "finish"
    step = steady.orders[-1] if step == "last" else step

    def lose(answers):
        if steady.channel.steps[-1] == step:
            steady.channel.on_answers = lambda answers: answers
            raise KeyboardInterrupt
        return answers

    steady.channel.on_answers = lose
    with pytest.raises(KeyboardInterrupt):
        steady.refitter.refit(steady.give(2))
    version = 2 if step == "prepare" else 3
    assert steady.cluster.states == [(False, version)] * len(steady.cluster.ranks)
    assert (steady.ranks.version, steady.ranks.is_dirty, steady.client.blocked) == (version, False, None)
    steady.refit(3)


def another_trainer(steady):
    """Refits the same ranks."""
    ranks = RemoteRanks(ThreadChannel(steady.remote.servers))
    client = Client(ranks)
    patch = pytest.MonkeyPatch()
    patch.setattr(PairEngine, "flush_caches", ClientEngine.flush_caches)
    other = Refitter(client, transport="collective", timeout_s=TIMEOUT_S)
    return other, patch


@pytest.mark.parametrize("is_dirty", [False, True])
def test_ranks_that_another_trainer_refitted_are_joined_again(is_dirty, open_steady):
    steady = open_steady("collective")
    other, patch = another_trainer(steady)
    other.refit(steady.cluster.make_policy(5))
    patch.undo()
    for target in steady.cluster.targets:
        target.is_dirty = is_dirty
    start_s = time.monotonic()
    assert steady.refit(6).version == 4
    assert time.monotonic() - start_s < 10
    assert steady.channel.exchanges == [
        ["prepare"],
        ["abandon"],
        ["describe"],
        ["join"],
        ["prepare", "flush", "take"],
    ]
    steady.channel.exchanges.clear()
    steady.refit(7)
    assert steady.channel.exchanges == [steady.orders]
    other.close()


def test_ranks_that_cannot_be_joined_again_refuse_once_more(open_steady):
    steady = open_steady("collective")
    for server in steady.remote.servers:
        server.orders.receiver.leave()
        server.orders.receiver.source = partial(refuse_always, TransportError("nobody is here"))
    before = steady.cluster.live_bytes()
    with pytest.raises(TransportError, match="nobody is here"):
        steady.refitter.refit(steady.fill(2))
    assert steady.cluster.live_bytes() == before
    assert (steady.ranks.is_dirty, steady.client.blocked) == (False, None)
    assert [exchange for exchange in steady.channel.exchanges if "prepare" in exchange] == [["prepare"]] * 2
    for server in steady.remote.servers:
        del server.orders.receiver.source
        fail_once(server.orders.receiver, "take", TransportError("gone in the middle"))
    with pytest.raises(TransportError, match="gone in the middle"):  # which is nothing that was refused
        steady.refitter.refit(steady.fill(3))
    steady.refit(4)


def refuse_always(error, offer):
    raise error


def test_a_stream_is_announced_before_it_is_begun(open_steady, tmp_path):
    steady = open_steady("collective")
    for seed in (2, 3):
        policy = steady.cluster.make_policy(seed)
        steady.refitter.refit(**as_announced_iterator(policy, tmp_path))
        steady.cluster.assert_holds(policy, version=seed + 1)
        assert steady.channel.exchanges[-3:] == [["prepare"], ["flush"], ["take"]]


def test_no_engine_of_several_writes_while_another_may_refuse(open_steady):
    steadies = [open_steady("collective") for _ in range(2)]
    with Broadcaster([steady.client for steady in steadies], timeout_s=TIMEOUT_S) as broadcaster:
        for seed in (2, 3):
            broadcaster.push(steadies[0].fill(seed))
        for steady in steadies:
            steady.cluster.assert_holds(steadies[0].policy, version=4)
            assert steady.channel.exchanges[-3:] == [["prepare"], ["flush"], ["take"]]


def test_one_engine_of_a_broadcaster_is_one_exchange(open_steady):
    steady = open_steady("collective")
    with Broadcaster([steady.client], timeout_s=TIMEOUT_S) as broadcaster:
        for seed in (2, 3):
            broadcaster.push(steady.fill(seed))
        steady.cluster.assert_holds(steady.policy, version=4)
        assert steady.channel.exchanges[-1] == steady.orders


def test_kv_scales_are_judged_before_the_engine_is_paused(steady):
    scales = {K_SCALE: 2.0, V_SCALE: 3.0}
    report = steady.refitter.refit(steady.fill(2), kv_scales=scales)
    steady.cluster.assert_holds(steady.policy, version=3)
    assert report.kv.scales == scales
    assert steady.channel.exchanges == [[step] for step in steady.orders]


def test_a_channel_that_takes_one_message_at_a_time_is_given_one_at_a_time(steady):
    steady.channel.num_at_once = 1
    steady.refit(2)
    assert steady.channel.exchanges == [[step] for step in steady.orders]
