"""The driver's end of a line to a server: what an HTTP server may answer, and what comes of it."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.remote.servers import http_client as http
from fp8refit.remote.servers.http_client import Server
from fp8refit.remote.servers.orders import Answer, Hello


class PlainServer(Server):
    """Takes orders at `/orders`."""

    def deliver(self, message: str, *, timeout_s: float) -> str:
        answer, said = self.order("/orders", message, timeout_s=timeout_s)
        return said if answer is None else answer


@pytest.fixture
def listen():
    """Answer every request with `answer(handler)`; gives the URL and the headers that came."""
    servers = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None], *, version: str = "HTTP/1.0") -> tuple[str, list]:
        seen = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = version

            def do_POST(self) -> None:
                seen.append(dict(self.headers))
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
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
    with pytest.raises(UnsupportedEngineError, match="sent an answer that this version of fp8refit cannot read"):
        post(url)


def test_a_redirect_takes_the_api_key_nowhere(listen):
    other, seen = listen(saying(GOOD))
    url, _ = listen(saying(b"there", status=307, Location=other))
    with pytest.raises(UnsupportedEngineError, match="cannot read"):
        post(url, api_key="secret")
    assert seen == []


def test_nobody_there_is_a_lost_engine(listen):
    with pytest.raises(EngineLostError, match=r"cannot be reached .*restart it"):
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


# Connections.


@pytest.fixture
def connected(monkeypatch):
    """Every connection that is opened."""
    connect, opened = http._Connection.connect, []

    def note(connection):
        connect(connection)
        opened.append(connection)

    monkeypatch.setattr(http._Connection, "connect", note)
    return opened


def at_once(said: bytes, *, before: bytes = b"") -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer whose head and body arrive together, after which the server leaves the connection open."""
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(said)}\r\n\r\n".encode()
    return lambda handler: handler.wfile.write(before + head + said)


CHUNKS = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (7, GOOD[:7], len(GOOD) - 7, GOOD[7:])
ANSWERS = {
    "left open": at_once(GOOD),
    "in chunks": saying(CHUNKS, Transfer_Encoding="chunked"),
    "closed": saying(GOOD, Content_Length=str(len(GOOD)), Connection="close"),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_every_order_has_a_connection_of_its_own_which_is_closed(version, answer, listen, connected):
    if (version, answer) == ("HTTP/1.0", "in chunks"):
        pytest.skip("has no chunks")
    server = PlainServer(listen(ANSWERS[answer], version=version)[0])
    for count in (1, 2, 3):
        assert server.post(Hello(), timeout_s=5).server == "me"
        assert len(connected) == count
        deadline_s = time.monotonic() + 10
        while connected[-1]._line.fileno() != -1:  # its thread closes it
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_an_order_on_a_connection_that_breaks_is_not_given_twice(listen, connected):
    """The server may have carried it out."""
    url, seen = listen(lambda handler: setattr(handler, "close_connection", True), version="HTTP/1.1")
    with pytest.raises(EngineLostError, match=r"cannot be reached .*restart it"):
        PlainServer(url).post(Hello(), timeout_s=5)
    assert (len(connected), len(seen)) == (1, 1)


def test_a_late_answer_is_not_taken_for_that_of_the_next_order(listen):
    came, may_go_on = [], threading.Event()

    def repeat(handler: BaseHTTPRequestHandler) -> None:
        came.append(handler.body)
        if handler.body == b"late":
            may_go_on.wait(20)
        with suppress(OSError):  # the driver has left
            at_once(handler.body)(handler)

    server = PlainServer(listen(repeat, version="HTTP/1.1")[0])
    with pytest.raises(EngineLostError, match="timed out"):
        server.deliver("late", timeout_s=1)
    may_go_on.set()
    assert server.deliver("next", timeout_s=5) == "next"
    assert came == [b"late", b"next"]


def test_an_answer_after_an_early_one_is_not_taken_for_that_of_the_next_order(listen):
    early = iter([b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n"])
    url, _ = listen(lambda handler: at_once(handler.body, before=next(early, b""))(handler), version="HTTP/1.1")
    server = PlainServer(url)
    assert server.order("/", "first", timeout_s=5) == (None, f"{url} answered 103: ")
    assert server.deliver("second", timeout_s=5) == "second"


def test_orders_may_be_given_at_the_same_time(listen):
    meet = threading.Barrier(2, timeout=20)

    def answer_together(handler: BaseHTTPRequestHandler) -> None:
        meet.wait()
        at_once(GOOD)(handler)

    server = PlainServer(listen(answer_together, version="HTTP/1.1")[0])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: server.post(Hello(), timeout_s=20), range(2)))


# Time.


@pytest.fixture
def drip():
    """A server that says the head at once, the rest byte by byte, a moment apart; gives its URL."""
    stopped, listeners = threading.Event(), []

    def start(said: bytes, *, head: bytes = b"") -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.send(head)
                for byte in iter(said):
                    if stopped.wait(0.05):
                        return
                    try:
                        connection.send(bytes([byte]))
                    except OSError:
                        return

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    stopped.set()
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-Header: and another\r\n" * 50),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", bytes(1000)),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 200),
        (b"HTTP/1.1 200 OK\r\n\r\n", bytes(1000)),
    ],
    ids=["headers", "continue", "body", "chunks", "body without length"],
)
def test_a_time_limit_is_that_of_the_whole_answer(head, said, drip):
    start_s, num_threads = time.monotonic(), threading.active_count()
    with pytest.raises(EngineLostError, match=r"cannot be reached .*timed out: no whole answer within 0\.3 s"):
        PlainServer(drip(said, head=head)).post(Hello(), timeout_s=0.3)
    assert time.monotonic() - start_s < 3
    while threading.active_count() > num_threads:  # the server's, and that of the exchange
        assert time.monotonic() - start_s < 10


def test_a_time_limit_is_that_of_the_request_too():
    """A server that reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = PlainServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        start_s = time.monotonic()
        with pytest.raises(EngineLostError, match="timed out"):
            server.deliver(" " * (1 << 25), timeout_s=0.3)
        assert time.monotonic() - start_s < 3


def test_nothing_is_sent_once_the_time_is_over(listen, monkeypatch):
    """As when a name is looked up for long."""
    connect, may_go_on = http.http.client.HTTPConnection.connect, threading.Event()

    def connect_late(connection):
        may_go_on.wait(20)
        connect(connection)

    monkeypatch.setattr(http.http.client.HTTPConnection, "connect", connect_late)
    url, seen = listen(saying(GOOD))
    num_threads = threading.active_count()
    with pytest.raises(EngineLostError, match="timed out"):
        PlainServer(url).post(Hello(), timeout_s=0.05)
    may_go_on.set()
    while threading.active_count() > num_threads:
        time.sleep(0.01)
    assert seen == []


# What is shown.


def test_an_order_shows_its_protocol_and_the_token_in_headers(listen, monkeypatch):
    url, seen = listen(saying(GOOD))
    post(url, token="c0ffee-c0ffee-c0ffee")
    monkeypatch.setenv("FP8REFIT_TOKEN", "from-the-environment")
    post(url)
    assert [headers["X-Fp8refit-Token"] for headers in seen] == ["c0ffee-c0ffee-c0ffee", "from-the-environment"]
    assert {headers["X-Fp8refit-Protocol"] for headers in seen} == {"7"}


def test_what_is_no_order_shows_no_token(listen):
    url, seen = listen(saying(GOOD))
    PlainServer(url, token="c0ffee-c0ffee-c0ffee").send("/version", None, timeout_s=5)
    assert "X-Fp8refit-Token" not in seen[0]


@pytest.mark.parametrize("token", ["", None])
def test_an_empty_token_is_none(token, listen, monkeypatch):
    monkeypatch.setenv("FP8REFIT_TOKEN", "")
    url, seen = listen(saying(GOOD))
    post(url, token=token)
    assert "X-Fp8refit-Token" not in seen[0]


@pytest.mark.parametrize("token", ["fifteen-letters", "a token with spaces", "sixteen-letters\n", "sechzehn-Zeichen-ä"])
def test_a_token_that_is_none_is_refused(token, monkeypatch):
    with pytest.raises(UnsupportedEngineError, match=r"FP8REFIT_TOKEN has .* characters; a token has 16 or more"):
        PlainServer("http://fake:1", token=token)
    monkeypatch.setenv("FP8REFIT_TOKEN", token)
    with pytest.raises(UnsupportedEngineError, match="a token has 16 or more"):
        PlainServer("http://fake:1")


@pytest.mark.parametrize("api_key", ["two\nlines", "Schlüssel", "a key"])
def test_an_api_key_that_is_none_is_refused(api_key):
    with pytest.raises(UnsupportedEngineError, match="an API key is printable ASCII without spaces"):
        PlainServer("http://fake:1", api_key=api_key)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "begins with http"),
        ("127.0.0.1:8000", "begins with http"),
        ("ftp://fake:1", "begins with http"),
        ("http://", "names a host"),
        ("http://:8000", "names a host"),
        ("http://fake:0", "names a host, and a port from 1 to 65535"),
        ("http://fake:99999", "Port out of range"),
        ("http://fake:http", "Port could not be cast"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://[::x]:8000", "'::x' does not appear to be an IPv4 or IPv6 address"),
        ("http://me:secret@fake:1", "no user name or password"),
        ("http://fake:1?x", "ends with its path"),
        ("http://fake:1/#x", "ends with its path"),
        ("http://fake:1/a b", "printable ASCII"),
        ("http://fake:1/\r\nHost: other", "printable ASCII"),
        ("http://fäke:1", "printable ASCII"),
        ("http://" + 64 * "a" + ".b", "label"),
        ("http://a..b", "label"),
    ],
)
def test_what_is_no_url_is_refused(url, why):
    with pytest.raises(UnsupportedEngineError, match="is no URL of a server") as caught:
        PlainServer(url)
    assert why in str(caught.value)


def test_a_server_may_have_a_path(listen):
    url, _ = listen(lambda handler: saying(Answer(server=handler.path).model_dump_json().encode())(handler))
    assert post(url + "/below/").server == "/below/orders"


def test_a_server_is_found_by_its_ipv6_address():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    PlainServer("http://[::1]:8000")


def test_an_answer_that_is_nested_without_end_is_none(listen):
    url, _ = listen(saying(b"[" * 100_000, status=500))
    with pytest.raises(UnsupportedEngineError, match="cannot read"):
        post(url)
