"""A live model has one writer at a time, whatever it comes through: the second is refused, and nothing is mixed."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fp8refit import EngineBusyError, EngineHost, HostedEngine, RankFailedError, RefitConfig, Refitter, update
from fp8refit.config import Job
from fp8refit.driver.attach import attach_engine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.live.turn import DisplacedError, Turn
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Reply, Request
from fp8refit.remote.rank_server import RankServer
from fp8refit.sources.source import as_source
from tests.fake_ranks import Client, ClientEntryPoint, Cluster, Remote, together
from tests.fakes import FakeEngine, FakeEntryPoint, FakeModel, assert_holds, live_bytes, make_policy, make_target

IN_USE = "another refit of this engine is under way"


class Clients(ClientEntryPoint):
    name = "clients"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint(), Clients()])
    return FakeModel()


# First attachments.


def at_once(num_threads, call):
    """What each of several threads returned or raised that called together."""
    barrier = threading.Barrier(num_threads)

    def run(index):
        barrier.wait()
        return call(index)

    return together([lambda index=index: run(index) for index in range(num_threads)])


def test_threads_that_attach_at_once_get_the_same_adapter(model, monkeypatch):
    barrier, make = threading.Barrier(4), FakeEngine.__init__

    def slow(self, candidate):
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait(0.05)  # nobody else gets here
        make(self, candidate)

    monkeypatch.setattr(FakeEngine, "__init__", slow)
    found = at_once(4, lambda _: attach_engine(model))
    assert len(set(map(id, found))) == 1


def test_an_adapter_that_cannot_be_made_leaves_nothing_and_the_next_attempt_makes_it(model, monkeypatch):
    make = FakeEngine.__init__
    monkeypatch.setattr(FakeEngine, "__init__", lambda self, candidate: 1 / 0)
    assert [type(error) for error in at_once(3, lambda _: attach_engine(model))] == [ZeroDivisionError] * 3
    assert "_fp8refit_engine" not in vars(model)
    monkeypatch.setattr(FakeEngine, "__init__", make)
    Refitter(model).refit(make_policy(model, 1))


@pytest.mark.parametrize("attempt", range(5))
def test_first_refits_in_two_threads_serve_one_policy(model, attempt):
    policies = [make_policy(model, seed) for seed in range(2)]

    def refit(index):
        if index:
            return Refitter(model).refit(iter(policies[index].items()))
        with update(model) as begun:
            begun.load(policies[index])
        return begun.report

    outcomes = at_once(2, refit)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert all(isinstance(error, EngineBusyError) for error in errors) and len(errors) < 2
    versions = [outcome.version for outcome in outcomes if outcome not in errors]
    last = outcomes.index(max((each for each in outcomes if each not in errors), key=lambda each: each.version))
    assert sorted(versions) == list(range(1, len(versions) + 1))
    assert_holds(model, policies[last])


# Two that are attached to one model.


class Twice:
    """One rank, and two objects that drive it, as an `LLM` and its worker do."""

    def __init__(self):
        self.cluster = Cluster("alone")
        self.first, self.second = (Client(LocalRanks(self.cluster.ranks[0])) for _ in range(2))

    def policy(self, seed):
        return self.cluster.make_policy(seed)


WAYS = {
    "refit": lambda engine, policy: Refitter(engine).refit(policy),
    "verify": lambda engine, policy: Refitter(engine).verify(policy),
    "calibrate": lambda engine, policy: Refitter(engine).calibrate([[1, 2]]),
    "close": lambda engine, policy: Refitter(engine).close(),
    "update": lambda engine, policy: update(engine).__enter__(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["refit", "update"])
def test_whoever_comes_second_by_another_way_is_refused(model, first, way):
    twice = Twice()
    policy, other = twice.policy(1), twice.policy(2)

    def intrude():
        with pytest.raises(EngineBusyError, match=IN_USE):
            WAYS[way](twice.second, other)
        assert twice.second.blocked is None

    if first == "refit":

        def stream():
            for number, item in enumerate(policy.items()):
                if number == 2:
                    intrude()
                yield item

        Refitter(twice.first).refit(stream())
    else:
        with update(twice.first) as begun:
            for item in policy.items():
                begun.load([item])
                intrude()
    twice.cluster.assert_holds(policy, version=1)
    Refitter(twice.second).refit(other)
    twice.cluster.assert_holds(other, version=2)


@pytest.mark.parametrize("end", ["collected", "closed", "cancelled"])
def test_a_writer_that_is_gone_keeps_nobody_out(model, end):
    twice = Twice()
    policy = twice.policy(1)
    if end == "cancelled":

        async def refit():
            def stream():
                yield from list(policy.items())[:2]
                raise asyncio.CancelledError

            await Refitter(twice.first).refit_async(stream())

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(refit())
    else:
        begun = update(twice.first).__enter__()
        begun.load(list(policy.items())[:2])
        if end == "closed":
            with pytest.raises(ValueError, match="no more"):
                begun.__exit__(ValueError, ValueError("no more"), None)
        del begun
        gc.collect()
    Refitter(twice.second).refit(policy)
    twice.cluster.assert_holds(policy, version=1)


def test_a_model_and_a_part_of_it_have_one_writer(model):
    part = FakeModel()
    part.layers, part.embed = model.layers, model.embed
    policy = make_policy(model, 1)

    def stream():
        for number, item in enumerate(policy.items()):
            if number == 1:
                with pytest.raises(EngineBusyError, match=IN_USE):
                    Refitter(part).refit(make_policy(part, 2))
            yield item

    Refitter(model).refit(stream())
    assert_holds(model, policy)
    Refitter(part).refit(make_policy(part, 2))


# Orders.


class Order:
    """A driver elsewhere, step by step."""

    def __init__(self, server, refit="a"):
        self.server, self.refit = server, refit

    def __call__(self, order):
        reply = Reply.model_validate_json(self.server.handle(Request(id="", order=order).encode()))
        return reply.error.error() if reply.error is not None else reply

    def prepare(self, path, **options):
        source = messages.Files(path=str(path), stamps=as_source(path).stamps)
        config = RefitConfig(**options)
        return self(messages.Prepare(refit=self.refit, job=Job(config=config), source=source, keeps=()))

    def write(self):
        return self(messages.RefitStep(step="write", refit=self.refit))


@pytest.fixture
def folder(tmp_path):
    from safetensors.torch import save_file

    def make(policy, name="policy"):
        save_file(policy, tmp_path / f"{name}.safetensors")
        return tmp_path / f"{name}.safetensors"

    return make


def test_an_order_during_a_local_refit_is_refused_and_changes_nothing(model, folder):
    twice = Twice()
    policy, other = twice.policy(1), twice.policy(2)
    order, path = Order(RankServer(lambda: twice.cluster.ranks[0])), folder(other)

    def stream():
        for item in policy.items():
            for answer in (order.prepare(path), order(messages.Do(step="close")), order.write()):
                assert isinstance(answer, EngineBusyError), answer
            assert not isinstance(order(messages.RefitStep(step="abandon", refit="a")), Exception)
            order.refit += "a"
            yield item

    Refitter(twice.first).refit(stream())
    twice.cluster.assert_holds(policy, version=1)
    assert not isinstance(order.prepare(path), Exception)
    order.write()
    twice.cluster.assert_holds(other, version=2)


def test_a_driver_keeps_others_out_between_its_orders_until_it_is_silent_for_too_long(model, folder, monkeypatch):
    twice = Twice()
    policy, other = twice.policy(1), twice.policy(2)
    order = Order(RankServer(lambda: twice.cluster.ranks[0]))
    for refit in "ab":
        order.refit = refit
        order.prepare(folder(policy), timeout_s=50)
        assert not isinstance(order(messages.RefitStep(step="begin", refit=refit)), Exception)
        with pytest.raises(EngineBusyError, match=IN_USE):
            Refitter(twice.first).refit(other)
    now = time.monotonic()
    monkeypatch.setattr("fp8refit.live.turn.time.monotonic", lambda: now + 51)
    Refitter(twice.first).refit(other)
    assert isinstance(order.write(), RankFailedError)
    twice.cluster.assert_holds(other, version=1)


def test_what_a_driver_has_only_prepared_keeps_nobody_out_and_is_not_written_later(model, folder):
    twice = Twice()
    policy, other = twice.policy(1), twice.policy(2)
    order = Order(RankServer(lambda: twice.cluster.ranks[0]))
    order.prepare(folder(policy))
    Refitter(twice.first).refit(other)
    assert isinstance(order.write(), RankFailedError)
    twice.cluster.assert_holds(other, version=1)


def test_an_order_of_a_new_driver_takes_over_and_the_old_one_writes_no_more(model, folder):
    twice = Twice()
    policy, other = twice.policy(1), twice.policy(2)
    server = RankServer(lambda: twice.cluster.ranks[0])
    old, new = Order(server, "old"), Order(server, "new")
    old.prepare(folder(policy))
    new.prepare(folder(other, "other"))
    assert isinstance(old.write(), RankFailedError)
    new.write()
    twice.cluster.assert_holds(other, version=1)
    assert isinstance(old.write(), RankFailedError)


@pytest.mark.parametrize("is_known", [False, True])
def test_all_ranks_refuse_an_order_if_one_of_them_is_being_written(model, is_known):
    remote = Remote(Cluster("replicated"))
    policy = remote.cluster.make_policy(1)
    if is_known:
        remote.refitter.refit(policy)
    turn, version = remote.cluster.targets[1].turn, int(is_known)
    assert turn.take("somebody")
    before = remote.cluster.live_bytes()
    with pytest.raises(EngineBusyError, match=IN_USE):
        remote.refitter.refit(policy)
    assert remote.cluster.live_bytes() == before and remote.cluster.states == [(False, version)] * 2
    turn.end("somebody")
    remote.refitter.refit(policy)
    remote.cluster.assert_holds(policy, version=version + 1)


class Hosted:
    """A model, what is attached to it here, and a driver elsewhere."""

    def __init__(self, model, **options):
        self.model = model
        host = EngineHost(model)
        self.elsewhere = Refitter(HostedEngine(lambda message, _: host.answer(message)), **options)
        self.here = Refitter(model)


@pytest.mark.parametrize("first", ["here", "elsewhere"])
@pytest.mark.parametrize("does", ["refit", "verify"])
def test_a_refit_here_and_one_from_elsewhere(model, first, does):
    hosted = Hosted(model)
    policy, other = make_policy(model, 1), make_policy(model, 2)
    one, two = (hosted.here, hosted.elsewhere) if first == "here" else (hosted.elsewhere, hosted.here)

    def stream():
        for number, item in enumerate(policy.items()):
            if number > 1:  # the first is read to see whether there is any
                with pytest.raises(EngineBusyError):
                    getattr(two, does)(other)
                assert model.blocked == "a refit is under way"
            yield item

    one.refit(stream())
    assert_holds(model, policy)
    assert model.blocked is None
    two.refit(other)
    assert_holds(model, other)


def test_an_update_and_a_refit_from_elsewhere(model):
    hosted = Hosted(model)
    policy, other = make_policy(model, 1), make_policy(model, 2)
    with update(model) as begun:
        for item in policy.items():
            begun.load([item])
            with pytest.raises(EngineBusyError, match=IN_USE):
                hosted.elsewhere.refit(other)
    assert_holds(model, policy)


def test_ranks_elsewhere_are_kept_for_a_refit_from_the_process_of_their_host(model):
    """The engine's ranks are reached over a channel from here, and through a host from elsewhere."""
    remote = Remote(Cluster())
    host = EngineHost(remote.client)
    elsewhere = Refitter(HostedEngine(lambda message, _: host.answer(message)))
    policy, other = remote.cluster.make_policy(1), remote.cluster.make_policy(2)

    def stream(refused):
        for number, item in enumerate(policy.items()):
            if number > 1:
                with pytest.raises(EngineBusyError):
                    refused.refit(other)
            yield item

    remote.refitter.refit(stream(elsewhere))
    remote.cluster.assert_holds(policy, version=1)
    elsewhere.refit(stream(remote.refitter))
    remote.cluster.assert_holds(policy, version=2)
    assert remote.client.blocked is None


def test_two_threads_give_a_host_orders(model):
    host = EngineHost(model)
    policies = [make_policy(model, seed) for seed in range(4)]
    drivers = [Refitter(HostedEngine(lambda message, _: host.answer(message))) for _ in policies]
    outcomes = at_once(4, lambda index: drivers[index].refit(iter(policies[index].items())))
    done = {outcome.version: index for index, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)}
    assert all(isinstance(each, EngineBusyError | RankFailedError) for each in outcomes if isinstance(each, Exception))
    if done:
        assert_holds(model, policies[done[max(done)]])
    Refitter(model).refit(policies[0])
    assert_holds(model, policies[0])


# Below everything that is attached.


@pytest.mark.parametrize("new", ["prepared", "begun", "written"])
def test_a_displaced_write_stops_at_its_next_tensor_and_is_never_finished(new):
    model = FakeModel()
    target = make_target(model)
    policy, other = make_policy(model, 1), make_policy(model, 2)
    took = []

    def stream():
        for number, item in enumerate(policy.items()):
            if number == 3:
                took.append(target.prepare(as_source(other), RefitConfig()))
                if new == "begun":
                    target.begin(took[0])
                if new == "written":
                    target.write(took[0])
                took.append(live_bytes(model))
            yield item

    prepared = target.prepare(as_source(stream()), RefitConfig())
    with pytest.raises(DisplacedError):
        target.write(prepared)
    assert live_bytes(model) == took[1], "the old one wrote nothing more"
    assert target.is_dirty
    if new == "prepared":
        target.write(took[0])
    if new == "begun":
        target.finish()
    assert target.commit() == 1
    assert_holds(model, other)


def test_weights_that_sleep_discards_during_a_write_are_never_committed():
    model = FakeModel()
    target, policy = make_target(model), make_policy(model, 1)

    def stream():
        for number, item in enumerate(policy.items()):
            if number == 3:
                target.forget_values()
            yield item

    with pytest.raises(DisplacedError):
        target.write(target.prepare(as_source(stream()), RefitConfig()))
    assert target.is_dirty
    target.write(target.prepare(as_source(policy), RefitConfig()))
    target.commit()
    assert_holds(model, policy)


# Turns.


def test_a_turn_that_ran_out_goes_to_whoever_asks_first(monkeypatch):
    turn, clock = Turn(), [0.0]
    monkeypatch.setattr("fp8refit.live.turn.time.monotonic", lambda: clock[0])
    assert turn.is_free and turn.take("old", for_s=5) and not turn.is_free
    clock[0] = 5.0
    assert not turn.take("new")
    clock[0] = 5.1
    assert turn.is_free and turn.take("new") and not turn.take("old")
    turn.end("old")
    assert not turn.is_free
    turn.end("new")
    assert turn.is_free and turn.take("old")


def test_of_many_threads_one_at_a_time_has_a_turn():
    turn, inside, most, num_taken = Turn(), [], [], [0] * 8

    def work(index):
        for number in range(2000):
            holder = (index, number)
            if turn.take(holder, for_s=1e-7 if number % 7 == 0 else 1e9) and number % 7:
                inside.append(holder)
                most.append(len(inside))
                inside.remove(holder)
                num_taken[index] += 1
                turn.end(holder)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert set(most) == {1} and sum(num_taken) > 0
