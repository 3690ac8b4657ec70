"""Engines in processes of the user's own: what is ordered in one place is done in the other. Here both are this process."""

import asyncio
import signal
import subprocess
from functools import partial

import pytest
import torch

from fp8refit import (
    Broadcaster,
    EngineBusyError,
    EngineHost,
    EngineLostError,
    HostedEngine,
    InvalidSourceError,
    NonFiniteError,
    RefitConfig,
    Refitter,
    UnsupportedEngineError,
)
from fp8refit.remote.servers.order_handler import OrderHandler
from fp8refit.remote.servers.orders import Caller, OrderRequest, Pause, Place
from tests.fake_ranks import NORM, Q_PROJ, ClientEngine, ClientEntryPoint, Cluster, Drivers, Remote
from tests.fakes import FakeEntryPoint, FakeModel, assert_holds, make_policy


@pytest.fixture(autouse=True)
def adapters(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


class Hosted:
    """An engine of two ranks, its host, and what asks it from elsewhere."""

    def __init__(self, *, is_asynchronous=False):
        remote = Remote(Cluster(), suspends=is_asynchronous)
        self.cluster, self.client = remote.cluster, remote.client
        self.host = EngineHost(self.client)
        self.timeouts_s = []

    def ask(self, message, timeout_s):
        self.timeouts_s.append(timeout_s)
        return self.host.answer(message)


@pytest.fixture
def hosted():
    return Hosted()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_one_order_and_not_the_next(kind, hosted, monkeypatch):
    refitter, policy = Refitter(HostedEngine(hosted.ask)), hosted.cluster.make_policy(1)
    refitter.refit(policy)

    async def interrupted(*_, **__):
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(OrderHandler, "_obey", interrupted)
        with pytest.raises(kind):
            refitter.refit(policy)
    try:
        assert refitter.refit(policy).version == 2
    except kind:
        pytest.fail("it came out of the next order")
    hosted.cluster.assert_holds(policy, version=2)


@pytest.fixture
def interrupts():
    """Python's own handler of SIGINT, which a process in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("is_model_here", [False, True])
@pytest.mark.parametrize("place", range(1, 8))
def test_an_interrupt_in_any_order_leaves_an_engine_that_serves_or_is_dirty(place, is_model_here, is_far, monkeypatch):
    """SIGINT, as from Ctrl-C: in the driver's process, or in the engine's, whose driver then hears nothing."""
    kinds = [FakeEntryPoint() if is_model_here else ClientEntryPoint()]
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: kinds)
    cluster, model, orders, armed = Cluster(), FakeModel(), [], set()
    engine, make = (
        (model, partial(make_policy, model)) if is_model_here else (Remote(cluster).client, cluster.make_policy)
    )
    host, obey = EngineHost(engine), OrderHandler._obey

    def ask(message, timeout_s):
        try:
            return host.answer(message)
        except KeyboardInterrupt:
            if not is_far:
                raise
            raise RuntimeError("the actor was interrupted") from None

    async def interrupted(handler, order, driver):
        orders.append(order.step)
        if len(orders) in armed:
            signal.raise_signal(signal.SIGINT)
        return await obey(handler, order, driver)

    monkeypatch.setattr(OrderHandler, "_obey", interrupted)
    refitter = Refitter(HostedEngine(ask))
    refitter.refit(make(1))
    assert orders[-1] == "send", "with which it resumes"
    orders.clear()
    armed.add(place)
    with pytest.raises((KeyboardInterrupt, EngineLostError)):
        refitter.refit(make(2))
    targets = [host._engine.ranks.rank.target] if is_model_here else cluster.targets
    is_dirty = any(target.is_dirty for target in targets)
    assert (engine.blocked is not None) == is_dirty
    assert not is_dirty or "flush" in orders[: place - 1]
    assert host._handler._holder is None
    armed.clear()
    refitter.refit(make(3))
    assert engine.blocked is None and not any(target.is_dirty for target in targets)


@pytest.mark.parametrize("method", ["pause", "resume"])
def test_an_interrupt_while_requests_are_paused_or_resumed_leaves_an_engine_that_serves(method, hosted):
    refitter = Refitter(HostedEngine(hosted.ask))
    refitter.refit(hosted.cluster.make_policy(1))
    controls, armed = hosted.host._handler._controls, [True]
    original = getattr(controls, method)

    async def interrupted(*arguments):
        found = await original(*arguments)
        if armed:
            armed.clear()
            raise KeyboardInterrupt
        return found

    setattr(controls, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        refitter.refit(hosted.cluster.make_policy(2))
    assert hosted.client.blocked is None and hosted.host._handler._holder is None
    refitter.refit(hosted.cluster.make_policy(3))


def test_policies_arrive_one_after_another(hosted):
    refitter = Refitter(HostedEngine(hosted.ask))
    for version in (1, 2):
        policy = hosted.cluster.make_policy(version)
        assert refitter.refit(policy).version == version
        hosted.cluster.assert_holds(policy, version=version)
    steps = [event for event in hosted.client.events if event in ("pause", "flush", "resume")]
    assert steps == ["pause", "flush", "resume"] * 2
    assert min(hosted.timeouts_s) >= RefitConfig().timeout_s


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_a_model_in_the_process_of_its_host(transport, monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint()])
    model = FakeModel()
    host = EngineHost(model)
    with Refitter(HostedEngine(lambda message, _: host.answer(message)), transport=transport) as refitter:
        for seed in (1, 2):
            policy = make_policy(model, seed)
            refitter.refit(policy)
            assert_holds(model, policy)


def test_several_take_one_broadcast():
    replicas = [Hosted(), Hosted()]
    policy = replicas[0].cluster.make_policy(1)
    with Broadcaster([HostedEngine(each.ask) for each in replicas], timeout_s=40) as broadcaster:
        broadcaster.push(policy)
    for each in replicas:
        each.cluster.assert_holds(policy, version=1)


def test_one_that_is_busy_is_named_and_leaves_all_as_they_were():
    replicas = [Hosted(), Hosted()]
    policy = replicas[0].cluster.make_policy(1)
    engines = [HostedEngine(each.ask, label=f"replica {place}") for place, each in enumerate(replicas)]
    replicas[1].client.is_busy = True
    with Broadcaster(engines, timeout_s=40) as broadcaster:
        with pytest.raises(EngineBusyError, match="2 requests are unfinished") as caught:
            broadcaster.push(policy)
        assert caught.value.__notes__ == ["from replica 1"]
        for each in replicas:
            assert each.cluster.states == [(False, 0)] * 2
            assert each.client.blocked is None
        replicas[1].client.is_busy = False
        broadcaster.push(policy)
    replicas[1].cluster.assert_holds(policy, version=1)


def test_an_asynchronous_engine_is_asked_in_its_event_loop(monkeypatch):
    monkeypatch.setattr(ClientEngine, "is_asynchronous", True)
    hosted = Hosted(is_asynchronous=True)
    policy = hosted.cluster.make_policy(1)

    async def refit() -> None:
        loop = asyncio.get_running_loop()

        def ask(message, timeout_s):
            return asyncio.run_coroutine_threadsafe(hosted.host.answer_async(message), loop).result(timeout_s)

        refitter = Refitter(await asyncio.to_thread(HostedEngine, ask))
        await refitter.refit_async(policy)

    asyncio.run(refit())
    hosted.cluster.assert_holds(policy, version=1)
    with pytest.raises(UnsupportedEngineError, match="await answer_async"):
        hosted.host.answer("")


def test_what_goes_wrong_comes_back_and_the_next_refit_heals(hosted):
    refitter = Refitter(HostedEngine(hosted.ask))
    with pytest.raises(InvalidSourceError, match=NORM):
        refitter.refit({NORM: torch.zeros(3)})
    policy = hosted.cluster.make_policy(1)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)})
    assert refitter.is_dirty
    assert hosted.client.blocked.startswith("the last refit failed part way")
    refitter.refit(policy)
    hosted.cluster.assert_holds(policy, version=1)
    assert hosted.client.blocked is None


def test_an_engine_that_does_not_answer_is_lost_and_found_again_when_another_one_does(hosted):
    refitter = Refitter(HostedEngine(lambda message, timeout_s: hosted.ask(message, timeout_s), label="the actor"))
    policy = hosted.cluster.make_policy(1)
    refitter.refit(policy)
    hosted.host = None
    with pytest.raises(EngineLostError, match=r"the actor does not answer \(AttributeError"):
        refitter.refit(policy)
    again = Hosted()
    hosted.host = again.host
    assert refitter.refit(policy).version == 1
    again.cluster.assert_holds(policy, version=1)


def test_a_driver_keeps_others_out_until_it_dies(hosted):
    process = subprocess.Popen(["sleep", "60"])
    driver = Caller(place=Place.here(), pid=process.pid, name="dying")
    hosted.host.answer(OrderRequest(driver=driver, order=Pause(config=RefitConfig())).encode())
    with pytest.raises(EngineBusyError, match="another driver"):
        HostedEngine(hosted.ask)
    process.kill()
    process.wait()
    policy = hosted.cluster.make_policy(1)
    Refitter(HostedEngine(hosted.ask)).refit(policy)
    hosted.cluster.assert_holds(policy, version=1)


def test_ranks_with_a_driver_each_have_no_host():
    with pytest.raises(UnsupportedEngineError, match="a driver for each rank"):
        EngineHost(Drivers(Cluster()).clients[0])


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(TypeError, match="ask is of type str; pass a function"):
        HostedEngine("http://127.0.0.1:8000")
