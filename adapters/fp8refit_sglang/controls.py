"""Pauses, resumes and refuses the requests of an SGLang engine, in the process that takes them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fp8refit.config import RefitConfig
from fp8refit.driver.admission import refusal, still_running
from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit_sglang.apart import check_continues
from fp8refit_sglang.compat import call_for, dead_processes, num_replicas, num_stages
from fp8refit_sglang.gate import TokenizerGate

T = TypeVar("T")

_DRAINING = ("wait", "abort")
"""Values of `in_flight` with which schedulers have no requests during a refit."""
_POLL_S, _LOOK_S = 0.005, 1.0
_RETRACT_S = 10.0
"""Longest wait for schedulers that put running requests back into their queues, which are gone with a lost engine."""


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
        self._manager = manager
        self._first_loop = loop
        self._refuse_with = refuse_with
        self._gate: TokenizerGate | None = None
        self._was_paused = self._is_in_place = False
        self._dead_before = dead_processes() if self.has_replicas else {}
        """Of other engines."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which to await these methods, unless one is running in this thread."""
        return self.bound_loop or self._first_loop

    @property
    def bound_loop(self) -> asyncio.AbstractEventLoop | None:
        """The only event loop in which these methods may be awaited, if the engine has chosen one."""
        loop: asyncio.AbstractEventLoop | None = self._manager.event_loop
        return loop

    @property
    def num_ranks(self) -> int:
        """Number of the ranks of all replicas."""
        arguments = self._manager.server_args
        return int(arguments.tp_size) * num_stages(arguments) * num_replicas(arguments)

    @property
    def has_replicas(self) -> bool:
        """Whether the ranks share no process group."""
        return num_replicas(self._manager.server_args) > 1

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._manager.rid_to_state)

    async def pause(self, config: RefitConfig, *, may_wait: bool) -> int:
        """Stop generation; return how many requests that affects. New requests wait at our gate.

        Args:
            config: Options of the refit.
            may_wait: Whether new requests can wait for the refit; otherwise they are refused until it ends.
        """
        if config.in_flight == "continue":
            check_continues(self._manager.server_args)
        if config.in_flight not in _DRAINING and num_stages(self._manager.server_args) > 1:
            raise UnsupportedEngineError(
                f"in_flight={config.in_flight!r}: stages of a pipeline run on while SGLang pauses generation; choose "
                + " or ".join(map(repr, _DRAINING))
            )
        refused_because = self._gate.reason if self._gate is not None else None
        num_unfinished = self.num_unfinished
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
        return self.num_unfinished if config.in_flight == "wait" else num_unfinished

    async def _stop(self, config: RefitConfig) -> None:
        if config.in_flight in _DRAINING:
            await self._while_all_live(self._drain(config))
        await self._pause(is_in_place=config.in_flight == "continue")

    async def _drain(self, config: RefitConfig) -> None:
        while not await self._is_drained():
            if config.in_flight == "abort":
                self._manager.abort_request(abort_all=True)
            await asyncio.sleep(_POLL_S)

    async def _settle(self) -> None:
        """Restore the pause state from before the refit, or what users have asked for since."""
        if self._was_paused and not self._manager.is_pause:
            await self._pause()
        elif self._manager.is_pause and not self._was_paused:
            await self._continue()

    async def resume(self) -> None:
        """Let requests continue, unless the user had paused generation before the refit."""
        if self._gate is None:
            return
        if not self._was_paused:
            await self._continue()
        self._open_gate()

    async def refuse(self, reason: str) -> None:
        """Refuse requests. The schedulers stay paused, because requests they still hold must not run."""
        self._close_gate().refuse(reason)
        if self._is_in_place:  # a paused scheduler ends only what is in its queue
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRACT_S):
                    await self._pause()
        self._manager.abort_request(abort_all=True)
        async with self._manager.is_pause_cond:  # wake requests that wait for the end of a pause
            self._manager.is_pause = False
            self._manager.is_pause_cond.notify_all()

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Tokenize prompts with the engine's tokenizer.

        Raises:
            UnsupportedEngineError: It has none.
        """
        tokenizer = self._manager.tokenizer
        if tokenizer is None:
            raise UnsupportedEngineError(
                "this engine was booted with skip_tokenizer_init; pass token ids instead of prompts"
            )
        return [list(tokenizer.encode(prompt)) for prompt in prompts]

    async def publish_version(self, version: int) -> None:
        """Show the version in outputs. Also tell a server that waits for its first weights that they are there."""
        if getattr(self._manager, "initial_weights_loaded", True) is False:
            self._manager.initial_weights_loaded = True
        if not hasattr(self._manager, "update_weight_version"):
            self._manager._update_weight_version_if_provided(str(version))
            return
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        await self._while_all_live(self._manager.update_weight_version(request))

    async def ring(self, address: str, place: str | None) -> tuple[bool, str]:
        """Make every rank connect to `address`; return whether the first of each replica did, and SGLang's messages."""
        self._manager.auto_create_handle_loop()
        results = await self._while_all_live(
            self._manager.update_weights_from_ipc_communicator(call_for(address, place))
        )
        return all(result.success for result in results), "; ".join(result.message for result in results)

    async def _is_drained(self) -> bool:
        """Whether the schedulers have no requests; some may wait here for the end of a pause."""
        return not self._manager.rid_to_state or not await self._manager.model_update_lock.is_locked()

    async def _pause(self, *, is_in_place: bool = False) -> None:
        """Stop the schedulers. Running requests stay in place, or go back to the queue, and their KV is recomputed later."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._is_in_place, mode = is_in_place, "in_place" if is_in_place else "retract"
        self._manager.auto_create_handle_loop()
        await type(self._manager).pause_generation(self._manager, PauseGenerationReqInput(mode=mode))

    async def _continue(self) -> None:
        """Let the schedulers run again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        request = ContinueGenerationReqInput(torch_empty_cache=False)
        await type(self._manager).continue_generation(self._manager, request)

    def _close_gate(self) -> TokenizerGate:
        # After a failed refit generation is still paused by us; only what users asked for since then counts.
        if self._gate is None:
            self._was_paused = self._manager.is_pause
            self._gate = TokenizerGate(self._manager, self._decide, self._refuse_with)
        self._gate.close()
        return self._gate

    def _open_gate(self) -> None:
        if self._gate is not None:
            self._gate.open()
            self._gate = None  # only now: an interrupt before this line must leave a gate that a later call can open

    def _decide(self, is_paused: bool) -> None:
        self._was_paused = is_paused

    async def _while_all_live(self, steps: Coroutine[Any, Any, T]) -> T:
        """Await what only ends if every process of SGLang goes on. Without replicas SGLang looks after them itself.

        Raises:
            EngineLostError: One does not.
        """
        task = asyncio.ensure_future(steps)
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                dead = dead_processes().items() - self._dead_before.items() if self.has_replicas else ()
                if dead:
                    named = ", ".join(f"{name} (PID {pid})" for pid, name in sorted(dead))
                    raise EngineLostError(f"{named} died; restart the engine")
            return task.result()
        finally:
            task.cancel()
