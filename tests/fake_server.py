"""A fake server over a fake engine of several ranks: an order handler in its own event loop, and an adapter that finds it."""

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from fp8refit.config import RefitConfig
from fp8refit.errors import RankFailedError
from fp8refit.remote.protocol.channel import Answers, send_in_turn
from fp8refit.remote.rank_server import RankServer
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.http_client import Server
from fp8refit.remote.servers.http_endpoint import Door
from fp8refit.remote.servers.order_handler import OrderHandler
from fp8refit.remote.servers.orders import OrderRequest, Send
from fp8refit.remote.servers.server_driver import ServedRanks, ServerDriver
from tests.asgi import ELSEWHERE, LOCAL, order_headers, scope_of
from tests.fake_ranks import Cluster, ThreadChannel

URL = "http://fake:1"


class FakeControls:
    """See `fp8refit.remote.servers.order_handler.Controls`."""

    def __init__(self, cluster: Cluster) -> None:
        self.channel = ThreadChannel([RankServer(lambda rank=rank: rank) for rank in cluster.ranks], suspends=True)
        self.events: list[str] = []

    async def pause(self, config: RefitConfig) -> int:
        self.events.append("pause")
        return 3

    async def resume(self) -> None:
        self.events.append("resume")

    async def refuse(self, reason: str) -> None:
        self.events.append(f"refuse: {reason}")

    async def flush_caches(self) -> None:
        self.events.append("flush")

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return [[len(prompt)] for prompt in prompts]

    async def publish_version(self, version: int) -> None:
        self.events.append(f"publish {version}")

    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        return send_in_turn(self.channel.call, self.flush_caches, messages, timeouts_s)


class Running:
    """A server that runs.

    Args:
        token: What drivers have to know.
        is_trusted: Whether those who ask are on its host.
    """

    def __init__(self, *, token: str | None = None, is_trusted: bool = True) -> None:
        self.token, self.is_trusted = token, is_trusted
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.kind = _server_of(self)
        """The kind of server that reaches it."""
        self.routes: dict[str, tuple[int, str]] = {}
        """What it answers to other requests than orders."""
        self.start()

    def start(self) -> None:
        """Another engine, instead of the one before."""
        self.cluster = Cluster()
        self.controls = FakeControls(self.cluster)
        self.handler, self.door = OrderHandler(self.controls), Door(token=self.token)
        self.orders: list[str] = []

    @property
    def events(self) -> list[str]:
        return self.controls.events

    def answer(self, message: str, headers: dict[str, str] | None = None) -> str:
        with suppress(RankFailedError):
            order = OrderRequest.decode(message).order
            self.orders.append(f"send {len(order.messages)}" if isinstance(order, Send) else order.step)
        scope = scope_of("/", order_headers() | (headers or {}), LOCAL if self.is_trusted else ELSEWHERE)
        return self.do(self.door.take(scope, lambda: self._body(message), self.handler.answer))[1]

    async def _body(self, message: str) -> dict[str, Any]:
        return {"type": "http.request", "body": message.encode()}

    def do(self, steps: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(steps, self._loop).result(20)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


def _server_of(running: Running) -> type[Server]:
    class FakeServer(Server):
        engine = "fake"

        def recognise(self) -> bool:
            return self.url == URL

        def send(self, route: str, body: str | None, **_: Any) -> tuple[int, str]:
            return running.routes.get(route, (404, ""))

        def deliver(self, message: str, *, timeout_s: float) -> str:
            return running.answer(message, self._order_headers)

    return FakeServer


def entry_point_of(running: Running) -> Any:
    """Entry point of the adapter of its kind of server."""

    class ServedEngine(ServerDriver):
        name = "fake"
        server = running.kind

        def __init__(self, candidate: Server) -> None:
            super().__init__(candidate)
            self.ranks: RemoteRanks = ServedRanks(self)

        @classmethod
        def accepts(cls, candidate: object) -> bool:
            return isinstance(candidate, cls.server)

    class EntryPoint:
        name = "fake"

        def load(self) -> type[ServedEngine]:
            return ServedEngine

    return EntryPoint()
