"""vLLM's and SGLang's own routers, in front of servers that only say that they are well: what we hear is behind them."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest

from fp8refit import EngineLostError, UnsupportedEngineError
from fp8refit.driver.adapters import connect
from fp8refit.driver.router import behind_router
from tests.loopback_server import LoopbackServer
from tests.serving import ask, free_port

PATIENCE_S = 60.0


async def well(scope, receive, send):
    """An ASGI app that answers everything as a healthy server of either engine may."""
    if scope["type"] != "http":
        return
    body = json.dumps({"status": "ok", "version": "0.32.0", "tp_size": 1, "model_path": "m", "data": [{"id": "m"}]})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def until(is_so):
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


def listed(url):
    """What `behind_router` returns; nothing as long as the router starts."""
    try:
        return behind_router(url)
    except (EngineLostError, UnsupportedEngineError):
        return []


@pytest.fixture(params=["vllm_router", "sglang_router"])
def routed(request, tmp_path):
    """The router's URL, and its two servers."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} has wheels for Linux alone")
    servers = [LoopbackServer(well), LoopbackServer(well)]
    port, metrics = free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--prometheus-port": metrics,
        "--health-check-interval-secs": 1,
        "--health-failure-threshold": 1,
    }
    command = [
        sys.executable,
        "-m",
        f"{request.param}.launch_router",
        *(str(part) for item in options.items() for part in item),
    ]
    with (tmp_path / "log").open("w") as log:
        router = subprocess.Popen(
            [*command, "--worker-urls", *(server.url for server in servers)], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}", servers
    finally:
        router.kill()
        router.wait()
        for server in servers:
            server.close()


def test_servers_behind_a_real_router_are_known_also_those_that_do_not_answer_it(routed):
    url, servers = routed
    both = sorted(server.url for server in servers)
    assert until(lambda: listed(url)) == both
    with pytest.raises(UnsupportedEngineError, match="is a router, with 2 servers behind it"):
        connect(url)
    servers[0].stop()
    until(lambda: not all(worker["is_healthy"] for worker in ask(url + "/workers")[1]["workers"]))
    assert behind_router(url) == both


def test_a_server_is_no_router():
    server = LoopbackServer(well)
    try:
        assert ask(server.url + "/workers")[0] == 200
        with pytest.raises(UnsupportedEngineError, match="is no router"):
            behind_router(server.url)
    finally:
        server.close()
    with pytest.raises(EngineLostError, match="cannot be reached"):
        behind_router(server.url)
