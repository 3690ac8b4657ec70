"""The control plane of an SGLang engine in the process that takes its requests."""

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
    """Keeps requests from one engine, in the event loop that drives it.

    Args:
        manager: The engine's tokenizer manager.
        loop: The event loop that drives the engine, until the manager has chosen one.
        refuse_with: Gives the error for a reason to refuse requests, and for one of them.
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
        """The event loop in which these methods are awaited, unless one runs in this thread."""
        return self._tokenizer.loop or self._first_loop

    @property
    def bound_loop(self) -> asyncio.AbstractEventLoop | None:
        """The only event loop in which these methods may be awaited, if the engine has chosen one."""
        return self._tokenizer.loop

    @property
    def num_ranks(self) -> int:
        """How many ranks the engine has."""
        return self._tokenizer.num_ranks

    @property
    def num_unfinished(self) -> int:
        """How many requests wait or run."""
        return self._tokenizer.num_unfinished

    async def pause(self, config: RefitConfig, *, may_wait: bool) -> int:
        """See `fp8refit.driver.engine.Engine`. New requests wait at a gate of ours, and so are refused if the refit fails.

        Args:
            config: How to refit.
            may_wait: Whether new requests can wait for the end of the refit; else they are refused meanwhile.
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
            # Also when the caller is cancelled: nothing may wait at a gate that nobody opens.
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
        """Let generation be paused, or not, as it was before or as somebody wanted it since."""
        if self._was_paused and not self._tokenizer.is_paused:
            await self._tokenizer.pause()
        elif self._tokenizer.is_paused and not self._was_paused:
            await self._tokenizer.go_on()

    async def resume(self) -> None:
        """See `fp8refit.driver.engine.Engine`. Generation that was paused before the refit stays paused."""
        if self._gate is None:
            return
        if not self._was_paused:
            await self._tokenizer.go_on()
        self._open_gate()

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.driver.engine.Engine`. The schedulers stay paused: what they might still hold may not run."""
        self._close_gate().refuse(reason)
        self._tokenizer.abort_all()
        await self._tokenizer.wake_those_that_wait()

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.driver.engine.Engine`."""
        token_ids = self._tokenizer.tokenize(prompts)
        if token_ids is None:
            raise UnsupportedEngineError(
                "this engine was booted with skip_tokenizer_init; calibrate with token ids instead of prompts"
            )
        return token_ids

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.driver.engine.Engine`."""
        await self._tokenizer.set_version(str(version))

    async def ring(self, address: str) -> tuple[bool, str]:
        """Have every rank answer at `address`; whether rank 0 did, and what SGLang said."""
        return await self._tokenizer.ring(address)

    def _close_gate(self) -> TokenizerGate:
        # If an earlier refit failed, generation is still paused by it; only what was asked for since then counts.
        if self._gate is None:
            self._was_paused = self._tokenizer.is_paused
            self._gate = TokenizerGate(self._tokenizer.manager, self._decide, self._refuse_with)
        self._gate.close()
        return self._gate

    def _open_gate(self) -> None:
        if self._gate is not None:
            self._gate.open()
            self._gate = None  # not before it is open: an interrupt in between would leave requests at it for ever

    def _decide(self, is_paused: bool) -> None:
        self._was_paused = is_paused
