"""Refits an engine in one of the user's own processes, such as a Ray actor, from another process.

It opens no port and imports no framework: the user's framework carries orders, which are text, from the trainer's
`HostedEngine` to the engine's `EngineHost`. Tensors travel as to any engine in another process.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeVar

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.attach import AttachedEngine, attach_engine
from fp8refit.driver.engine import DelegatingEngine, Engine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.errors import EngineBusyError, EngineLostError, UnsupportedEngineError
from fp8refit.live.turn import IN_USE
from fp8refit.ranks.ranks import Ranks
from fp8refit.remote.protocol.channel import Answers, Channel, send_in_turn
from fp8refit.remote.rank_server import RankServer
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.remote.servers.connection import Connection
from fp8refit.remote.servers.order_handler import OrderHandler
from fp8refit.remote.servers.server_driver import ServedRanks, ServerDriver

T = TypeVar("T")


class EngineHost:
    """Carries out the orders of a `HostedEngine` elsewhere on an engine of this process.

    An interrupt ends the refit: the engine serves the old policy or the new one, and refuses requests only if it holds neither.
    If the trainer dies during a refit, a synchronous engine refuses requests until the next refit. An asynchronous one
    resumes by itself if nothing was written.

    Args:
        engine: What `Refitter` takes.

    Raises:
        UnsupportedEngineError: `Refitter` does not take it, or it is one of several ranks with a driver each.

    Examples:
        >>> @ray.remote                                              # doctest: +SKIP
        ... class Rollouts:
        ...     def __init__(self, model):
        ...         self.llm = LLM(model)
        ...         self.host = fp8refit.EngineHost(self.llm)
        ...     def order(self, message):
        ...         return self.host.answer(message)
    """

    def __init__(self, engine: object) -> None:
        attached = attach_engine(engine)
        self._engine = attached.engine
        self._handler = OrderHandler(_HostControls(attached))
        self._line = threading.Lock()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def answer(self, message: str) -> str:
        """Carry out one order on a synchronous engine. Errors are returned to the sender.

        Raises:
            UnsupportedEngineError: The engine is asynchronous.
        """
        if self._engine.is_asynchronous:
            raise UnsupportedEngineError(
                f"this {self._engine.name} engine is asynchronous; await answer_async in the event loop that drives it"
            )
        with self._line:  # the runner cannot be used by two threads
            try:
                return self._runner.run(self._handler.answer(message)).model_dump_json()
            except (KeyboardInterrupt, SystemExit):
                self._runner.run(self._handler.give_up("the engine's process was interrupted in a refit"))
                raise

    async def answer_async(self, message: str) -> str:
        """`answer` for an asynchronous engine, in the event loop that drives it."""
        return (await self._handler.answer(message)).model_dump_json()


class HostedEngine(ServerDriver, Engine):
    """An engine in a process with an `EngineHost`, for `Refitter` and `Broadcaster`.

    Args:
        ask: Called with an order and a time limit in seconds. Passes the order to the other process's `EngineHost` and
            returns its answer. If it raises, the engine counts as lost.
        label: The engine's name in errors.

    Raises:
        EngineLostError: `ask` failed.

    Examples:
        >>> def ask(message, timeout_s):                             # doctest: +SKIP
        ...     return ray.get(rollouts.order.remote(message), timeout=timeout_s)
        >>> refitter = Refitter(HostedEngine(ask))                   # doctest: +SKIP
    """

    name = "hosted"

    def __init__(self, ask: Callable[[str, float], str], *, label: str = "the hosted engine") -> None:
        if not callable(ask):
            raise TypeError(f"ask is of type {type(ask).__name__}; pass a function of a message and of seconds to wait")
        super().__init__(_Asked(ask, label))
        self.ranks: Ranks = ServedRanks(self)
        self._fp8refit_engine = AttachedEngine(self)


class _Asked(Connection):
    """Delivers messages by calling the user's function."""

    asking_s: ClassVar[float] = RefitConfig().timeout_s
    """An actor handles one call at a time, and may be busy with a rollout."""
    is_shared: ClassVar[bool] = False
    """False: `ask` is the user's function, and must not run in another thread while the user's source is read."""

    def __init__(self, ask: Callable[[str, float], str], label: str) -> None:
        super().__init__(label)
        self._ask = ask

    @override
    def deliver(self, message: str, *, timeout_s: float) -> str:
        try:
            return self._ask(message, timeout_s)
        except Exception as error:
            raise EngineLostError(
                f"{self.label} does not answer ({type(error).__name__}: {error}); restart it if it died"
            ) from error


class _HostControls(DelegatingEngine, Channel):
    """What a driver elsewhere may do with the engine in this process, unless it is refitted from here.

    A driver that has paused the engine keeps others out until it resumes it, or is silent for the refit's time limit.
    """

    def __init__(self, attached: AttachedEngine) -> None:
        engine = attached.engine
        super().__init__(engine, engine.ranks)
        self.pause, self.resume, self.refuse = self._pause, self._resume, self._refuse
        self._turn, self._paused_s = attached.turn, 0.0
        self._channel = _channel_of(engine)

    async def _in_turn(self, step: Callable[[], Awaitable[T]]) -> T:
        with self._turn.during(self, lambda: self._paused_s) as is_held:
            if not is_held:
                raise EngineBusyError(IN_USE)
            return await step()

    async def _pause(self, config: RefitConfig) -> int:
        async def pause_if_ready() -> int:
            await self.check_ready()
            num_requests = await self._driver.pause(config)
            self._paused_s = config.timeout_s
            return num_requests

        return await self._in_turn(pause_if_ready)

    async def _resume(self) -> None:
        self._paused_s = 0.0
        await self._in_turn(self._driver.resume)

    async def _refuse(self, reason: str) -> None:
        self._paused_s = 0.0
        await self._in_turn(lambda: self._driver.refuse(reason))

    @override
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        async def send() -> Answers:
            return await (await self._channel.send(messages, timeouts_s, begins=False))

        return self._in_turn(send)


class _OwnRank(Channel):
    """Reaches the one rank of an engine whose model is in this process."""

    is_asynchronous = False

    def __init__(self, engine: Engine, ranks: LocalRanks) -> None:
        self._server = RankServer(lambda: ranks.rank)
        self._flush_caches = engine.flush_caches

    @override
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        return send_in_turn(self._call, self._flush_caches, messages, timeouts_s)

    async def _call(self, message: str, timeout_s: float) -> Sequence[str]:
        return [self._server.handle(message)]


def _channel_of(engine: Engine) -> Channel:
    """Reaches every rank of an engine.

    Raises:
        UnsupportedEngineError: Only one of several ranks can be reached from here.
    """
    if isinstance(engine.ranks, RemoteRanks):
        return engine.ranks.client.channel
    if isinstance(engine.ranks, LocalRanks) and engine.ranks.rank.group.size == 1:
        return _OwnRank(engine, engine.ranks)
    raise UnsupportedEngineError(
        f"this {engine.name} engine has a driver for each rank; call refit on every one of them, in their own processes"
    )
