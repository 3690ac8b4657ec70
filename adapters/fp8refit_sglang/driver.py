"""The driver's side of an SGLang engine, in the process that takes its requests: the user's, or a server's."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from fp8refit.admission import cache_kept, unfinished
from fp8refit.config import RefitConfig
from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.transport.loopback import Switchboard
from fp8refit.transport.pairs import PairAnswers, call_in_turn
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.worker import FLUSH, KEPT

T = TypeVar("T")

NOT_LOADED = (
    "SGLang does not load fp8refit's plugin in the processes of this engine: install fp8refit where they run (a path alone has "
    "no entry points), and leave it in SGLANG_PLUGINS"
)
POLL_S = 0.005
_SETTLING_S = 1.0
"""How long a scheduler may take to notice that its last request has finished."""


class Driver:
    """The control plane of `fp8refit.engine.Engine`, and `fp8refit.remote.Channel`, over an engine's controls.

    Args:
        controls: The engine's.
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

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`. The ranks know whether their weights sleep."""
        if not self.is_asynchronous and self._controls.num_unfinished:
            raise unfinished("SGLang engine")

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`."""
        self._timeout_s = config.timeout_s
        return await self._drive(self._controls.pause(config, may_wait=self.is_asynchronous))

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._drive(self._controls.resume())

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._drive(self._controls.refuse(reason))

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`. The KV of requests that are kept is computed anew."""
        for _ in range(round(_SETTLING_S / POLL_S)):
            if KEPT not in await self.call(FLUSH, timeout_s=self._timeout_s):
                return
            await self._drive(asyncio.sleep(POLL_S))
        raise cache_kept("SGLang kept its radix cache", "requests that still run, transfers of KV")

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.engine.Engine`."""
        return await self._drive(self._controls.tokenize(prompts))

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._drive(self._controls.publish_version(version))

    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        """See `fp8refit.remote.Channel`."""
        return await self._drive(self._switchboard.ask(message, self._ring, timeout_s=timeout_s))

    async def call_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> PairAnswers:
        """See `fp8refit.transport.pairs.Pairs`."""
        return await call_in_turn(self.call, self.flush_caches, first, second, timeouts_s=timeouts_s)

    async def _ring(self, address: str) -> None:
        success, said = await self._controls.ring(address)
        if success:
            return
        if not self._switchboard.has_been_called:
            raise UnsupportedEngineError(f"{NOT_LOADED} (SGLang says: {said})")
        raise EngineLostError(f"a rank could not answer ({said}); start the engine again")

    async def _drive(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run steps in the event loop that drives the engine: in this one, or in the engine's own, until they are done.

        Raises:
            UnsupportedEngineError: Another loop drives the engine, where this one would wait for ever, or one that is closed.
        """
        loop, bound = self._controls.loop, self._controls.bound_loop
        assert loop is not None, "an engine that no loop has driven yet was made with one"
        if bound is not None and (bound.is_closed() or (_is_in_loop() and asyncio.get_running_loop() is not bound)):
            steps.close()
            raise UnsupportedEngineError(
                "this SGLang engine is driven by another event loop, or by one that is closed: call refit outside any loop, or "
                "await refit_async in the loop in which the engine was first used"
            )
        return await steps if _is_in_loop() else loop.run_until_complete(steps)


def _is_in_loop() -> bool:
    return asyncio._get_running_loop() is not None
