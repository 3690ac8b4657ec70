"""Refits by URL, of a fake engine: what a driver and a server owe each other, whatever the engine."""

import asyncio
import contextlib
import os
import resource
import subprocess
import time

import pytest
import torch

from fp8refit import RefitConfig, Refitter
from fp8refit.errors import (
    CacheFlushError,
    EngineBusyError,
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    TransportError,
    UnsupportedEngineError,
)
from fp8refit.remote.protocol import messages
from fp8refit.remote.servers import order_handler, orders
from fp8refit.remote.servers.orders import Caller, OrderRequest, Pause, Place, Refuse, Resume
from fp8refit.remote.servers.server_driver import ServerDriver
from tests.fake_ranks import NORM, Q_PROJ, as_files, as_iterator, as_mapping, manifest_of
from tests.fake_server import URL, Running, entry_point_of

TOKEN = "c0ffee-c0ffee-c0ffee"
ELSEWHERE = Place(boot_id="another host", pid_namespace=1)


@pytest.fixture
def make_running(monkeypatch):
    made = []

    def make(**options) -> Running:
        made.append(Running(**options))
        entry_point = entry_point_of(made[-1])
        monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [entry_point])
        return made[-1]

    yield make
    for running in made:
        running.close()


@pytest.fixture
def running(make_running) -> Running:
    return make_running()


@pytest.fixture
def server(running):
    return running.kind(URL)


def spoilt(policy):
    return policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)}


def wait_until(condition) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def dead_driver() -> Caller:
    process = subprocess.Popen(["true"])
    caller = Caller(place=Place.here(), pid=process.pid, name="dead")
    process.wait()
    return caller


def dying_driver() -> tuple[Caller, subprocess.Popen]:
    process = subprocess.Popen(["sleep", "60"])
    return Caller(place=Place.here(), pid=process.pid, name="dying"), process


def give(running: Running, order, driver: Caller) -> orders.Answer:
    said = running.answer(OrderRequest(driver=driver, order=order).encode())
    return orders.Answer.model_validate_json(said)


def pause(timeout_s: float = 5, number: int = 0) -> Pause:
    return Pause(config=RefitConfig(timeout_s=timeout_s), number=number)


# Policies.


@pytest.mark.parametrize("as_source", [as_mapping, as_files, as_iterator])
def test_every_rank_holds_the_policy(as_source, running, tmp_path):
    refitter = Refitter(URL)
    for version in (1, 2):
        policy = running.cluster.make_policy(version)
        assert refitter.refit(**as_source(policy, tmp_path)).version == version
        running.cluster.assert_holds(policy, version=version)
    assert running.events == ["pause", "flush", "publish 1", "resume", "pause", "flush", "publish 2", "resume"]


def test_a_server_is_refitted_from_an_event_loop(running):
    policy = running.cluster.make_policy(1)
    report = asyncio.run(Refitter(URL).refit_async(policy))
    running.cluster.assert_holds(policy, version=1)
    assert report.num_interrupted == 3


def test_a_policy_that_does_not_fit_lets_requests_go_on(running):
    with pytest.raises(InvalidSourceError, match=NORM):
        Refitter(URL).refit({NORM: torch.zeros(3)})
    assert running.events == []


def test_a_refit_that_fails_part_way_leaves_the_server_refusing_until_the_next(running):
    refitter = Refitter(URL)
    with pytest.raises(NonFiniteError):
        refitter.refit(spoilt(running.cluster.make_policy(1)))
    assert running.events[-1].startswith("refuse: the last refit failed part way")
    refitter.refit(running.cluster.make_policy(2))
    assert running.events[-1] == "resume"


def test_files_that_the_server_cannot_see_are_read_by_the_driver(running, tmp_path, monkeypatch):
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
    policy = running.cluster.make_policy(1)
    Refitter(URL).refit(**as_files(policy, tmp_path))
    running.cluster.assert_holds(policy, version=1)
    assert "stream" in running.controls.channel.steps


# Servers that start again.


def test_a_server_that_was_started_again_is_found_again(running):
    refitter = Refitter(URL)
    policy = running.cluster.make_policy(1)
    for _ in range(3):
        refitter.refit(policy)
    running.start()
    assert refitter.refit(policy).version == 1
    running.cluster.assert_holds(policy, version=1)


def test_a_server_that_was_away_is_found_again(running, monkeypatch):
    refitter, policy = Refitter(URL), running.cluster.make_policy(1)
    refitter.refit(policy)

    def away(message: str, headers: dict) -> str:
        raise EngineLostError("the server cannot be reached")

    with monkeypatch.context() as patched, pytest.raises(EngineLostError):
        patched.setattr(running, "answer", away)
        refitter.refit(policy)
    running.start()
    assert refitter.refit(policy).version == 1


def test_a_server_that_was_started_again_is_not_told_the_version_of_the_one_before(running, monkeypatch):
    refitter, policy = Refitter(URL), running.cluster.make_policy(1)
    answer = running.answer

    def lost_at_last(message: str, headers: dict) -> str:
        if OrderRequest.decode(message).order.step == "resume":
            raise EngineLostError("the server cannot be reached")
        return answer(message, headers)

    async def keep_caches():
        raise CacheFlushError("blocks are in use")

    with monkeypatch.context() as patched, pytest.raises(EngineLostError):
        patched.setattr(running, "answer", lost_at_last)
        patched.setattr(running.controls, "resume", stuck)
        refitter.refit(policy)
    running.start()
    running.controls.flush_caches = keep_caches
    with pytest.raises(CacheFlushError):
        refitter.refit(policy)
    assert running.events == ["pause", "resume"]


async def stuck():
    raise RankFailedError("the scheduler is stuck")


def test_an_engine_that_does_not_resume_with_the_write_is_ordered_to_and_the_driver_hears_why(running, monkeypatch):
    refitter, policies = Refitter(URL), [running.cluster.make_policy(seed) for seed in (1, 2)]
    with monkeypatch.context() as patched, pytest.raises(RankFailedError, match="the scheduler is stuck"):
        patched.setattr(running.controls, "resume", stuck)
        refitter.refit(policies[0])
    assert running.orders[-2:] == ["resume", "refuse"]
    refitter.refit(policies[1])
    running.cluster.assert_holds(policies[1], version=2)
    assert running.events[-1] == "resume"


def test_what_ranks_say_before_they_have_written_resumes_nothing(running):
    """A server that does not know that its ranks have another version, as after a refit by a drop-in."""
    for target in running.cluster.targets:
        target.version = 7
    driver = Caller.new()
    give(running, pause(), driver)
    request = messages.Request(id="one", order=messages.Do(step="hello"))
    answer = give(running, orders.Send(messages=(request.encode(),), timeouts_s=(5.0,)), driver)
    assert '"version":7' in answer.said[0] and not answer.is_resumed
    assert running.events == ["pause"]
    give(running, Resume(), driver)


# Who may ask.


def test_a_server_with_a_token_takes_orders_from_those_who_know_it(make_running, monkeypatch):
    running = make_running(token=TOKEN, is_trusted=False)
    with pytest.raises(UnsupportedEngineError, match="the token is not that of the server; set FP8REFIT_TOKEN"):
        Refitter(URL)
    with pytest.raises(UnsupportedEngineError, match="the token is not that of the server"):
        Refitter(running.kind(URL, token=TOKEN[::-1]))
    monkeypatch.setenv("FP8REFIT_TOKEN", TOKEN)
    Refitter(URL).refit(running.cluster.make_policy(1))


def test_a_server_without_one_takes_orders_from_those_whom_it_knows(make_running):
    make_running(is_trusted=False)
    with pytest.raises(
        UnsupportedEngineError, match=r"takes weights from its own host alone; start it with an API key, or"
    ):
        Refitter(URL)


@pytest.mark.parametrize("message", ["", "{", '{"driver": 1}', "[]"])
def test_what_is_no_order_is_answered(message, running):
    assert "cannot read what the driver says" in running.answer(message)
    assert not running.handler._turn.locked()
    Refitter(URL).refit(running.cluster.make_policy(1))


# Drivers on another host.


def test_tensors_of_another_host_are_refused_with_what_helps(running, monkeypatch):
    running.handler._place = ELSEWHERE
    with pytest.raises(TransportError, match=r'runs on another host .* set transport="collective", or pass the path'):
        Refitter(URL).refit(running.cluster.make_policy(1))
    assert running.events == []


def test_files_are_read_by_a_server_on_another_host(running, tmp_path):
    running.handler._place = ELSEWHERE
    policy = running.cluster.make_policy(1)
    Refitter(URL).refit(**as_files(policy, tmp_path))
    running.cluster.assert_holds(policy, version=1)


def test_files_that_a_server_on_another_host_cannot_see_are_refused(running, tmp_path, monkeypatch):
    running.handler._place = ELSEWHERE
    monkeypatch.setattr(order_handler, "can_read", lambda path: False)
    with pytest.raises(TransportError, match="pass the path of a checkpoint that the server can read"):
        Refitter(URL).refit(**as_files(running.cluster.make_policy(1), tmp_path))


# Drivers that collide, die and fall silent.


def test_a_driver_that_holds_the_server_keeps_others_out(running, server):
    server.post(pause(), timeout_s=5)
    with pytest.raises(EngineBusyError, match="another driver refits this server"):
        Refitter(URL)
    server.post(Resume(), timeout_s=5)
    Refitter(URL).refit(running.cluster.make_policy(1))


@pytest.mark.parametrize("is_paused", [False, True])
def test_an_order_to_resume_that_comes_again_sets_no_older_version(is_paused, running, server):
    refitter = Refitter(URL)
    for seed in (1, 2):
        refitter.refit(running.cluster.make_policy(seed))
    if is_paused:
        server.post(pause(), timeout_s=5)
    events = list(running.events)
    for version in (0, 1, *([2] if is_paused else [])):
        with pytest.raises(
            RankFailedError, match=f"version {version} came again or too late: the server is at version 2"
        ):
            server.post(Resume(version=version), timeout_s=5)
    assert running.events == events  # nothing was published, nor resumed
    server.post(Resume(version=3 if is_paused else 2), timeout_s=5)
    assert running.events[-1] == "resume"


@pytest.mark.parametrize("version", [1, None])
def test_an_order_to_resume_that_comes_late_makes_no_dirty_server_serve(version, running, server):
    refitter, policy = Refitter(URL), running.cluster.make_policy(1)
    refitter.refit(policy)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)})
    events = list(running.events)
    with pytest.raises(RankFailedError, match=r"came again or too late: .* its ranks are dirty"):
        server.post(Resume(version=version), timeout_s=5)
    assert running.events == events
    refitter.refit(policy)
    assert running.events[-1] == "resume"


@pytest.mark.parametrize("late", [Resume(number=1), Refuse(reason="gone", number=1), pause(number=1)])
def test_an_order_of_an_earlier_pause_of_the_same_driver_does_nothing(late, running, server):
    for number in (1, 2):
        server.post(pause(number=number), timeout_s=5)
        if number == 1:
            server.post(Resume(number=number), timeout_s=5)
    events = list(running.events)
    with pytest.raises(RankFailedError, match=f"an order to {late.step} came again or too late: this driver has begun"):
        server.post(late, timeout_s=5)
    assert running.events == events
    server.post(Resume(number=2), timeout_s=5)
    assert running.events == [*events, "resume"]


def test_a_pause_that_comes_after_its_end_pauses_nothing(running, server):
    """The driver gave it up while the order was on its way, or the order came again."""
    server.post(Resume(number=1), timeout_s=5)
    for number in (1, 2):
        if number == 2:
            server.post(pause(number=number), timeout_s=5)
            server.post(Resume(number=number), timeout_s=5)
        events = list(running.events)
        with pytest.raises(RankFailedError, match="an order to pause came again or too late"):
            server.post(pause(number=number), timeout_s=5)
        assert running.events == events
    Refitter(URL).refit(running.cluster.make_policy(1))


def test_a_driver_numbers_its_pauses(running, monkeypatch):
    answer, numbers = running.answer, []

    def heard(message: str, headers: dict) -> str:
        numbers.append(getattr(OrderRequest.decode(message).order, "number", None))
        return answer(message, headers)

    monkeypatch.setattr(running, "answer", heard)
    refitter = Refitter(URL)
    for seed in (1, 2):
        refitter.refit(running.cluster.make_policy(seed))
    assert list(filter(None, numbers)) == [1, 2]


def test_drivers_of_one_connection_number_their_pauses_together(running, server):
    for driver in (ServerDriver(server), ServerDriver(server)):
        asyncio.run(driver.pause(RefitConfig()))
        asyncio.run(driver.resume())
    assert running.events == ["pause", "resume"] * 2


def test_a_pause_that_fails_ends_no_earlier_one(running, server, monkeypatch):
    async def busy(config):
        raise EngineBusyError("requests did not finish in time")

    server.post(pause(), timeout_s=5)
    with monkeypatch.context() as patch:
        patch.setattr(running.controls, "pause", busy)
        with pytest.raises(EngineBusyError, match="did not finish"):
            server.post(pause(), timeout_s=5)
    assert running.handler._holder is not None
    server.post(Resume(), timeout_s=5)
    with monkeypatch.context() as patch:
        patch.setattr(running.controls, "pause", busy)
        with pytest.raises(EngineBusyError, match="did not finish"):
            server.post(pause(), timeout_s=5)
    assert running.handler._holder is None


def test_a_driver_that_dies_before_it_writes_lets_requests_go_on(running):
    driver, process = dying_driver()
    give(running, pause(), driver)
    process.kill()
    wait_until(lambda: "resume" in running.events)
    assert running.events == ["pause", "resume"]
    process.wait()


def test_a_driver_that_is_dead_is_noticed_in_a_server_with_a_thousand_connections(running):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        give(running, pause(), Caller.new())
        assert running.handler._process > 1024
        with pytest.raises(EngineBusyError, match="another driver refits this server"):
            Refitter(URL)


def test_a_reason_that_is_long_is_cut(running):
    driver = ServerDriver(running.kind(URL))
    asyncio.run(driver.pause(RefitConfig()))
    asyncio.run(driver.refuse("x" * 1_000_000))
    assert running.events == ["pause", "refuse: " + "x" * orders.MAX_REASON]


def test_a_driver_that_holds_no_server_makes_none_refuse_that_holds_a_whole_policy(running):
    driver = ServerDriver(running.kind(URL))
    asyncio.run(driver.refuse("the engine is lost"))
    assert running.events == ["resume"]
    with pytest.raises(NonFiniteError):
        Refitter(URL).refit(spoilt(running.cluster.make_policy(1)))
    asyncio.run(driver.refuse("x" * 1_000_000))
    assert running.events[-1] == "refuse: " + "x" * orders.MAX_REASON


@pytest.mark.parametrize("path", ["/nowhere", "/\0", "/\udcff", "x" * 10_000])
def test_a_path_that_is_none_cannot_be_read(path, server):
    assert server.sees(path) is False


def test_ranks_that_say_what_nobody_knows_leave_the_server_refusing(running):
    driver, process = dying_driver()
    give(running, pause(), driver)

    async def babble(message: str, timeout_s: float) -> list[str]:
        return ["babble"]

    running.controls.channel.call = babble
    process.kill()
    wait_until(lambda: len(running.events) == 2)
    assert running.events[-1].startswith("refuse: the driver of a refit died, and the engine did not go on")
    assert not running.handler._turn.locked()
    process.wait()


def test_a_driver_that_dies_part_way_leaves_the_server_refusing(running):
    with pytest.raises(NonFiniteError):
        Refitter(URL).refit(spoilt(running.cluster.make_policy(1)))
    driver, process = dying_driver()
    give(running, pause(), driver)
    process.kill()
    wait_until(lambda: len(running.events) == 5)
    assert running.events[-1].startswith("refuse: the driver of a refit died, part way; the next refit that succeeds")
    process.wait()
    Refitter(URL).refit(running.cluster.make_policy(2))
    assert running.events[-1] == "resume"


def test_a_driver_that_dies_after_the_ranks_committed_leaves_the_new_version(running):
    refitter = Refitter(URL)
    refitter.refit(running.cluster.make_policy(1))
    running.handler._version = 0  # as if it had died before it could publish
    driver, process = dying_driver()
    give(running, pause(), driver)
    process.kill()
    wait_until(lambda: running.events[-1] == "resume" and len(running.events) > 5)
    assert running.events[-2:] == ["publish 1", "resume"]
    process.wait()


def test_the_next_driver_does_not_wait_for_one_that_is_dead(running):
    driver, process = dying_driver()
    give(running, pause(), driver)
    process.kill()
    process.wait()
    assert Refitter(URL).refit(running.cluster.make_policy(1)).version == 1


def test_a_driver_that_died_while_requests_were_waited_for_is_not_waited_for_itself(running):
    give(running, pause(), dead_driver())
    wait_until(lambda: "resume" in running.events)


@pytest.mark.parametrize("place", [Place.here(), ELSEWHERE], ids=["here", "elsewhere"])
def test_requests_do_not_wait_for_a_driver_that_falls_silent(place, running, monkeypatch):
    monkeypatch.setattr(order_handler, "SILENCE_S", 0.02)
    give(running, pause(timeout_s=0.05), Caller(place=place, pid=os.getpid(), name="silent"))
    wait_until(lambda: "resume" in running.events)
    assert Refitter(URL).refit(running.cluster.make_policy(1)).version == 1


@pytest.mark.parametrize("fate", ["gives the refit up", "is restarted"])
@pytest.mark.parametrize("is_known", [False, True], ids=["a new stream", "a stream like the last"])
def test_nothing_is_written_while_a_server_serves(is_known, fate, running, monkeypatch):
    """The first tensor comes late: the server has let requests in by then, or is another one."""
    monkeypatch.setattr(order_handler, "SILENCE_S", 0.05)
    refitter, version = Refitter(URL, timeout_s=0.1), 0
    if is_known:
        version = refitter.refit(**stream_of(running.cluster.make_policy(1))).version
    running.events.clear()
    policy = running.cluster.make_policy(2)

    def read():
        if fate == "is restarted":
            running.start()
        else:
            wait_until(lambda: "resume" in running.events)
        yield from policy.items()

    with pytest.raises(RankFailedError, match=r"(gave (this refit|it) up).*refit again"):
        refitter.refit(read, manifest=manifest_of(policy))
    held = version if fate == "gives the refit up" else 0
    assert running.cluster.states == [(False, held)] * len(running.cluster.ranks)
    assert "pause" not in running.events[1:]
    assert running.events[-1] == "resume"
    report = refitter.refit(**stream_of(policy))
    running.cluster.assert_holds(policy, version=report.version)


def test_a_stream_like_the_last_is_one_order_to_the_server(running):
    refitter = Refitter(URL)
    for version in (1, 2):
        running.orders.clear()
        policy = running.cluster.make_policy(version)
        refitter.refit(**stream_of(policy))
        running.cluster.assert_holds(policy, version=version)
    # The last for the stream's end, with which the server resumes.
    assert running.orders == ["hello", "pause", "send 2", "send 1"]


def stream_of(policy):
    return {"state_dict": lambda: iter(policy.items()), "manifest": manifest_of(policy)}


def test_a_driver_that_says_something_is_waited_for_anew(running, monkeypatch):
    monkeypatch.setattr(order_handler, "SILENCE_S", 0.7)
    driver = Caller.new()
    give(running, pause(timeout_s=0.1), driver)
    for _ in range(5):
        time.sleep(0.2)
        give(running, orders.Hello(), driver)
    assert running.events == ["pause"]
    give(running, Resume(), driver)
    time.sleep(1.0)
    assert running.events == ["pause", "resume"]


def test_what_no_adapter_knows_is_refused(running):
    with pytest.raises(UnsupportedEngineError, match=r"http://other:1 is no server of an engine .* \(fake\)"):
        Refitter("http://other:1")


@pytest.mark.parametrize("url", ["ftp://fake:1", "fake://"])
def test_what_is_no_url_of_a_server_is_refused(url, running):
    with pytest.raises(UnsupportedEngineError, match="is no URL of a server"):
        Refitter(url)
