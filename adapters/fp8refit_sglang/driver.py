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
from fp8refit.driver.replicas import gathering
from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.remote.protocol.channel import Answers, Channel
from fp8refit.remote.protocol.messages import failure_of, have_done
from fp8refit.transport.loopback import Switchboard
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.worker import FLUSH, KEPT, SET_APART

T = TypeVar("T")

NOT_LOADED = (
    "SGLang does not load fp8refit's plugin in the processes of this engine: install fp8refit where they run (a path alone has "
    "no entry points), and leave it in SGLANG_PLUGINS. If it is there, their log says what this SGLang lacks"
)
POLL_S = 0.005
_HOST = "127.0.0.1"
_SETTLING_S = 1.0
"""Seconds that a scheduler may need to notice that its last request has finished."""


class Driver(engine.Driver, Channel):
    """Controls an engine's requests, and implements `fp8refit.remote.protocol.channel.Channel` to its ranks.

    Args:
        controls: The engine's controls.
    """

    num_ahead = 2

    def __init__(self, controls: TokenizerControls) -> None:
        self._controls = controls
        self._switchboard = Switchboard(controls.num_ranks)
        self._is_gathered = not controls.has_replicas
        self._timeout_s = RefitConfig().timeout_s
        self._drop = FLUSH

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
        self._drop = SET_APART if config.in_flight == "continue" else FLUSH
        return await self._drive(self._controls.pause(config, may_wait=self.is_asynchronous))

    @override
    async def resume(self) -> None:
        await self._drive(self._controls.resume())

    @override
    async def refuse(self, reason: str) -> None:
        await self._drive(self._controls.refuse(reason))

    @override
    async def flush_caches(self) -> None:
        """Drop caches. The KV cache of requests that were kept is recomputed; of those that continue, it is set apart."""
        for _ in range(round(_SETTLING_S / POLL_S)):
            answers = await self._drive(self._exchange((self._drop,), (self._timeout_s,)))
            if KEPT not in answers.said:
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
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        """Send messages. The engine's event loop does not run between this call and the wait for the answers."""
        if not begins:
            return self._drive(self._ask(messages, timeouts_s))
        told = asyncio.Event()

        async def begin() -> asyncio.Future[Answers]:
            answers = asyncio.ensure_future(self._exchange(messages, timeouts_s, told.set))
            answers.add_done_callback(lambda _: told.set())
            try:
                await told.wait()
            except BaseException:
                answers.cancel()
                raise
            return answers

        return self._drive(_wait_for(await self._drive(begin())))

    async def _ask(self, messages: Sequence[str], timeouts_s: Sequence[float]) -> Answers:
        """`_exchange`; before the first one the ranks of replicas meet."""
        if self._is_gathered:
            return await self._exchange(messages, timeouts_s)
        with gathering(1, self._controls.num_ranks, host=_HOST, timeout_s=self._timeout_s) as (place,):
            longer_s = [timeout_s + self._timeout_s for timeout_s in timeouts_s]
            answers = await self._exchange(messages, longer_s, place=place.model_dump_json())
        self._is_gathered = not any(map(failure_of, answers.said))
        return answers

    async def _exchange(
        self,
        messages: Sequence[str],
        timeouts_s: Sequence[float],
        on_told: Callable[[], object] | None = None,
        place: str | None = None,
    ) -> Answers:
        """Send one message, or two and between them the order to drop caches, in one conversation.

        A scheduler that cannot drop them yet must first return to its loop; then it is asked again.
        """
        times_s: list[float] = []

        def goes_on(heard: list[Sequence[str]]) -> bool:
            times_s.append(time.perf_counter())
            return bool(have_done(heard[0], messages[0])) if len(heard) == 1 else KEPT not in heard[1]

        ring = partial(self._ring, place=place)
        send = partial(self._switchboard.send, ring=ring, goes_on=goes_on, on_told=on_told)
        if len(messages) == 1:
            return Answers(said=(await send(messages, timeouts_s=timeouts_s))[0])
        first_s, second_s = timeouts_s
        heard = await send((messages[0], self._drop, messages[1]), timeouts_s=(first_s, self._timeout_s, second_s))
        if len(heard) == 1:
            return Answers(said=heard[0], is_refused=True)
        if len(heard) == 2:
            await self.flush_caches()
            times_s.append(time.perf_counter())
            heard = await send(messages[1:], timeouts_s=(second_s,))
        return Answers(said=heard[-1], flush_s=times_s[-1] - times_s[0])

    async def _ring(self, address: str, *, place: str | None) -> None:
        success, said = await self._controls.ring(address, place)
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


async def _wait_for(answers: asyncio.Future[T]) -> T:
    return await answers
