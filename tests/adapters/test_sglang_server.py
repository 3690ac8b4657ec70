"""Refits of an SGLang server over HTTP: fakes instead of SGLang, behind a real server. Real engines: `tests/sglang/`."""

import asyncio
import contextlib
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fastapi import HTTPException
from fp8refit_sglang import SglangServer
from fp8refit_sglang.compat import handles_for, http_refusal

from fp8refit import (
    EngineLostError,
    NonFiniteError,
    RankFailedError,
    RefitConfig,
    Refitter,
    UnsupportedEngineError,
)
from fp8refit.remote.servers.orders import Answer, Caller, Hello, OrderRequest, Pause, Resume
from fp8refit.transport.vote import ErrorRecord
from tests.adapters import fake_sglang
from tests.adapters.fake_sglang import (
    Engine,
    HookRegistry,
    Server,
    UpdateWeightsFromIPCReqInput,
)
from tests.asgi import ELSEWHERE, LOCAL, order_headers, post
from tests.fake_ranks import Q_PROJ

ROUTE = "/update_weights_from_ipc"
TOKEN = "c0ffee-c0ffee-c0ffee"


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


def test_weights_of_others_are_sglang_s_affair(solo):
    request = UpdateWeightsFromIPCReqInput(zmq_handles={"GPU-1": "ipc:///tmp/weights"})
    assert solo.do(solo.manager.update_weights_from_ipc(request)) == (False, "no ZMQ socket in ['GPU-1']")
    body = json.dumps({"zmq_handles": request.zmq_handles})
    status, text = SglangServer(solo.url).send(ROUTE, body, timeout_s=5)
    assert (status, json.loads(text)["message"]) == (400, "no ZMQ socket in ['GPU-1']")


# Who is at the other end.


@pytest.mark.parametrize("info", ["<html>", [], {"name": "a model"}], ids=str)
def test_another_server_is_refused(info, solo):
    solo.info = info
    with pytest.raises(UnsupportedEngineError, match="is not an SGLang server: it does not answer"):
        Refitter(SglangServer(solo.url))


def test_a_server_without_the_plugin_is_refused(make_server, monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    solo = make_server()
    with pytest.raises(UnsupportedEngineError, match=r"does not load fp8refit's plugin.*answered 422: "):
        Refitter(SglangServer(solo.url))


def test_a_server_whose_schedulers_lack_the_plugin_is_refused(solo, monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", {fake_sglang.IN_SERVER})
    with pytest.raises(UnsupportedEngineError, match=r"does not load fp8refit's plugin.*no ZMQ socket in"):
        Refitter(SglangServer(solo.url)).refit(solo.engine.make_policy(1))
    assert_serves(solo)


def test_a_server_laid_out_otherwise_is_refused(make_server):
    with pytest.raises(UnsupportedEngineError, match="leave out tokenizer_worker_num"):
        Refitter(SglangServer(make_server(tokenizer_worker_num=2).url))


def test_a_server_that_cannot_be_reached_is_lost(solo):
    refitter = Refitter(SglangServer(solo.url))
    solo.stop()
    with pytest.raises(EngineLostError, match="cannot be reached"):
        refitter.refit(solo.engine.make_policy(1))
    with pytest.raises(EngineLostError, match=r"cannot be reached .*restart it"):
        Refitter(SglangServer(solo.url))


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_every_request_bears_the_api_key(api_key, solo):
    Refitter(SglangServer(solo.url, api_key=api_key)).refit(solo.engine.make_policy(1))
    expected = None if api_key is None else "Bearer secret"
    assert {headers.get("authorization") for headers in solo.headers} == {expected}


# Drivers that die or are interrupted. What any server owes them: `tests/remote/servers/test_server_driver.py`.


def give(running: Server, order, driver: Caller) -> Answer:
    said = SglangServer(running.url).deliver(OrderRequest(driver=driver, order=order).encode(), timeout_s=20)
    return Answer.model_validate_json(said)


def pause(timeout_s: float) -> Pause:
    return Pause(config=RefitConfig(timeout_s=timeout_s))


def test_a_driver_that_is_interrupted_while_requests_run_out_leaves_the_server_running(solo):
    driver = Caller.new()

    async def steps():
        running = asyncio.create_task(solo.engine.async_generate("long", is_long=True))
        await asyncio.sleep(0.01)
        pausing = asyncio.create_task(asyncio.to_thread(give, solo, pause(timeout_s=5), driver))
        while not solo.engine.hidden():
            await asyncio.sleep(0.01)
        resuming = asyncio.create_task(asyncio.to_thread(give, solo, Resume(), driver))
        await asyncio.sleep(0.05)
        solo.manager.finish("long")
        await asyncio.gather(running, pausing, resuming)

    solo.do(steps())
    assert_serves(solo)


# Who may give orders. All of it, for both engines: `tests/remote/servers/test_http_endpoint.py`.


def hello_from(client: tuple[str, int] | None, solo: Server, **headers: str) -> str:
    """What is said against it."""
    body = OrderRequest(driver=Caller.new(), order=Hello()).encode().encode()
    response = solo.do(post(solo.app, ROUTE, body, client=client, headers=order_headers(**headers)))
    assert bool(response.num_parts_read) == (response.status == 200)
    return response.refusal


def test_orders_are_taken_from_the_server_s_own_host(solo):
    assert hello_from(LOCAL, solo) == ""
    for client in (ELSEWHERE, None):
        assert "takes weights from its own host alone" in hello_from(client, solo)


def test_callers_on_other_hosts_are_known_by_the_server_s_api_key(solo):
    solo.manager.server_args.api_key = "secret"
    assert hello_from(ELSEWHERE, solo, Authorization="Bearer secret") == ""
    assert "the API key is not that of the server" in hello_from(LOCAL, solo)


def test_weights_are_the_affair_of_a_server_s_admin_if_it_has_one(solo):
    solo.manager.server_args.api_key, solo.manager.server_args.admin_api_key = "secret", "admin"
    assert hello_from(LOCAL, solo, Authorization="Bearer admin") == ""
    assert "the API key is not that of the server" in hello_from(LOCAL, solo, Authorization="Bearer secret")


def test_callers_on_other_hosts_are_known_by_the_token(make_server, monkeypatch):
    monkeypatch.setenv("FP8REFIT_TOKEN", TOKEN)
    running = make_server()
    assert hello_from(ELSEWHERE, running, X_Fp8refit_Token=TOKEN) == ""
    assert "the token is not that of the server" in hello_from(LOCAL, running)
    Refitter(SglangServer(running.url)).refit(running.engine.make_policy(1))


def test_a_server_does_not_start_with_a_token_that_can_be_guessed(make_server, monkeypatch):
    monkeypatch.setenv("FP8REFIT_TOKEN", "short")
    with pytest.raises(UnsupportedEngineError, match="FP8REFIT_TOKEN has 5 characters; a token has 16 or more"):
        make_server()


def test_an_engine_in_a_user_s_process_needs_no_token(make_engine, monkeypatch):
    monkeypatch.setenv("FP8REFIT_TOKEN", "short")
    make_engine().tokenizer_manager.init_communicators(None)


def test_a_worker_whose_app_runs_already_gets_no_door(solo):
    Refitter(SglangServer(solo.url))  # it runs
    fake_sglang.sys.modules["sglang.srt.entrypoints.http_server"].app = solo.app
    solo.manager.init_communicators(None)


def test_a_driver_of_an_older_version_is_told_to_install_the_same(solo):
    body = json.dumps({"zmq_handles": handles_for('{"driver": {}, "token": "", "order": {"step": "hello"}}')})
    status, text = SglangServer(solo.url).send(ROUTE, body, timeout_s=5)
    said = Answer.model_validate_json(json.loads(text)["message"])
    assert status == 200
    assert "this driver an older one; install the same version on both sides" in said.error.message


def test_a_server_of_an_older_version_is_told_to_install_the_same(make_server, monkeypatch):
    """It has a plugin that takes orders as SGLang's own requests, and none in front of its routes."""

    async def serve_order(original, manager, obj, request=None):
        assert list(obj.zmq_handles) == ["fp8refit.order"]
        error = RankFailedError(
            "this server, fp8refit 0.1.0, cannot read what the driver says; install the same version"
        )
        return True, Answer(error=ErrorRecord.of(error)).model_dump_json()

    monkeypatch.setattr(HookRegistry, "_hooks", {fake_sglang.IN_SERVER: [(None, serve_order, None)]})
    monkeypatch.setattr(HookRegistry, "_patched", {fake_sglang.IN_SERVER})
    with pytest.raises(RankFailedError, match=r"fp8refit 0\.1\.0, cannot read .*; install the same version"):
        Refitter(SglangServer(make_server().url))


def test_a_server_that_waits_for_its_first_weights_has_them_after_a_refit(solo):
    solo.manager.initial_weights_loaded = False
    refitter = Refitter(SglangServer(solo.url))
    assert solo.manager.initial_weights_loaded is False
    refitter.refit(solo.engine.make_policy(1))
    assert solo.manager.initial_weights_loaded is True


def test_a_server_is_found_by_its_url(running):
    policy = running.engine.make_policy(1)
    Refitter(running.url).refit(policy)
    running.engine.assert_holds(policy)
    assert_serves(running)


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
    with pytest.raises(UnsupportedEngineError, match="pass token ids instead of prompts"):
        Refitter(SglangServer(running.url)).refit(running.engine.make_policy(1), calibration="2 3")
    assert_serves(running)
