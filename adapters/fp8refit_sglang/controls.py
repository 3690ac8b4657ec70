"""Pauses, resumes and refuses the requests of an SGLang engine, in the process that takes them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from fp8refit.config import RefitConfig
from fp8refit.driver.admission import refusal, still_running
from fp8refit.errors import UnsupportedEngineError
from fp8refit_sglang.compat import Tokenizer
from fp8refit_sglang.gate import TokenizerGate

_POLL_S = 0.005


class TokenizerControls:
    """Controls one engine's requests. All methods run in the event loop that drives the engine.

    Args:
        manager: The engine's tokenizer manager.
        loop: The event loop to use until the manager has chosen one.
        refuse_with: Makes the error for a refused request, from the reason and the request.
    """

    def __init__(
        self,
        manager: Any,
        loop: asyncio.AbstractEventLoop | None = None,
        refuse_with: Callable[[str, Any], Exception] = lambda reason, _: refusal(reason),
    ) -> None:
        self._tokenizer = Tokenizer(manager)
        self._first_loop = loop
        self._refuse_with = refuse_with
        self._gate: TokenizerGate | None = None
        self._was_paused = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which to await these methods, unless one is running in this thread."""
        return self._tokenizer.loop or self._first_loop

    @property
    def bound_loop(self) -> asyncio.AbstractEventLoop | None:
        """The only event loop in which these methods may be awaited, if the engine has chosen one."""
        return self._tokenizer.loop

    @property
    def num_ranks(self) -> int:
        """Number of the engine's ranks."""
        return self._tokenizer.num_ranks

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return self._tokenizer.num_unfinished

    async def pause(self, config: RefitConfig, *, may_wait: bool) -> int:
        """Stop generation; return how many requests that affects. New requests wait at our gate.

        Args:
            config: Options of the refit.
            may_wait: Whether new requests can wait for the refit; otherwise they are refused until it ends.
        """
        refused_because = self._gate.reason if self._gate is not None else None
        num_unfinished = self._tokenizer.num_unfinished
        gate = self._close_gate()
        if not may_wait:
            gate.refuse("a refit is under way")
        try:
            async with asyncio.timeout(config.timeout_s):
                await self._stop(config)
        except BaseException as error:
            # Also on cancellation: no request may be left waiting at a gate that nobody will open.
            if refused_because is not None:
                gate.refuse(refused_because)
            else:
                try:
                    await self._settle()
                finally:
                    self._open_gate()
            if isinstance(error, TimeoutError):
                raise still_running(num_unfinished, config.timeout_s) from None
            raise
        return self._tokenizer.num_unfinished if config.in_flight == "wait" else num_unfinished

    async def _stop(self, config: RefitConfig) -> None:
        while config.in_flight != "keep" and not await self._tokenizer.is_drained():
            if config.in_flight == "abort":
                self._tokenizer.abort_all()
            await asyncio.sleep(_POLL_S)
        await self._tokenizer.pause()

    async def _settle(self) -> None:
        """Restore the pause state from before the refit, or what users have asked for since."""
        if self._was_paused and not self._tokenizer.is_paused:
            await self._tokenizer.pause()
        elif self._tokenizer.is_paused and not self._was_paused:
            await self._tokenizer.go_on()

    async def resume(self) -> None:
        """Let requests continue, unless the user had paused generation before the refit."""
        if self._gate is None:
            return
        if not self._was_paused:
            await self._tokenizer.go_on()
        self._open_gate()

    async def refuse(self, reason: str) -> None:
        """Refuse requests. The schedulers stay paused, because requests they still hold must not run."""
        self._close_gate().refuse(reason)
        self._tokenizer.abort_all()
        await self._tokenizer.wake_those_that_wait()

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.driver.engine.Engine`."""
        token_ids = self._tokenizer.tokenize(prompts)
        if token_ids is None:
            raise UnsupportedEngineError(
                "this engine was booted with skip_tokenizer_init; pass token ids instead of prompts"
            )
        return token_ids

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.driver.engine.Engine`."""
        await self._tokenizer.set_version(str(version))

    async def ring(self, address: str) -> tuple[bool, str]:
        """Make every rank connect to `address`; return rank 0's success and SGLang's message."""
        return await self._tokenizer.ring(address)

    def _close_gate(self) -> TokenizerGate:
        # After a failed refit generation is still paused by us; only what users asked for since then counts.
        if self._gate is None:
            self._was_paused = self._tokenizer.is_paused
            self._gate = TokenizerGate(self._tokenizer.manager, self._decide, self._refuse_with)
        self._gate.close()
        return self._gate

    def _open_gate(self) -> None:
        if self._gate is not None:
            self._gate.open()
            self._gate = None  # only now: an interrupt before this line must leave a gate that a later call can open

    def _decide(self, is_paused: bool) -> None:
        self._was_paused = is_paused
