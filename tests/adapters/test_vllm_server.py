"""Which servers of vLLM's take orders, and from whom. A real server: `tests/vllm/test_server.py`."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fp8refit_vllm import VllmServer, server
from fp8refit_vllm.server import RefitEndpoint

from fp8refit import Refitter, UnsupportedEngineError
from fp8refit.transport.orders import Answer, Caller, Hello, OrderRequest


def make_client(**parallel):
    settings = {"data_parallel_size": 1, "worker_extension_cls": ""} | parallel
    config = SimpleNamespace(parallel_config=SimpleNamespace(**settings))
    return Client(config)


class Client:
    """What `is_async_client` looks for."""

    pause_generation = output_processor = None

    def __init__(self, config):
        self.vllm_config = config


def hello(endpoint: RefitEndpoint, *, is_trusted: bool = True) -> Answer:
    message = OrderRequest(driver=Caller.new(), order=Hello()).encode()
    return asyncio.run(endpoint._answer(message, is_trusted=is_trusted))


def endpoint_of(client, monkeypatch) -> RefitEndpoint:
    monkeypatch.setattr(server, "has_api_key", lambda arguments: False)
    endpoint = RefitEndpoint()
    asyncio.run(endpoint.init_state(client, None, None))
    return endpoint


def test_a_server_says_who_it_is(monkeypatch):
    endpoint = endpoint_of(make_client(), monkeypatch)
    assert hello(endpoint).error is None
    assert hello(endpoint).server == hello(endpoint).server != ""
    assert "its own host alone" in hello(endpoint, is_trusted=False).error.message


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (make_client(_api_process_count=3), r"3 processes take the requests of this server.*--api-server-count 1"),
        (make_client(data_parallel_size=2), r"2 data-parallel replicas .* start one engine a replica"),
        (None, "has no engine to refit"),
    ],
    ids=["processes", "replicas", "no engine"],
)
def test_servers_that_cannot_be_refitted_say_why(client, says, monkeypatch):
    with pytest.raises(UnsupportedEngineError, match=says):
        raise hello(endpoint_of(client, monkeypatch)).error.error()


def test_a_server_that_is_not_ready_says_so():
    assert "not ready yet" in hello(RefitEndpoint()).error.message


def test_an_order_that_is_too_long_is_taken_in_no_further(monkeypatch):
    monkeypatch.setattr(server, "MAX_BYTES", 10)
    taken = []

    async def stream():
        for part in (b"12345", b"67890", b"1", b"never"):
            taken.append(part)
            yield part

    assert asyncio.run(server._read_body(SimpleNamespace(stream=stream))) is None
    assert b"never" not in taken


def answering(monkeypatch, answers: dict[str, tuple[int, str]]) -> None:
    monkeypatch.setattr(
        VllmServer, "send", lambda self, route, body, *, timeout_s: answers.get(route, (404, "Not Found"))
    )


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
