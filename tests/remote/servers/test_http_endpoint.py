"""Who may give orders to a server, and how much is read of one: the door itself, and behind a real HTTP server."""

import asyncio
import http.client
import socket
import struct
import threading
import time
import tracemalloc

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response as HttpResponse

from fp8refit.remote.servers import http_endpoint as door
from fp8refit.remote.servers import orders
from fp8refit.remote.servers.http_endpoint import Door
from fp8refit.remote.servers.orders import Answer, Caller, Hello, OrderRequest
from tests.asgi import ELSEWHERE, LOCAL, Response, order_headers, post
from tests.loopback_server import LoopbackServer

TOKEN = "c0ffee-c0ffee-c0ffee"
HELLO = OrderRequest(driver=Caller.new(), order=Hello()).encode().encode()


class Entrance:
    """An app with nothing but a door. Counts what comes in, and answers it once `may_answer` is set."""

    def __init__(self, **options) -> None:
        self.door = Door(**({"token": None} | options))
        self.came_in: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope, receive, send) -> None:
        status, said, headers = await self.door.take(scope, receive, self._answer)
        await HttpResponse(said, status_code=status, headers=headers)(scope, receive, send)

    async def _answer(self, message: str) -> Answer:
        self.came_in.append(message)
        await self.may_answer.wait()
        return Answer(server="me")

    def ask(self, body: bytes | list[bytes] = HELLO, **options) -> Response:
        """What is refused is not read, but for what shows only when it is read."""
        return asyncio.run(post(self, "/", body, **options))


def refused(entrance: Entrance, **options) -> str:
    response = entrance.ask(**options)
    assert (response.num_parts_read, entrance.came_in) == (0, [])
    assert response.refusal
    return response.refusal


# Programs on the host.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_programs_on_the_host_are_known_by_their_address(host):
    assert Entrance().ask(client=(host, 1)).refusal == ""


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.6",
        "127.0.1.1",
        "::ffff:127.0.0.6",
        "::1%lo",
        "0.0.0.0",
        "::",
        "10.0.0.7",
        "localhost",
        "testclient",
        "",
    ],
)
def test_other_addresses_are_elsewhere(host):
    assert (
        "takes weights from its own host alone; start it with an API key, or with FP8REFIT_TOKEN set (it was asked "
        in (refused(Entrance(), client=(host, 1)))
    )


def test_a_caller_whose_address_is_not_known_is_elsewhere():
    """Of a Unix socket, which programs reach through a proxy; or of a connection that was ended before it was looked at."""
    assert "asked from an address that is not known" in refused(Entrance(), client=None)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Forwarded", "for=127.0.0.1"),
        ("X-Forwarded-For", "::1"),
        ("X-Forwarded-For", ""),
        ("X-Forwarded-Host", "127.0.0.1"),
        ("X-Forwarded-Proto", "http"),
        ("X-Real-IP", "127.0.0.1"),
        ("X-Client-IP", "127.0.0.1"),
        ("True-Client-IP", "127.0.0.1"),
        ("CF-Connecting-IP", "127.0.0.1"),
        ("X-Envoy-External-Address", "127.0.0.1"),
        ("X-Original-URI", "/"),
        ("Via", "1.1 proxy"),
    ],
)
def test_what_a_proxy_passes_on_is_from_elsewhere(header, value):
    said = refused(Entrance(), headers=order_headers() | {header: value})
    assert f"a proxy passed the order on: it has the header {header.lower()}" in said


@pytest.mark.parametrize("header", ["Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode"])
def test_pages_in_browsers_of_the_host_give_no_orders(header):
    said = refused(Entrance(), headers=order_headers() | {header: "null"})
    assert "a page in a browser sent the order" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "LOCALHOST:8000", "[::1]:8000", "[::ffff:127.0.0.1]:1"])
def test_the_host_may_be_called_so(host):
    assert Entrance().ask(headers=order_headers(Host=host)).refusal == ""


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost:8000@evil", "10.0.0.1", "", None]
)
def test_a_name_of_others_that_leads_here_is_not_that_of_the_host(host):
    """As of a page whose name was bound to this host's address."""
    assert "call it 127.0.0.1, [::1] or localhost" in refused(Entrance(), headers=order_headers(Host=host))


def test_two_names_of_the_host_are_none():
    headers = [*order_headers().items(), ("host", "evil.example")]
    assert "call it 127.0.0.1" in refused(Entrance(), headers=headers)


# Those that show something.


@pytest.mark.parametrize("shown", ["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ÿ" * 20])
def test_a_wrong_token_opens_to_nobody(shown):
    for client in (LOCAL, ELSEWHERE):
        said = refused(Entrance(token=TOKEN), client=client, headers=order_headers(X_Fp8refit_Token=shown))
        assert "the token is not that of the server; set FP8REFIT_TOKEN to the same value for both" in said


def test_a_token_shown_twice_is_none():
    headers = [*order_headers(X_Fp8refit_Token=TOKEN).items(), ("x-fp8refit-token", TOKEN)]
    assert "the token is not that" in refused(Entrance(token=TOKEN), headers=headers)


def test_the_right_token_opens_from_anywhere():
    """Through a proxy too."""
    headers = order_headers(X_Fp8refit_Token=TOKEN, X_Forwarded_For="10.0.0.1", Host="a-name")
    assert Entrance(token=TOKEN, api_keys=["key"]).ask(client=ELSEWHERE, headers=headers).refusal == ""


@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer ", "Basic one", "Bearer three", "one"])
def test_a_wrong_api_key_opens_to_nobody(shown):
    """Whatever the engine's own look at it let through."""
    said = refused(Entrance(api_keys=["one", "two"]), headers=order_headers(Authorization=shown))
    assert "the API key is not that of the server; pass api_key, or set FP8REFIT_API_KEY" in said


@pytest.mark.parametrize("shown", ["Bearer one", "bearer two"])
def test_a_right_api_key_opens_from_anywhere(shown):
    headers = order_headers(Authorization=shown, Host="a-name")
    assert Entrance(api_keys=["one", "two"]).ask(client=ELSEWHERE, headers=headers).refusal == ""


# What an order is.


@pytest.mark.parametrize("protocol", [None, "", "1", "6", "8", "7, 7", "x" * 1000])
def test_a_driver_of_another_version_is_told_so_first(protocol):
    entrance = Entrance(token=TOKEN)
    response = entrance.ask(headers=order_headers(X_Fp8refit_Protocol=protocol))
    assert (response.status, response.num_parts_read, entrance.came_in) == (200, 0, [])
    assert "install the same version on both sides" in response.refusal
    assert len(response.body) < 1000


@pytest.mark.parametrize("kind", [None, "text/plain", "application/json", "application/x-www-form-urlencoded"])
def test_what_pages_may_send_unasked_is_no_order(kind):
    entrance = Entrance()
    response = entrance.ask(headers=order_headers(Content_Type=kind))
    assert (response.status, response.num_parts_read, entrance.came_in) == (415, 0, [])


@pytest.mark.parametrize("length", [str((1 << 26) + 1), "9" * 19, "9" * 5000, "٣" * 30])
def test_what_is_announced_as_too_long_is_not_read(length):
    entrance = Entrance()
    headers = order_headers().items()
    pairs = [*headers, ("content-length", length.encode().decode("latin-1"))]
    response = entrance.ask(headers=pairs)
    assert (response.status, response.num_parts_read, entrance.came_in) == (413, 0, [])


def test_what_is_too_long_is_read_no_further(monkeypatch):
    monkeypatch.setattr(orders, "MAX_ORDER_BYTES", 10)
    entrance = Entrance()
    response = entrance.ask([b"12345", b"67890", b"1", b"never"])
    assert (response.status, response.num_parts_read, entrance.came_in) == (413, 3, [])


def test_what_is_no_text_is_refused():
    entrance = Entrance()
    response = entrance.ask(b"\xff")
    assert (response.status, entrance.came_in) == (400, [])
    assert "an order is UTF-8" in response.refusal


def test_who_hangs_up_has_given_no_order():
    entrance = Entrance()
    assert entrance.ask([HELLO], hangs_up=True).status == 400
    assert entrance.came_in == []


def test_what_drips_is_given_up(monkeypatch):
    monkeypatch.setattr(door, "READING_S", 0.1)
    entrance, start_s = Entrance(), time.monotonic()
    response = entrance.ask([b"x"] * 1000, part_s=0.02)
    assert (response.status, entrance.came_in) == (408, [])
    assert "the order did not arrive within 0.1 s" in response.refusal
    assert time.monotonic() - start_s < 5


def test_only_so_many_wait_at_a_time(monkeypatch):
    monkeypatch.setattr(door, "MAX_VISITORS", 3)
    entrance = Entrance()

    async def crowd() -> list[Response]:
        entrance.may_answer.clear()
        early = [asyncio.create_task(post(entrance, "/", HELLO)) for _ in range(3)]
        while len(entrance.came_in) < 3:
            await asyncio.sleep(0)
        late = await post(entrance, "/", HELLO)
        entrance.may_answer.set()
        return [late, *await asyncio.gather(*early), await post(entrance, "/", HELLO)]

    late, *others = asyncio.run(crowd())
    assert (late.status, late.num_parts_read) == (503, 0)
    assert "3 orders wait for this server already" in late.refusal
    assert [response.refusal for response in others] == [""] * 4


# Behind a real server, as engines start it.


@pytest.fixture
def entrance():
    return Entrance()


@pytest.fixture(params=["h11", "httptools"])
def served(request, entrance):
    app = FastAPI()

    async def take(request: Request) -> HttpResponse:
        status, said, headers = await entrance.door.take(request.scope, request.receive, entrance._answer)
        return HttpResponse(said, status_code=status, headers=headers)

    app.add_api_route("/", take, methods=["POST"])
    server = LoopbackServer(app, http=request.param)
    yield server
    server.close()


def say(server: LoopbackServer, *parts: bytes) -> bytes:
    """Raw HTTP; what comes until the server hangs up."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        for part in parts:
            try:
                line.sendall(part)
            except OSError:
                break  # it was refused meanwhile
        said = b""
        try:
            while part := line.recv(1 << 16):
                said += part
        except ConnectionResetError:
            pass
    return said


def head(**more: str | None) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in order_headers(**more).items())
    return f"POST / HTTP/1.1\r\n{lines}\r\n".encode()


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def test_an_order_comes_in_by_http(served, entrance):
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
    connection.request("POST", "/", HELLO, order_headers(Host=None))
    assert Answer.model_validate_json(connection.getresponse().read()).server == "me"
    connection.close()
    assert entrance.came_in == [HELLO.decode()]


def test_a_driver_gives_orders_on_one_connection(served, entrance):
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=10)
    for _ in range(3):
        connection.request("POST", "/", HELLO, order_headers(Host=None))
        response = connection.getresponse()
        assert (response.status, response.will_close) == (200, False)
        response.read()
    connection.close()
    assert entrance.came_in == [HELLO.decode()] * 3


def test_the_connection_of_a_refused_order_is_closed(served, entrance):
    """Its body is not read."""
    said = say(served, head(Content_Length=str(len(HELLO)), Origin="http://evil.example"), HELLO)
    assert said.startswith(b"HTTP/1.1 403")
    assert b"\r\nconnection: close\r\n" in said.lower()


def test_an_order_comes_in_chunk_by_chunk(served, entrance):
    said = say(
        served, head(Transfer_Encoding="chunked", Connection="close"), chunk(HELLO[:7]), chunk(HELLO[7:]), b"0\r\n\r\n"
    )
    assert said.startswith(b"HTTP/1.1 200")
    assert entrance.came_in == [HELLO.decode()]


def test_chunks_without_end_are_read_no_further(served, entrance, monkeypatch):
    monkeypatch.setattr(orders, "MAX_ORDER_BYTES", 1 << 20)
    parts = [chunk(bytes(1 << 16))] * 400
    tracemalloc.start()
    say(served, head(Transfer_Encoding="chunked"), *parts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert entrance.came_in == []
    assert peak < 8 << 20


def test_a_stranger_is_answered_before_its_body_comes(served, entrance):
    said = say(served, head(Content_Length="100000", Origin="http://evil.example"))
    assert said.startswith(b"HTTP/1.1 403")
    assert b"a page in a browser sent the order" in said
    assert entrance.came_in == []


def test_what_a_proxy_of_the_host_passes_on_is_from_elsewhere_though_the_server_believes_it(served, entrance):
    """uvicorn takes the address that a proxy on the host names for that of the caller."""
    said = say(served, head(Content_Length=str(len(HELLO)), X_Forwarded_For="::1") + HELLO)
    assert said.startswith(b"HTTP/1.1 403")
    assert entrance.came_in == []


def test_a_connection_that_was_reset_before_it_was_looked_at_gives_no_orders(served, entrance):
    """What it said is read all the same, and whose it was is not known any more."""
    is_held, may_go_on = threading.Event(), threading.Event()

    async def hold() -> None:
        is_held.set()
        may_go_on.wait(20)

    holding = served.start(hold())
    assert is_held.wait(20)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(head(Content_Length=str(len(HELLO))) + HELLO)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    may_go_on.set()
    holding.result(20)
    assert say(served, head(Content_Length=str(len(HELLO)), Connection="close") + HELLO).startswith(b"HTTP/1.1 200")
    assert entrance.came_in == [HELLO.decode()]


def test_a_body_that_drips_in_is_given_up(served, entrance, monkeypatch):
    monkeypatch.setattr(door, "READING_S", 0.1)
    said = say(served, head(Content_Length="100000") + b"x")
    assert said.startswith(b"HTTP/1.1 408")
    assert entrance.came_in == []
