"""Refits of an SGLang server over HTTP: fakes in the place of SGLang, behind a real server. Real engines: `tests/sglang/`."""

import asyncio
import contextlib
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang import SglangServer, server
from fp8refit_sglang.compat import handles_for, http_refusal

from fp8refit import (
    EngineBusyError,
    EngineLostError,
    NonFiniteError,
    RefitConfig,
    Refitter,
    UnsupportedEngineError,
)
from fp8refit.transport.orders import Answer, Caller, Hello, OrderRequest, Pause, Place, Resume
from tests.adapters import fake_sglang
from tests.adapters.fake_sglang import (
    Engine,
    HookRegistry,
    HTTPException,
    Server,
    UpdateWeightsFromIPCReqInput,
)
from tests.fake_ranks import Q_PROJ


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    fake_sglang.install(monkeypatch)


@pytest.fixture
def make_server():
    with contextlib.ExitStack() as stack:

        def make(*args, **kwargs) -> Server:
            engine = Engine(*args, **kwargs)
            stack.callback(engine.shutdown)
            running = Server(engine)
            stack.callback(running.close)
            return running

        yield make


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def running(request, make_server) -> Server:
    return make_server(request.param)


@pytest.fixture
def solo(make_server) -> Server:
    return make_server()


def spoilt(policy):
    return policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)}


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_serves(running: Server) -> None:
    assert running.engine.hidden() == set()
    assert running.engine.is_running()
    assert running.do(running.engine.async_generate("after")) == "stop"


def test_every_rank_of_a_server_holds_the_policy(running):
    refitter = Refitter(SglangServer(running.url + "/"))
    for version in (1, 2):
        policy = running.engine.make_policy(version)
        assert refitter.refit(policy).version == version
        running.engine.assert_holds(policy)
        assert running.manager.weight_version == str(version)
        assert_serves(running)


def test_a_server_is_refitted_from_an_event_loop(solo):
    policy = solo.engine.make_policy(1)
    asyncio.run(Refitter(SglangServer(solo.url)).refit_async(policy))
    solo.engine.assert_holds(policy)
    assert_serves(solo)


def test_requests_to_a_server_run_out_before_and_wait_until_the_refit_is_over(solo):
    engine, policy, late = solo.engine, solo.engine.make_policy(1), []
    early = solo.start(engine.async_generate("early", is_long=True))
    wait_until(lambda: engine.schedulers[0].running)

    def read():
        if solo.manager.is_pause and not late:
            assert early.done()
            late.append(solo.start(engine.async_generate("late")))
            time.sleep(0.02)
            assert not late[0].done()
        yield from policy.items()

    threading.Timer(0.05, lambda: solo.do(finish(solo.manager, "early"))).start()
    Refitter(SglangServer(solo.url)).refit(read)
    assert (early.result(10), late[0].result(10)) == ("stop", "stop")
    assert_serves(solo)


async def finish(manager, rid):
    manager.finish(rid)


def test_a_dirty_server_answers_503_until_it_is_healed(running):
    refitter, policy = Refitter(SglangServer(running.url)), running.engine.make_policy(2)
    with pytest.raises(NonFiniteError):
        refitter.refit(spoilt(running.engine.make_policy(1)))
    with pytest.raises(HTTPException, match=r"this engine refuses requests: .*failed part way") as caught:
        running.do(running.engine.async_generate("new"))
    assert caught.value.status_code == 503
    assert running.manager.rid_to_state == {}
    refitter.refit(policy)
    running.engine.assert_holds(policy)
    assert_serves(running)


def test_a_busy_server_says_so_and_goes_on(solo):
    request = solo.start(solo.engine.async_generate("long", is_long=True))
    wait_until(lambda: solo.engine.schedulers[0].running)
    with pytest.raises(EngineBusyError, match=r"1 request\(s\) did not finish within 0\.05 s"):
        Refitter(SglangServer(solo.url), timeout_s=0.05).refit(solo.engine.make_policy(1))
    assert solo.engine.hidden() == set()
    solo.do(finish(solo.manager, "long"))
    assert request.result(10) == "stop"


def test_weights_of_others_are_sglang_s_affair(solo):
    request = UpdateWeightsFromIPCReqInput(zmq_handles={"GPU-1": "ipc:///tmp/weights"})
    assert solo.do(solo.manager.update_weights_from_ipc(request)) == (False, "no ZMQ socket in ['GPU-1']")
    assert not hasattr(solo.manager, "_fp8refit_server_clerk")


# Who is at the other end.


@pytest.mark.parametrize("info", ["<html>", [], {"name": "a model"}], ids=str)
def test_another_server_is_refused(info, solo):
    solo.info = info
    with pytest.raises(UnsupportedEngineError, match="is no SGLang server: it answered otherwise"):
        Refitter(SglangServer(solo.url))


def test_a_server_without_the_plugin_is_refused(solo, monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    with pytest.raises(UnsupportedEngineError, match=r"does not load fp8refit's plugin.*answered 400: .*no ZMQ socket"):
        Refitter(SglangServer(solo.url))


def test_a_server_whose_schedulers_lack_the_plugin_is_refused(solo, monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", {fake_sglang.IN_SERVER})
    with pytest.raises(UnsupportedEngineError, match=r"does not load fp8refit's plugin.*no ZMQ socket in"):
        Refitter(SglangServer(solo.url)).refit(solo.engine.make_policy(1))
    assert_serves(solo)


def test_a_server_laid_out_otherwise_is_refused(make_server):
    with pytest.raises(UnsupportedEngineError, match="leave out pp_size"):
        Refitter(SglangServer(make_server(pp_size=2).url))


def test_a_server_that_cannot_be_reached_is_lost(solo):
    refitter = Refitter(SglangServer(solo.url))
    solo._http.shutdown()
    solo._http.server_close()
    with pytest.raises(EngineLostError, match="cannot be reached"):
        refitter.refit(solo.engine.make_policy(1))
    with pytest.raises(EngineLostError, match=r"cannot be reached .*start it again"):
        Refitter(SglangServer(solo.url))


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_every_request_bears_the_api_key(api_key, solo):
    Refitter(SglangServer(solo.url, api_key=api_key)).refit(solo.engine.make_policy(1))
    expected = None if api_key is None else "Bearer secret"
    assert {headers.get("Authorization") for headers in solo.headers} == {expected}


# Drivers that die or are interrupted. What any server owes them: `tests/test_served.py`.


def order(message, driver: Caller) -> UpdateWeightsFromIPCReqInput:
    return UpdateWeightsFromIPCReqInput(zmq_handles=handles_for(OrderRequest(driver=driver, order=message).encode()))


def pause(timeout_s: float) -> Pause:
    return Pause(config=RefitConfig(timeout_s=timeout_s))


def test_requests_do_not_wait_for_a_driver_that_died_before_it_wrote(running):
    process = subprocess.Popen(["sleep", "60"])
    driver = Caller(place=Place.here(), pid=process.pid, name="dying")
    assert running.do(running.manager.update_weights_from_ipc(order(pause(timeout_s=5), driver)))[0]
    waiting = running.start(running.engine.async_generate("waiting"))
    process.kill()
    assert waiting.result(10) == "stop"
    process.wait()
    assert_serves(running)


def test_a_server_refuses_requests_after_a_driver_that_died_part_way(running):
    with pytest.raises(NonFiniteError):
        Refitter(SglangServer(running.url)).refit(spoilt(running.engine.make_policy(1)))
    process = subprocess.Popen(["sleep", "60"])
    driver = Caller(place=Place.here(), pid=process.pid, name="dying")
    running.do(running.manager.update_weights_from_ipc(order(pause(timeout_s=5), driver)))
    waiting = running.start(running.engine.async_generate("waiting"))
    process.kill()
    with pytest.raises(HTTPException, match="the driver of a refit died, part way"):
        waiting.result(10)
    process.wait()
    Refitter(SglangServer(running.url)).refit(running.engine.make_policy(2))
    assert_serves(running)


def test_a_driver_that_is_interrupted_while_requests_run_out_leaves_the_server_running(solo):
    driver = Caller.new()

    async def steps():
        running = asyncio.create_task(solo.engine.async_generate("long", is_long=True))
        await asyncio.sleep(0.01)
        pausing = asyncio.create_task(solo.manager.update_weights_from_ipc(order(pause(timeout_s=5), driver)))
        await asyncio.sleep(0.01)
        resuming = asyncio.create_task(solo.manager.update_weights_from_ipc(order(Resume(), driver)))
        await asyncio.sleep(0.01)
        solo.manager.finish("long")
        await asyncio.gather(running, pausing, resuming)

    solo.do(steps())
    assert_serves(solo)


def hello_from(host: str | None, solo: Server) -> str:
    request = None if host is None else SimpleNamespace(client=SimpleNamespace(host=host))
    return solo.do(solo.manager.update_weights_from_ipc(order(Hello(), Caller.new()), request))[1]


def test_callers_on_other_hosts_are_known_by_the_server_s_api_key(solo):
    for host in (None, "127.0.0.1", "::1"):
        assert Answer.model_validate_json(hello_from(host, solo)).error is None
    for host in ("10.0.0.7", "somewhere"):
        assert "takes weights from its own host alone" in hello_from(host, solo)
    solo.manager.server_args.api_key = "secret"
    assert Answer.model_validate_json(hello_from("10.0.0.7", solo)).error is None


def test_an_order_that_is_too_long_is_refused(solo, monkeypatch):
    monkeypatch.setattr(server, "MAX_BYTES", 10)
    assert "bytes is none of ours" in hello_from(None, solo)


def test_a_server_is_found_by_its_url(running):
    policy = running.engine.make_policy(1)
    Refitter(running.url).refit(policy)
    running.engine.assert_holds(policy)
    assert_serves(running)


def test_drivers_that_take_turns_do_not_disturb_each_other(solo):
    first, second = Refitter(SglangServer(solo.url)), Refitter(SglangServer(solo.url))
    versions = [
        refitter.refit(solo.engine.make_policy(seed)).version for seed, refitter in enumerate((first, second, first))
    ]
    assert versions == [1, 2, 3]


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UnsupportedEngineError, match="is no URL of a server"):
        SglangServer(url)


def test_a_refused_stream_is_told_as_a_value_error_too(solo):
    plain, stream = (http_refusal("half written", SimpleNamespace(stream=is_stream)) for is_stream in (False, True))
    assert (plain.status_code, stream.status_code) == (503, 503)
    assert (isinstance(plain, ValueError), isinstance(stream, ValueError)) == (False, True)


# Prompts.


def test_prompts_are_those_of_the_server_s_tokenizer(running):
    report = Refitter(SglangServer(running.url)).refit(running.engine.make_policy(1), calibration=["2 3", "4"])
    assert report.kv.num_tokens == 5
    assert {scheduler.network.attention.k_scale_float for scheduler in running.engine.schedulers} == {
        report.kv.scales["model.layers.0.self_attn.k_scale"]
    }
    assert_serves(running)


def test_a_server_without_a_tokenizer_asks_for_token_ids(running):
    running.manager.tokenizer = None
    with pytest.raises(UnsupportedEngineError, match="calibrate with token ids in the place of prompts"):
        Refitter(SglangServer(running.url)).refit(running.engine.make_policy(1), calibration="2 3")
    assert_serves(running)
