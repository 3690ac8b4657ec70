"""Drives an SGLang engine from the process that takes its requests, which is the user's or a server's."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver import engine
from fp8refit.driver.admission import cache_kept, unfinished
from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.remote.channel import Channel
from fp8refit.remote.message_pairs import PairAnswers, Pairs
from fp8refit.remote.messages import have_done
from fp8refit.transport.loopback import Switchboard, Tell
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.worker import FLUSH, KEPT

T = TypeVar("T")

NOT_LOADED = (
    "SGLang does not load fp8refit's plugin in the processes of this engine: install fp8refit where they run (a path alone has "
    "no entry points), and leave it in SGLANG_PLUGINS. If it is there, their log says what this SGLang lacks"
)
POLL_S = 0.005
_SETTLING_S = 1.0
"""Seconds that a scheduler may need to notice that its last request has finished."""


class Driver(engine.Driver, Channel, Pairs):
    """Controls an engine's requests, and implements `fp8refit.remote.channel.Channel` to its ranks.

    Args:
        controls: The engine's controls.
    """

    def __init__(self, controls: TokenizerControls) -> None:
        self._controls = controls
        self._switchboard = Switchboard(controls.num_ranks)
        self._timeout_s = RefitConfig().timeout_s

    @property
    def is_asynchronous(self) -> bool:
        """Whether an event loop runs in this thread, or drives the engine in another."""
        loop = self._controls.loop
        return _is_in_loop() or (loop is not None and loop.is_running())

    @override
    async def check_ready(self) -> None:
        """Refuse if requests are unfinished. The ranks themselves check whether their weights are asleep."""
        if not self.is_asynchronous and self._controls.num_unfinished:
            raise unfinished("SGLang engine")

    @override
    async def pause(self, config: RefitConfig) -> int:
        self._timeout_s = config.timeout_s
        return await self._drive(self._controls.pause(config, may_wait=self.is_asynchronous))

    @override
    async def resume(self) -> None:
        await self._drive(self._controls.resume())

    @override
    async def refuse(self, reason: str) -> None:
        await self._drive(self._controls.refuse(reason))

    @override
    async def flush_caches(self) -> None:
        """Drop caches. The KV cache of requests that were kept is recomputed."""
        for _ in range(round(_SETTLING_S / POLL_S)):
            if KEPT not in await self.call(FLUSH, timeout_s=self._timeout_s):
                return
            await self._drive(asyncio.sleep(POLL_S))
        raise cache_kept("SGLang kept its radix cache", "requests that still run, transfers of KV")

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return await self._drive(self._controls.tokenize(prompts))

    @override
    async def publish_version(self, version: int) -> None:
        await self._drive(self._controls.publish_version(version))

    @override
    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        return await self._drive(self._switchboard.ask(message, self._ring, timeout_s=timeout_s))

    @override
    async def begin(self, message: str, *, timeout_s: float) -> Awaitable[Sequence[str]] | None:
        """Send a message. The engine's event loop does not run until the answers are awaited."""
        return await self._begun(partial(self._switchboard.ask, message, self._ring, timeout_s=timeout_s))

    @override
    async def call_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> PairAnswers:
        return await self._drive(self._talk_of_pair(first, second, timeouts_s))

    @property
    @override
    def can_begin(self) -> bool:
        return True

    @override
    async def begin_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> Awaitable[PairAnswers]:
        """Send both messages. Returns once the ranks have the second, or it is known that they will not get it."""
        return await self._begun(partial(self._talk_of_pair, first, second, timeouts_s))

    async def _talk_of_pair(
        self,
        first: str,
        second: str,
        timeouts_s: tuple[float, float],
        *,
        on_told: Callable[[], object] | None = None,
    ) -> PairAnswers:
        """Send both messages, and between them the order to drop caches, in one conversation.

        A scheduler that cannot drop them yet must first return to its loop; then it is asked again. If the caller leaves,
        the ranks are told nothing more.
        """
        is_left, start_s = False, 0.0

        async def talk(tell: Tell) -> PairAnswers | None:
            nonlocal start_s
            answers = await tell(first, is_last=False, timeout_s=timeouts_s[0])
            if is_left or not have_done(answers, first):
                return PairAnswers(answers=answers, is_refused=True, flush_s=0.0)
            start_s = time.perf_counter()
            if KEPT in await tell(FLUSH, is_last=False, timeout_s=self._timeout_s) or is_left:
                return None
            flush_s = time.perf_counter() - start_s
            answers = await tell(second, timeout_s=timeouts_s[1], on_told=on_told)
            return PairAnswers(answers=answers, is_refused=False, flush_s=flush_s)

        try:
            pair = await self._switchboard.talk(talk, self._ring, timeout_s=sum(timeouts_s) + self._timeout_s)
        except BaseException:
            is_left = True  # the conversation goes on without the caller
            raise
        if pair is not None:
            return pair
        await self.flush_caches()
        flush_s = time.perf_counter() - start_s
        answers = await self._switchboard.ask(second, self._ring, timeout_s=timeouts_s[1], on_told=on_told)
        return PairAnswers(answers=answers, is_refused=False, flush_s=flush_s)

    async def _begun(self, ask: Callable[..., Awaitable[T]]) -> Awaitable[T]:
        """Call `ask` with `on_told`, and return as soon as the ranks have the message."""

        async def tell() -> asyncio.Future[T]:
            told = asyncio.Event()
            answers, waiting = asyncio.ensure_future(ask(on_told=told.set)), asyncio.ensure_future(told.wait())
            try:
                await asyncio.wait((answers, waiting), return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                answers.cancel()
                raise
            finally:
                waiting.cancel()
            return answers

        return self._drive_to_end(await self._drive(tell()))

    async def _drive_to_end(self, answers: asyncio.Future[T]) -> T:
        async def wait() -> T:
            return await answers

        return await self._drive(wait())

    async def _ring(self, address: str) -> None:
        success, said = await self._controls.ring(address)
        if success:
            return
        if not self._switchboard.has_been_called:
            raise UnsupportedEngineError(f"{NOT_LOADED} (SGLang says: {said})")
        raise EngineLostError(f"a rank failed to answer ({said}); restart the engine")

    async def _drive(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop that drives the engine: the running one, or the engine's own.

        Raises:
            UnsupportedEngineError: The engine is bound to another loop, or to a closed one; waiting here would never
                end.
        """
        loop, bound = self._controls.loop, self._controls.bound_loop
        assert loop is not None, "an engine without a loop so far was created with one"
        if bound is not None and (bound.is_closed() or (_is_in_loop() and asyncio.get_running_loop() is not bound)):
            steps.close()
            raise UnsupportedEngineError(
                "this SGLang engine is bound to another event loop, or to a closed one: call refit outside any loop, "
                "or await refit_async in the loop in which the engine was first used"
            )
        return await steps if _is_in_loop() else loop.run_until_complete(steps)


def _is_in_loop() -> bool:
    return asyncio._get_running_loop() is not None
