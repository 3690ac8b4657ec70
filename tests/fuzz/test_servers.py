"""Orders to servers: whoever sends whatever by the routes of either engine, drivers that die or fall silent, and answers that
drip.

Routes, door and order handler are the real ones. The engine behind them is a few lines that know what state it is in, and
the clock is the test's.
"""

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
from fastapi import FastAPI
from fp8refit_sglang import server as sglang_server
from fp8refit_vllm import server as vllm_server
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fp8refit.config import RefitConfig
from fp8refit.errors import EngineBusyError, EngineLostError, RefitError
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import Answers, send_in_turn
from fp8refit.remote.servers import http_endpoint as door
from fp8refit.remote.servers import order_handler, orders
from fp8refit.remote.servers.http_client import Server
from fp8refit.remote.servers.order_handler import SILENCE_S, OrderHandler
from fp8refit.remote.servers.orders import Caller, OrderRequest, Place
from tests.asgi import Response, order_headers, post

TOKEN = "c0ffee-c0ffee-c0ffee"
KEY = "an-api-key"
MAX_ORDER_BYTES = 1 << 16
"""In this test: what is longer need not be made."""
BEGIN, COMMIT, FAIL = "begin", "commit", "fail"
"""What ranks are told here, beside `Close`."""


class Loop(asyncio.SelectorEventLoop):
    """Its clock goes on when it is told to."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class Controls:
    """See `fp8refit.remote.servers.order_handler.Controls`: an engine of two ranks."""

    def __init__(self) -> None:
        self.state = "open"
        self.versions, self.is_dirty = [0, 0], False
        self.published = 0
        self.num_changes = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def pause(self, config: RefitConfig) -> int:
        timedelta(seconds=4 * config.timeout_s)
        if self.state == "busy":
            raise EngineBusyError("requests run")
        self._change("paused")
        return 1

    async def resume(self) -> None:
        assert not self.is_dirty or self.state == "open"
        self._change("open")

    async def refuse(self, reason: str) -> None:
        assert len(reason) <= orders.MAX_REASON
        self._change("refused")

    async def flush_caches(self) -> None:
        self.num_changes += 1

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return [[len(prompt)] for prompt in prompts]

    async def publish_version(self, version: int) -> None:
        self.num_changes += 1
        self.published = version

    async def _call(self, message: str, timeout_s: float) -> Sequence[str]:
        timedelta(seconds=timeout_s)
        await self.may_answer.wait()
        if message == BEGIN:
            self.is_dirty = True
        elif message == COMMIT:
            self.versions, self.is_dirty = [version + 1 for version in self.versions], False
        elif message == FAIL:
            self.versions, self.is_dirty = [self.versions[0] + 1, self.versions[1]], True
        self.num_changes += 1
        said = [
            messages.Reply(id="", rank=rank, version=version, is_dirty=self.is_dirty)
            for rank, version in enumerate(self.versions)
        ]
        return [reply.encode() for reply in said]

    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        return send_in_turn(self._call, self.flush_caches, messages, timeouts_s)

    def _change(self, state: str) -> None:
        self.num_changes += 1
        self.state = state


def vllm_app(handler: OrderHandler, api_keys: list[str]) -> tuple[FastAPI, str, "door.Door"]:
    """The route, as vLLM has it put there."""
    app, endpoint = FastAPI(), vllm_server.RefitEndpoint()
    with mock.patch.object(vllm_server, "api_keys", lambda arguments: api_keys):
        endpoint.attach_router(app)
        asyncio.run(endpoint.init_state(None, None, None))
    endpoint._carry_out = handler.answer
    return app, "/v1/fp8refit", endpoint._door


def sglang_app(handler: OrderHandler, api_keys: list[str]) -> tuple[FastAPI, str, "door.Door"]:
    """The middleware, as SGLang has it put there."""
    module = ModuleType("sglang.srt.entrypoints.http_server")
    module.app = FastAPI()
    manager = SimpleNamespace(server_args=SimpleNamespace(api_key=next(iter(api_keys), None)))
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        sglang_server.open_door(lambda *_: None, manager)
    app = module.app.build_middleware_stack()
    module.app.middleware_stack = app
    while not isinstance(app, sglang_server.OrderMiddleware):
        app = app.app
    app._handler = handler
    return module.app, "/update_weights_from_ipc", app._door


# Who asks, and with what.

LOCAL_HOSTS = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
CLIENTS = [*LOCAL_HOSTS, "127.0.0.6", "10.0.0.7", "::2", None, "localhost"]
CHANGES = [
    ("X-Forwarded-For", "::1"),
    ("Forwarded", "for=127.0.0.1"),
    ("X-Real-IP", "127.0.0.1"),
    ("Via", "1.1 proxy"),
    ("Origin", "http://evil.example"),
    ("Sec-Fetch-Site", "cross-site"),
    ("Host", "evil.example"),
    ("Host", "localhost:8000"),
    ("Host", "[::1]:8000"),
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/json"),
    ("Content-Length", str(MAX_ORDER_BYTES + 1)),
    (orders.PROTOCOL_HEADER, "1"),
    (orders.PROTOCOL_HEADER, None),
    (orders.TOKEN_HEADER, TOKEN),
    (orders.TOKEN_HEADER, ""),
    (orders.TOKEN_HEADER, TOKEN[:-1]),
    ("Authorization", f"Bearer {KEY}"),
    ("Authorization", f"Basic {KEY}"),
    ("Authorization", "Bearer "),
    ("User-Agent", "Python"),
]
waits = st.floats(min_value=0.1, max_value=1000.0)
numbers = st.sampled_from(
    ["-1", "0", "1e400", "Infinity", "NaN", "1e12", str(1 << 31), str(1 << 63), str(10**30), '"x"', "null", "true"]
)
GOOD_NUMBERS = {
    "pid": ["0", "true"],
    "timeout_s": ["true"],
    "timeouts_s": ["true"],
    "version": ["null", "true", "0", "1e12", str(1 << 31)],
    "message": [],
}
NAMES = ["a", "b"]


def is_let_in(token: str, api_keys: list[str], client: str | None, headers: dict[str, str]) -> bool:
    """Who may give orders, said once more."""
    if token:
        return headers.get(orders.TOKEN_HEADER) == token
    if api_keys:
        return headers.get("Authorization") in [f"Bearer {key}" for key in api_keys]
    shows_more = set(headers) & {"X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "Origin", "Sec-Fetch-Site"}
    return client in LOCAL_HOSTS and not shows_more and headers["Host"] != "evil.example"


class Raised(logging.Handler):
    """What was raised and is no error of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(str(record.exc_info[1]))


class Servers(RuleBasedStateMachine):
    """One server, and all who ask it for something."""

    @initialize(
        make_app=st.sampled_from([vllm_app, sglang_app]),
        token=st.sampled_from(["", TOKEN]),
        api_keys=st.sampled_from([[], [KEY]]),
    )
    def start(self, make_app, token, api_keys):
        self.loop = Loop()
        asyncio.set_event_loop(self.loop)
        self.token, self.api_keys = token, api_keys
        self.controls = self.do(self.make_controls())
        self.handler = OrderHandler(self.controls)
        with mock.patch.dict(os.environ, {orders.TOKEN_VARIABLE: token}):
            self.app, self.route, self.door = make_app(self.handler, api_keys)
        self.patches = [mock.patch.object(orders, "MAX_ORDER_BYTES", MAX_ORDER_BYTES)]
        self.patches[0].start()
        self.callers = {name: Caller(place=Place.here(), pid=os.getpid(), name=name) for name in NAMES}
        self.processes: dict[str, subprocess.Popen] = {}
        self.holder, self.until_s = None, 0.0
        self.raised = Raised()
        order_handler.logger.addHandler(self.raised)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        order_handler.logger.removeHandler(self.raised)
        for process in self.processes.values():
            process.kill()
            process.wait()
        for patch in self.patches:
            patch.stop()
        self.do(self.let_go())
        self.loop.close()
        asyncio.set_event_loop(None)

    async def let_go(self) -> None:
        self.handler._let_go()

    async def make_controls(self) -> Controls:
        return Controls()

    # Steps of the loop. What is not done after many of them hangs.

    def do(self, steps):
        task = self.loop.create_task(steps)
        self.spin(task.done)
        assert task.done(), "it hangs"
        return task.result()

    def spin(self, is_done=lambda: False, num_steps: int = 200) -> None:
        for _ in range(num_steps):
            if is_done():
                return
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def advance(self, seconds: float) -> None:
        self.loop.now_s += seconds
        self.spin(num_steps=30)
        if self.holder is not None and self.loop.now_s >= self.until_s:
            self.driver_left()

    def driver_left(self) -> None:
        """The engine goes on, or refuses requests; nobody holds it."""
        self.holder = None
        controls = self.controls
        is_whole = not controls.is_dirty and len(set(controls.versions)) == 1
        assert controls.state == ("open" if is_whole else "refused")
        if is_whole and controls.versions[0] != self.handler_version:
            assert controls.published == controls.versions[0]
        self.handler_version = self.handler._version

    handler_version = 0

    # Requests.

    def trusted_headers(self) -> dict[str, str]:
        headers = order_headers()
        if self.token:
            headers[orders.TOKEN_HEADER] = self.token
        if self.api_keys:
            headers["Authorization"] = f"Bearer {self.api_keys[0]}"
        return headers

    def post(self, body: bytes | list[bytes], **options) -> Response:
        options = {"headers": self.trusted_headers()} | options
        return self.do(post(self.app, self.route, body, **options))

    def give(self, name: str, order: orders.AnyOrder) -> str:
        """What is said against an order of a driver that may give it. `holder` is as the test thinks of it."""
        response = self.post(OrderRequest(driver=self.callers[name], order=order).encode().encode())
        assert response.status == 200
        if self.holder not in (None, name):
            assert "another driver refits this server" in response.refusal
            return response.refusal
        if isinstance(order, orders.Pause) and not response.refusal:
            self.holder, self.silence_s = name, order.config.timeout_s + SILENCE_S
        if isinstance(order, orders.Resume | orders.Refuse) and not response.refusal:
            self.holder = None
        if self.holder is not None:
            self.until_s = self.loop.now_s + self.silence_s
        self.handler_version = self.handler._version
        return response.refusal

    @rule(clients=st.permutations(CLIENTS), more=st.lists(st.sampled_from(CHANGES), max_size=2))
    def strangers_ask(self, clients, more):
        """Whoever may not is refused, and nothing of what it says is looked at: each who, and each what."""
        for client in clients:
            self.stranger_asks(client, more)
        for change in CHANGES:
            self.stranger_asks(LOCAL_HOSTS[0], [change])

    def stranger_asks(self, client: str | None, changes: list[tuple[str, str | None]]) -> None:
        order = orders.Refuse(reason="a stranger was here")
        body = OrderRequest(driver=self.callers["b"], order=order).encode().encode()
        before = self.controls.num_changes
        shown = {} if changes and changes[0][0] in (orders.TOKEN_HEADER, "Authorization") else self.trusted_headers()
        headers = order_headers(**(shown | dict(changes)))
        status = self.expected_status(client, headers)
        if status is None:
            return
        response = self.post(body, headers=headers, client=None if client is None else (client, 1))
        assert (response.status, response.num_parts_read) == (status, 0)
        assert response.refusal
        assert self.controls.num_changes == before

    def expected_status(self, client: str | None, headers: dict[str, str]) -> int | None:
        """Of the response to somebody who is not let in; None for those who are, and for what is SGLang's own affair."""
        protocol = headers.get(orders.PROTOCOL_HEADER)
        if protocol is None and self.route == "/update_weights_from_ipc":
            return None
        if protocol != str(orders.PROTOCOL):
            return 200
        if not is_let_in(self.token, self.api_keys, client, headers):
            return 403
        if headers["Content-Type"] != orders.MEDIA_TYPE:
            return 415
        return 413 if "Content-Length" in headers else None

    @rule(
        body=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")),
        cut=st.integers(0, 200),
    )
    def nonsense_is_said(self, body, cut):
        """By those who may: it is answered, and changes nothing."""
        before = self.controls.num_changes
        order = OrderRequest(driver=self.callers["a"], order=orders.Flush()).encode().encode()
        for message in (body, order[: min(cut, len(order) - 1)]):
            response = self.post([message])
            assert response.status in (200, 400)
            assert response.refusal
        assert self.controls.num_changes == before

    @rule(
        field=st.sampled_from(["pid", "timeout_s", "version", "message", "timeouts_s"]),
        numbers=st.lists(numbers, min_size=1, max_size=6),
    )
    def odd_numbers_are_said(self, field, numbers):
        """They are refused before anything is done, or are what they should be."""
        order, before = {
            "pid": (orders.Pause(config=RefitConfig(timeout_s=7.0)), f'"pid":{os.getpid()}'),
            "timeout_s": (orders.Pause(config=RefitConfig(timeout_s=7.0)), '"timeout_s":7.0'),
            "version": (orders.Resume(version=7), '"version":7'),
            "message": (orders.Send(messages=("7",), timeouts_s=(7.0,)), '"messages":[1]'),
            "timeouts_s": (orders.Send(messages=("7",), timeouts_s=(7.0,)), '"timeouts_s":[7.0]'),
        }[field]
        message = OrderRequest(driver=self.callers["a"], order=order).encode()
        assert message.count(before) == 1
        num_changes = self.controls.num_changes
        for number in numbers:
            if number not in GOOD_NUMBERS[field]:
                value = f"[{number}]" if before.endswith("]") else number
                said = message.replace(before, f"{before.partition(':')[0]}:{value}")
                response = self.post([said.encode()])
                assert "cannot read what the driver says; install the same version" in response.refusal
                assert self.controls.num_changes == num_changes

    @rule(sizes=st.lists(st.sampled_from([1, 1000, MAX_ORDER_BYTES // 2, MAX_ORDER_BYTES]), min_size=1, max_size=6))
    def much_is_said(self, sizes):
        """It is read as far as an order may be long."""
        taken, num_parts = 0, 0
        for size in sizes:
            num_parts, taken = num_parts + 1, taken + size
            if taken > MAX_ORDER_BYTES:
                break
        response = self.post([b"x" * size for size in sizes])
        assert response.status == (413 if taken > MAX_ORDER_BYTES else 200)
        assert response.num_parts_read == num_parts
        assert response.refusal

    @precondition(lambda self: self.holder is None)
    @rule(pauses=st.lists(st.sampled_from([0.0, 1.0, door.READING_S / 2, door.READING_S + 1]), min_size=1, max_size=4))
    def something_drips_in(self, pauses):
        """It is waited for no longer than any order."""
        message = OrderRequest(driver=self.callers["a"], order=orders.Hello()).encode().encode()
        parts = [message[index : index + 1] for index in range(len(pauses) - 1)] + [message[len(pauses) - 1 :]]
        taken_s, is_late = 0.0, False
        for seconds in pauses:
            taken_s += seconds
            is_late = is_late or taken_s >= door.READING_S

        async def drip() -> Response:
            waiting = iter(pauses)

            async def app(scope, receive, send):
                async def receive_late():
                    self.loop.now_s += next(waiting, 0.0)
                    for _ in range(3):
                        await asyncio.sleep(0)
                    return await receive()

                await self.app(scope, receive_late, send)

            return await post(app, self.route, parts, headers=self.trusted_headers())

        response = self.do(drip())
        assert response.status == (408 if is_late else 200)

    @rule(client=st.sampled_from(NAMES))
    def somebody_hangs_up(self, client):
        before = self.controls.num_changes
        message = OrderRequest(driver=self.callers[client], order=orders.Flush()).encode().encode()
        assert self.post([message], hangs_up=True).status == 400
        assert self.controls.num_changes == before

    @precondition(lambda self: self.holder is None)
    @rule()
    def nonsense_is_said_while_an_order_is_carried_out(self):
        """It does not wait for its turn, and nobody waits for it."""
        self.controls.may_answer.clear()
        order = (
            OrderRequest(driver=self.callers["a"], order=orders.Send(messages=("wait",), timeouts_s=(1.0,)))
            .encode()
            .encode()
        )
        long = self.loop.create_task(post(self.app, self.route, order, headers=self.trusted_headers()))
        self.spin(num_steps=20)
        assert "cannot read" in self.post([b"{}\n"]).refusal
        assert not long.done()
        self.controls.may_answer.set()
        self.spin(long.done)
        assert long.result().refusal == ""

    # Drivers.

    @rule(name=st.sampled_from(NAMES), timeout_s=waits, is_busy=st.booleans())
    def a_driver_pauses(self, name, timeout_s, is_busy):
        if is_busy and self.controls.state == "open":
            self.controls.state = "busy"
        self.give(name, orders.Pause(config=RefitConfig(timeout_s=timeout_s)))
        if self.controls.state == "busy":
            self.controls.state = "open"

    @precondition(lambda self: self.holder is not None)
    @rule(message=st.sampled_from([BEGIN, COMMIT, FAIL, "{}", ""]))
    def a_driver_writes(self, message):
        assert self.give(self.holder, orders.Send(messages=(message,), timeouts_s=(1.0,))) == ""

    @rule(name=st.sampled_from(NAMES), is_good=st.booleans())
    def a_driver_ends(self, name, is_good):
        if self.holder in (None, name) and (self.controls.is_dirty or self.controls.state == "refused"):
            is_good = False
        self.give(
            name, orders.Resume(version=self.controls.versions[0]) if is_good else orders.Refuse(reason="it failed")
        )

    @rule(
        name=st.sampled_from(NAMES),
        order=st.sampled_from(
            [orders.Hello(), orders.Flush(), orders.Tokenize(prompts=("a", "")), orders.Look(path="/\0")]
        ),
    )
    def a_driver_asks(self, name, order):
        self.give(name, order)

    @rule(seconds=st.sampled_from([0.1, 60.0, 600.0, 2000.0]))
    def time_passes(self, seconds):
        self.advance(seconds)

    @precondition(lambda self: self.holder is None)
    @rule(step=st.sampled_from([None, BEGIN, COMMIT, FAIL]))
    def a_driver_dies(self, step):
        """In a process of its own, somewhere on its way."""
        self.processes["dying"] = process = subprocess.Popen(["sleep", "60"])
        self.callers["dying"] = Caller(place=Place.here(), pid=process.pid, name="dying")
        assert self.give("dying", orders.Pause(config=RefitConfig(timeout_s=100.0))) == ""
        if step is not None:
            assert self.give("dying", orders.Send(messages=(step,), timeouts_s=(1.0,))) == ""
        process.kill()
        process.wait()
        end_s = time.monotonic() + 10
        while self.handler._holder is not None and time.monotonic() < end_s:
            self.spin(num_steps=1)
        self.spin(num_steps=30)
        self.driver_left()

    @precondition(lambda self: self.holder is None)
    @rule(steps=st.lists(st.sampled_from([BEGIN, COMMIT, FAIL]), max_size=3), timeout_s=waits)
    def a_driver_falls_silent(self, steps, timeout_s):
        """Somewhere on its way. Its time begins anew with every order."""
        assert self.give("a", orders.Pause(config=RefitConfig(timeout_s=timeout_s))) == ""
        for step in steps:
            self.advance(0.9 * self.silence_s)
            assert self.give("a", orders.Send(messages=(step,), timeouts_s=(1.0,))) == ""
        self.advance(self.silence_s)
        assert self.holder is None

    # What is always so.

    @invariant()
    def an_engine_that_is_held_is_held_by_somebody(self):
        if not hasattr(self, "controls"):
            return
        assert (self.handler._holder is not None) == (self.holder is not None)
        assert self.controls.state != "paused" or self.holder is not None

    @invariant()
    def nobody_is_left_inside(self):
        if hasattr(self, "controls"):
            assert not self.handler._turn.locked()
            assert self.door._num_visitors == 0

    @invariant()
    def nothing_raw_was_raised(self):
        if hasattr(self, "controls"):
            assert self.raised.found == []


TestServers = Servers.TestCase


@pytest.mark.parametrize("secrets", [("", []), (TOKEN, []), ("", [KEY]), (TOKEN, [KEY])], ids=str)
@given(make_app=st.sampled_from([vllm_app, sglang_app]), more=st.lists(st.sampled_from(CHANGES), max_size=2))
def test_strangers_are_refused_whatever_else_they_show(secrets, make_app, more):
    servers = Servers()
    servers.start(make_app, *secrets)
    try:
        servers.strangers_ask(CLIENTS, more)
        servers.nobody_is_left_inside()
    finally:
        servers.teardown()


@given(
    num_keys=st.sampled_from([10, 1000, 20_000, 100_000]),
    nested=st.sampled_from(
        ["{%s}", '{"driver":{%s}}', '{"order":{"step":"hello",%s}}', '{"order":{"step":"pause","config":{%s}}}']
    ),
)
def test_whatever_an_order_is_made_of_to_refuse_it_costs_little(num_keys, nested):
    keys = ",".join(f'"{index:x}":1' for index in range(num_keys))
    tracemalloc.start()
    with pytest.raises(RefitError, match="cannot read") as caught:
        OrderRequest.decode(nested % keys + "\n")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert len(str(caught.value)) < 2000


@given(
    num_ranks=st.integers(1, 3),
    said=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["x", "{}", '{"id":1}', json.dumps({str(index): 1 for index in range(1000)})]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_what_a_rank_is_asked_and_cannot_read_is_told_briefly(num_ranks, said):
    from fp8refit.remote.rank_server import RankServer

    server = RankServer(lambda: None)
    for _, message in said[:num_ranks]:
        assert len(server.handle(message)) < 2000


# The driver's side.


class PlainServer(Server):
    def deliver(self, message: str, *, timeout_s: float) -> str:
        answer, said = self.order("/orders", message, timeout_s=timeout_s)
        return said if answer is None else answer


STARTS = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 403 No\r\n",
    b"HTTP/9\r\n",
    b"\x16\x03\x01",
    b"",
]
HEADERS = [
    b"Content-Length: 1000\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"X: y\r\n",
    b"Location: /\r\n",
]
BODIES = [
    b"{}",
    b"5\r\nabcde\r\n",
    b"fffffffff\r\n",
    b"\xff",
    b'{"speaker":"fp8refit","error":{"kind":"x"}}',
    b"[" * 3000,
]


@given(
    said=st.tuples(
        st.sampled_from(STARTS),
        st.lists(st.sampled_from(HEADERS), max_size=2),
        st.lists(st.sampled_from(BODIES), max_size=2),
    ),
    drips=st.booleans(),
    repeats=st.sampled_from([1, 30]),
    is_closed=st.booleans(),
)
def test_whatever_a_server_says_and_however_slowly_ends_in_time(said, drips, repeats, is_closed):
    start, headers, bodies = said
    script = (
        (start + b"".join(headers)) * (repeats if start.startswith(b"HTTP/1.1 100") else 1)
        + b"\r\n"
        + b"".join(bodies) * repeats
    )
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                if drips:
                    for byte in itertools.cycle(script):
                        connection.send(bytes([byte]))
                        if is_over.wait(0.02) or time.monotonic() - begin_s > 2.5:
                            return
                connection.send(script)
                if not is_closed:
                    is_over.wait(5)

        thread = threading.Thread(target=serve)
        begin_s = time.monotonic()
        thread.start()
        with suppress(RefitError):
            PlainServer(f"http://127.0.0.1:{listener.getsockname()[1]}").post(orders.Hello(), timeout_s=0.15)
        is_late = time.monotonic() - begin_s > 2
        is_over.set()
        thread.join()
        assert not is_late


urls = st.one_of(
    st.text(max_size=30).map("http://{}".format),
    st.builds(
        "{}://{}{}{}".format,
        st.sampled_from(["http", "https", "ftp"]),
        st.sampled_from(["[::1", "[::1]", "[x]", "a", "a..b", "a" * 64, "ä", "me:x@a", "", "127.0.0.1", "[fe80::1%1]"]),
        st.sampled_from(["", ":1", ":0", ":65536", ":x", ":-1", ":"]),
        st.sampled_from(["", "/", "/a", "?x", "#x", "/\r\n", "/ä", "/%00"]),
    ),
)


@given(urls)
def test_what_is_no_url_is_refused_as_such(url):
    """What is one leads nowhere here: nothing is connected."""
    try:
        server = PlainServer(url)
    except RefitError as error:
        assert "is no URL of a server" in str(error)
        return
    with (
        mock.patch("socket.create_connection", side_effect=ConnectionRefusedError),
        pytest.raises(EngineLostError, match="cannot be reached"),
    ):
        server.post(orders.Hello(), timeout_s=5)
