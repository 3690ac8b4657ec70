"""The driver's end of a line to a server: what an HTTP server may answer, and what comes of it."""

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.transport import http
from fp8refit.transport.http import Server, is_local
from fp8refit.transport.orders import Answer, Hello


class PlainServer(Server):
    """Takes orders at `/orders`."""

    def deliver(self, message: str, *, timeout_s: float) -> str:
        return self.send("/orders", message, timeout_s=timeout_s)[1]


@pytest.fixture
def listen():
    """Answer every request with `answer(handler)`; gives the URL and the headers that came."""
    servers = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> tuple[str, list]:
        seen = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.append(dict(self.headers))
                self.rfile.read(int(self.headers["Content-Length"]))
                answer(self)

            do_GET = do_POST

            def log_message(self, *_) -> None:
                """Nothing is printed."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def saying(body: bytes, *, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


GOOD = Answer(server="me").model_dump_json().encode()


def post(url: str, **options) -> Answer:
    return PlainServer(url, **options).post(Hello(), timeout_s=5)


def test_an_answer_is_read(listen):
    url, seen = listen(saying(GOOD))
    assert post(url + "/", api_key="secret").server == "me"
    assert seen[0]["Authorization"] == "Bearer secret"


def test_the_environment_has_the_api_key(listen, monkeypatch):
    monkeypatch.setenv("FP8REFIT_API_KEY", "secret")
    url, seen = listen(saying(GOOD))
    post(url)
    assert seen[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_named(status, listen):
    url, _ = listen(saying(b"who are you?", status=status))
    with pytest.raises(
        UnsupportedEngineError, match=rf"answered {status} to /orders: it asks for an API key; pass api_key, or"
    ):
        post(url)


def test_an_answer_that_is_announced_as_too_long_is_not_read(listen):
    url, _ = listen(saying(GOOD, Content_Length=str(1 << 40)))
    with pytest.raises(UnsupportedEngineError, match="answered more than 268435456 bytes"):
        post(url)


def test_an_answer_that_is_too_long_is_read_no_further(listen, monkeypatch):
    monkeypatch.setattr(http, "MAX_BYTES", 1000)
    url, _ = listen(saying(b" " * 2000))
    with pytest.raises(UnsupportedEngineError, match="answered more than 1000 bytes"):
        post(url)


def test_an_answer_that_breaks_off_is_a_lost_engine(listen):
    url, _ = listen(saying(GOOD[:10], Content_Length=str(len(GOOD))))
    with pytest.raises(EngineLostError, match=r"cannot be reached .*IncompleteRead"):
        post(url)


@pytest.mark.parametrize("said", [b"", b"<html>", b'{"speaker": "somebody"}', b"\xff"])
def test_an_answer_of_others_is_refused(said, listen):
    url, _ = listen(saying(said))
    with pytest.raises(UnsupportedEngineError, match="answered what this version of fp8refit cannot read"):
        post(url)


def test_a_redirect_takes_the_api_key_nowhere(listen):
    other, seen = listen(saying(GOOD))
    url, _ = listen(saying(b"there", status=307, Location=other))
    with pytest.raises(UnsupportedEngineError, match="cannot read"):
        post(url, api_key="secret")
    assert seen == []


def test_nobody_there_is_a_lost_engine(listen):
    with pytest.raises(EngineLostError, match=r"cannot be reached .*start it again"):
        post("http://127.0.0.1:1")


def test_one_who_says_nothing_is_a_lost_engine(listen):
    done = threading.Event()
    url, _ = listen(lambda handler: done.wait(20))
    with pytest.raises(EngineLostError, match=r"cannot be reached .*timed out"):
        PlainServer(url).post(Hello(), timeout_s=0.05)
    done.set()


def test_a_host_that_goes_away_breaks_the_connection_long_before_an_order_is_late(listen, monkeypatch):
    connect, asked_after = http._Connection.connect, []

    def look(connection):
        connect(connection)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        asked_after.append([connection.sock.getsockopt(socket.IPPROTO_TCP, name) for name in names])
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    monkeypatch.setattr(http._Connection, "connect", look)
    url, _ = listen(saying(GOOD))
    post(url)
    ((idle_s, interval_s, count),) = asked_after
    assert idle_s + interval_s * count <= 30


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("10.0.0.7", False), ("testclient", False)],
)
def test_callers_on_the_host_are_known_by_their_address(host, is_here):
    assert is_local(SimpleNamespace(client=SimpleNamespace(host=host))) is is_here


def test_callers_of_a_unix_socket_are_on_the_host():
    assert is_local(SimpleNamespace(client=None))
    assert is_local(None)
