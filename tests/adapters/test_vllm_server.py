"""Which servers of vLLM's take orders, and from whom. A real server: `tests/vllm/test_server.py`."""

import asyncio
import json
from http import HTTPStatus
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fp8refit_vllm import VllmServer, server
from fp8refit_vllm.server import RefitEndpoint
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8refit import RankFailedError, Refitter, UnsupportedEngineError
from fp8refit.remote.servers.orders import Answer, Caller, Hello, OrderRequest
from fp8refit.transport.vote import ErrorRecord
from tests.asgi import ELSEWHERE, Response, order_headers, post

ROUTE, PORT = "/v1/fp8refit", 8000
TOKEN = "c0ffee-c0ffee-c0ffee"
HELLO = OrderRequest(driver=Caller.new(), order=Hello()).encode().encode()


def make_client(**parallel):
    settings = {"data_parallel_size": 1, "worker_extension_cls": ""} | parallel
    model = SimpleNamespace(is_moe=True)
    config = SimpleNamespace(parallel_config=SimpleNamespace(**settings), model_config=model)
    return Client(config)


class Client:
    """What `is_async_client` looks for."""

    pause_generation = output_processor = None

    def __init__(self, config):
        self.vllm_config, self.engine_core = config, SimpleNamespace(core_engines=[b"one"])


def ask(app: FastAPI, body: bytes | list[bytes] = HELLO, **options) -> Response:
    response = asyncio.run(post(app, ROUTE, body, **options))
    is_read = response.status == HTTPStatus.OK and response.num_parts_read > 0
    assert response.headers.get("connection") == (None if is_read else "close")
    return response


def hello(app: FastAPI) -> Answer:
    return ask(app).answer


def app_of(client, monkeypatch, api_keys=()) -> FastAPI:
    monkeypatch.setattr(server, "api_keys", lambda arguments: api_keys)
    app, endpoint = FastAPI(), RefitEndpoint()
    endpoint.attach_router(app)
    asyncio.run(endpoint.init_state(client, None, SimpleNamespace(port=PORT)))
    return app


def test_a_server_says_who_it_is(monkeypatch):
    app = app_of(make_client(), monkeypatch)
    assert hello(app).error is None
    assert hello(app).server == hello(app).server != ""


def test_an_untrusted_caller_is_refused_before_its_body_is_read(monkeypatch):
    app = app_of(make_client(), monkeypatch)
    for client in (ELSEWHERE, None):
        response = ask(app, client=client)
        assert (response.status, response.num_parts_read) == (403, 0)
        assert "its own host alone" in response.refusal


def test_callers_are_known_by_the_server_s_api_key(monkeypatch):
    app = app_of(make_client(), monkeypatch, api_keys=["one", "two"])
    assert ask(app, client=ELSEWHERE, headers=order_headers(Authorization="Bearer two")).refusal == ""
    response = ask(app, headers=order_headers(Authorization="Bearer three"))
    assert "the API key is not that of the server" in response.refusal
    assert response.num_parts_read == 0


def test_callers_are_known_by_the_token(monkeypatch):
    monkeypatch.setenv("FP8REFIT_TOKEN", TOKEN)
    app = app_of(make_client(), monkeypatch)
    assert ask(app, client=ELSEWHERE, headers=order_headers(X_Fp8refit_Token=TOKEN)).refusal == ""
    assert "the token is not that of the server" in ask(app).refusal


def test_a_server_does_not_start_with_a_token_that_can_be_guessed(monkeypatch):
    monkeypatch.setenv("FP8REFIT_TOKEN", "short")
    with pytest.raises(UnsupportedEngineError, match="FP8REFIT_TOKEN has 5 characters; a token has 16 or more"):
        app_of(make_client(), monkeypatch)


def test_a_driver_of_an_older_version_is_told_to_install_the_same(monkeypatch):
    """It takes any status but 200 for a server without our plugin."""
    old = '{"driver": {}, "token": "a token", "order": {"step": "hello"}}'
    response = ask(app_of(make_client(), monkeypatch), old.encode(), headers={"Content-Type": "application/json"})
    assert (response.status, response.num_parts_read) == (200, 0)
    assert "this driver an older one; install the same version on both sides" in response.refusal


class OldRequest(BaseModel):
    """An order, as version 0.1 read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: Caller
    token: str = Field(default="", repr=False)
    order: dict


def test_a_server_of_an_older_version_is_told_to_install_the_same(monkeypatch):
    with pytest.raises(ValidationError, match="protocol"):
        OldRequest.model_validate_json(HELLO)
    error = RankFailedError("this server, fp8refit 0.1.0, cannot read what the driver says; install the same version")
    said = Answer(error=ErrorRecord.of(error)).model_dump_json()
    answering(monkeypatch, {"/version": (200, "{}"), ROUTE: (200, said)})
    with pytest.raises(RankFailedError, match="install the same version"):
        Refitter(VllmServer("http://127.0.0.1:8000"))


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (
            make_client(data_parallel_size=2),
            r"spread over 2 data-parallel replicas, .* boot it as one AsyncLLM or one server",
        ),
        (None, "has no engine to refit"),
    ],
    ids=["replicas", "no engine"],
)
def test_servers_that_cannot_be_refitted_say_why(client, says, monkeypatch):
    with pytest.raises(UnsupportedEngineError, match=says):
        raise hello(app_of(client, monkeypatch)).error.error()


def test_a_server_that_is_not_ready_says_so():
    app = FastAPI()
    RefitEndpoint().attach_router(app)
    response = ask(app)
    assert (response.status, response.num_parts_read) == (503, 0)
    assert "not ready yet" in response.refusal


def answering(monkeypatch, answers: dict[str, tuple[int, str]]) -> None:
    monkeypatch.setattr(VllmServer, "send", lambda self, route, body, **_: answers.get(route, (404, "Not Found")))


def test_a_server_without_the_plugin_says_what_to_set(monkeypatch):
    answering(monkeypatch, {"/version": (200, json.dumps({"version": "0.26.0"}))})
    with pytest.raises(UnsupportedEngineError, match=r"start it with VLLM_PLUGINS=fp8refit .* answered 404: Not Found"):
        Refitter(VllmServer("http://127.0.0.1:8000"))


@pytest.mark.parametrize(
    ("answer", "is_vllm"),
    [((200, '{"version": "0.26.0"}'), True), ((200, "<html>"), False), ((200, "[]"), False), ((404, "{}"), False)],
)
def test_vllm_is_known_by_its_version(answer, is_vllm, monkeypatch):
    answering(monkeypatch, {"/version": answer})
    assert VllmServer("http://127.0.0.1:8000").recognise() is is_vllm
