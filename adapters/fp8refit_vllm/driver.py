"""The driver's side of vLLM's two clients: `SyncDriver` for `LLM`, `AsyncDriver` for `AsyncLLM`.

Each is the control plane of `fp8refit.engine.Engine` for its client, and the channel to workers in other processes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fp8refit.config import RefitConfig
from fp8refit.errors import (
    CacheFlushError,
    EngineAsleepError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
)
from fp8refit_vllm.compat import call_in_time, engine_is_dead, in_process_executor

_KEPT = (
    "vLLM kept its prefix cache because blocks of it are still held; the new weights are in place, but requests would read the "
    "old policy's KV. Free the blocks and refit again"
)


class SyncDriver:
    """A `vllm.LLM`, wherever its engine core and its workers run.

    Args:
        llm: The LLM.
        method: Name of the worker's method that `call` calls.
    """

    is_asynchronous = False

    def __init__(self, llm: Any, method: str) -> None:
        self._engine = llm.llm_engine
        self._method = method
        self._executor = in_process_executor(self._engine)
        self.config = self._engine.vllm_config
        self.worker = getattr(getattr(self._executor, "driver_worker", None), "worker", None)

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`."""
        if self._engine.has_unfinished_requests():
            raise EngineBusyError(
                "the engine has unfinished requests; a synchronous LLM cannot drain them without taking their outputs: "
                "finish or abort them, then refit"
            )
        if "weights" in getattr(self._executor, "sleeping_tags", ()):
            raise EngineAsleepError('the weights sleep; call llm.wake_up(tags=["weights"]) before refit')

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`."""
        await self.refuse("a refit is under way")
        return 0

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        self._engine.__dict__.pop("add_request", None)

    async def refuse(self, reason: str) -> None:
        """Refuse at admission, on this instance alone; every entry (`generate`, `chat`, `encode`) adds requests here."""

        def refuse(*_: Any, **__: Any) -> None:
            raise _refusal(reason)

        self._engine.__dict__["add_request"] = refuse

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`."""
        if self.config.model_config.is_multimodal_model:
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
        if not self._engine.reset_prefix_cache(False, self.config.kv_transfer_config is not None):
            raise CacheFlushError(_KEPT)

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`."""
        if hasattr(self._engine, "set_weight_version"):
            self._engine.set_weight_version(str(version))

    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        """See `fp8refit.remote.Channel`."""
        try:
            answers: Sequence[str] = call_in_time(
                lambda: self._engine.collective_rpc(self._method, timeout_s, (message,)), timeout_s
            )
        except Exception as error:  # vLLM raises whatever its engine core said, as a bare Exception
            raise _lost(error) from error
        return answers


class AsyncDriver:
    """A `vllm.v1.engine.async_llm.AsyncLLM`.

    Args:
        llm: The AsyncLLM.
        method: Name of the worker's method that `call` calls.
    """

    is_asynchronous = True
    worker = None

    def __init__(self, llm: Any, method: str) -> None:
        self._llm = llm
        self._method = method
        self._gate: _Gate | None = None
        self._was_paused = False
        self.config = llm.vllm_config

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`: `pause` is for running requests, and the ranks know whether their weights sleep."""

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`. New requests wait at a gate of ours, and so are refused if the refit fails."""
        refused_because = self._gate.reason if self._gate is not None else None
        num_unfinished = int(self._llm.output_processor.get_num_unfinished_requests())
        if self._gate is None:
            self._was_paused = await self._llm.is_paused()
        self._close_gate()
        try:
            await asyncio.wait_for(self._llm.pause_generation(mode=config.in_flight), config.timeout_s)
        except BaseException as error:
            # Also when the caller is cancelled: nothing may wait at a gate that nobody opens.
            if refused_because is not None:
                self._close_gate().refuse(refused_because)
            else:
                await self.resume()
            if not isinstance(error, TimeoutError):
                raise
            raise EngineBusyError(
                f"{num_unfinished} request(s) did not finish within {config.timeout_s:g} s; they go on. Refit later, wait "
                'longer (timeout_s), or choose in_flight="abort" or "keep"'
            ) from None
        return num_unfinished

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`. A scheduler that was paused before the refit stays paused."""
        if not self._was_paused:
            await self._llm.resume_generation()
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.open()

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`. The scheduler stays paused: what it might still hold may not run."""
        self._close_gate().refuse(reason)
        if not engine_is_dead(self._llm):
            await self._llm.abort(list(self._llm.output_processor.request_states), internal=True)

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`. Multimodal and encoder caches were dropped when generation was paused."""
        if not await self._llm.reset_prefix_cache(False, self.config.kv_transfer_config is not None):
            raise CacheFlushError(_KEPT)

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`."""
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(str(version))

    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        """See `fp8refit.remote.Channel`."""
        try:
            answers: Sequence[str] = await asyncio.wait_for(
                self._llm.collective_rpc(self._method, timeout_s, (message,)), timeout_s
            )
        except Exception as error:  # vLLM raises whatever its engine core said, as a bare Exception
            raise _lost(error) from error
        return answers

    def _close_gate(self) -> "_Gate":
        if self._gate is None:
            self._gate = _Gate(self._llm)
        self._gate.close()
        return self._gate


class _Gate:
    """Where requests to one AsyncLLM wait for the end of a refit, or are refused. In the place of its entries until opened."""

    _ENTRIES = ("generate", "encode", "add_request")

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._may_decide = asyncio.Event()
        self.reason: str | None = None
        for name in self._ENTRIES:
            llm.__dict__[name] = getattr(self, name)

    def close(self) -> None:
        """Let requests wait."""
        self.reason = None
        self._may_decide.clear()

    def refuse(self, reason: str) -> None:
        """Refuse those that wait, and every one that comes."""
        self.reason = reason
        self._may_decide.set()

    def open(self) -> None:
        """Admit those that wait, and give the engine its own entries back."""
        self.reason = None
        self._may_decide.set()
        for name in self._ENTRIES:
            self._llm.__dict__.pop(name, None)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """In the place of the engine's own."""
        await self._pass()
        async for output in type(self._llm).generate(self._llm, *args, **kwargs):
            yield output

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """In the place of the engine's own."""
        await self._pass()
        async for output in type(self._llm).encode(self._llm, *args, **kwargs):
            yield output

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the engine's own."""
        await self._pass()
        return await type(self._llm).add_request(self._llm, *args, **kwargs)

    async def _pass(self) -> None:
        await self._may_decide.wait()
        if self.reason is not None:
            raise _refusal(self.reason)


def _refusal(reason: str) -> EngineDirtyError:
    return EngineDirtyError(f"this engine refuses requests: {reason}")


def _lost(error: Exception) -> EngineLostError:
    return EngineLostError(
        f"the engine's workers do not answer ({type(error).__name__}: {error}); start the engine again"
    )
