"""Drives vLLM's `AsyncLLM`: pauses and resumes requests, drops caches, and sends messages to its workers."""

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.admission import cannot_continue, still_running
from fp8refit.driver.engine import Driver
from fp8refit.driver.replicas import gathering
from fp8refit.errors import EngineLostError, RankFailedError, RefitError
from fp8refit.remote.protocol.channel import Answers, Channel, send_in_turn
from fp8refit.remote.protocol.messages import failure_of
from fp8refit.transport.running import begun
from fp8refit_vllm.compat import num_api_servers, token_ids
from fp8refit_vllm.core import CORE_METHOD, FREEZE_METHOD, SET_APART_METHOD, Outcome, Pair
from fp8refit_vllm.core_compat import (
    call_cores,
    call_each_core,
    check_continues,
    cores_of,
    is_frozen,
    pause_generation,
    steps_with_others,
    until_answered,
)
from fp8refit_vllm.driver import (
    channel_lost,
    error_of,
    has_connector,
    kept,
    takes_pairs,
    to_answers,
    tokenized,
)
from fp8refit_vllm.gate import LlmGate
from fp8refit_vllm.watch import ADMIT_METHOD
from fp8refit_vllm.worker import PLUGIN_METHOD

T = TypeVar("T")

_DYING_S = 1.0
"""How long it may take until vLLM notices that its core died."""
_STEPS_TO_SEND = 4
"""How many iterations of the event loop it takes until a call to every engine core has been sent."""


class AsyncDriver(Driver, Channel):
    """Drives a `vllm.v1.engine.async_llm.AsyncLLM`. It holds only a weak reference to it.

    Args:
        llm: The AsyncLLM.
        method: Name of the worker method that takes our messages.
    """

    is_asynchronous = True
    worker = None

    def __init__(self, llm: Any, method: str) -> None:
        self._ref = weakref.ref(llm)
        self._method = method
        self._gate: LlmGate | None = None
        self._was_paused = self._is_stopped = self._was_resumed = False
        self._pausing: asyncio.Future[None] | None = None
        self._timeout_s, self._in_flight = RefitConfig().timeout_s, RefitConfig().in_flight
        self._published: int | None = None
        self.config = llm.vllm_config
        self._num_replicas = max(len(cores_of(llm.engine_core)), 1)
        self._steps_together = steps_with_others(self.config)
        self._has_other_clients = num_api_servers(self.config) > 1
        self._is_gathered = self._num_replicas == 1 or self._steps_together

    @property
    def _llm(self) -> Any:
        llm = self._ref()
        if llm is None:
            raise EngineLostError("the AsyncLLM is gone; create a new one, and a new Refitter for it")
        return llm

    @override
    async def check_ready(self) -> None:
        """Nothing to check: `pause` handles running requests, and the ranks know whether their weights are asleep."""

    @override
    async def pause(self, config: RefitConfig) -> int:
        """Stop the scheduler. New requests wait at our gate, where they are refused if the refit fails.

        Requests that are frozen run on until the caches are dropped, or until the core stops them for two messages; but not
        with a KV connector, because a core that transfers KV may take long to stop.
        """
        self._timeout_s, self._in_flight = config.timeout_s, config.in_flight
        if config.in_flight == "continue":
            self._check_continues()
        is_paused = await self._ask(self._llm.is_paused())
        self._is_stopped, self._was_resumed = is_paused, False
        # After a failed refit the scheduler is still paused by us; only what users asked for since then counts.
        is_held = is_paused or self._has_other_clients  # to refuse their requests, the scheduler runs
        self._was_paused = is_paused if self._gate is None else is_held and self._was_paused
        refused_because = self._gate.reason if self._gate is not None else None
        num_unfinished = self._num_unfinished
        self._close_gate()
        stops_in_core = self._call_core is not None and not has_connector(self.config)
        if is_frozen(config.in_flight) and stops_in_core and not is_paused:
            return num_unfinished
        try:
            await self._stop()
        except BaseException:
            # Also on cancellation: no request may be left waiting at a gate that nobody will open.
            if refused_because is not None:
                self._close_gate().refuse(refused_because)
                await self._admit(refused_because)
            else:
                await self.resume()
            raise
        return self._num_unfinished if config.in_flight == "wait" else num_unfinished

    async def _stop(self) -> None:
        """Stop the scheduler.

        Raises:
            EngineBusyError: Requests did not finish in time.
            RefitError: See `_ask`.
        """
        num_unfinished, self._is_stopped = self._num_unfinished, True
        try:
            await self._answer(self._pause_cores(self._in_flight), self._timeout_s)
        except TimeoutError as error:
            if self._llm.errored:
                raise await self._dying_or(error) from error
            raise still_running(num_unfinished, self._timeout_s) from None
        except Exception as error:
            raise await self._dying_or(error) from error
        await self._admit("")

    async def _pause_cores(self, in_flight: str) -> None:
        """Stop the schedulers. Cores that step together end a pause before they can be resumed, so it goes on if cancelled."""
        if not self._steps_together:
            return await pause_generation(self._llm, in_flight)
        self._pausing = asyncio.ensure_future(pause_generation(self._llm, in_flight))
        await asyncio.shield(self._pausing)

    async def _resume_cores(self) -> None:
        """Let the engine cores run requests."""
        pausing, self._pausing = self._pausing, None
        if pausing is not None and not pausing.done():
            await self._ask(call_cores(self._llm.engine_core, FREEZE_METHOD))
            await self._ask(pausing)
        await self._ask(type(self._llm).resume_generation(self._llm))

    def _check_continues(self) -> None:
        """Check that KV of running requests can be kept from others; see `set_apart_in_core`."""
        check_continues(self.config)
        if self._method != PLUGIN_METHOD or not hasattr(self._llm.engine_core, "call_utility_async"):
            raise cannot_continue("the engine core has not loaded fp8refit's plugin")

    @override
    async def resume(self) -> None:
        """Let requests continue, unless the user had paused the scheduler before the refit."""
        if self._gate is None:
            return
        await self._admit(None)
        if (self._is_stopped or self._was_resumed) and not self._was_paused:
            await self._resume_cores()
        self._is_stopped = False
        self._gate.open()
        self._gate = None  # only now: an interrupt before this line must leave a gate that a later call can open

    @override
    async def refuse(self, reason: str) -> None:
        """Refuse requests. The scheduler is paused, because requests it still holds must not run."""
        still_runs = self._still_runs
        self._close_gate().refuse(reason)
        if not self._llm.errored:
            with contextlib.suppress(RefitError):
                if still_runs:
                    await self._stop()
            with contextlib.suppress(RefitError):
                await self._ask(self._llm.abort(list(self._llm.output_processor.request_states), internal=True))
            with contextlib.suppress(RefitError):
                await self._admit(reason)

    async def _admit(self, refused_because: str | None) -> None:
        """Decide on requests from clients of the engine core in other processes, which have no gate. See `watch.admit`."""
        if not self._has_other_clients:
            return
        await self._ask(call_cores(self._llm.engine_core, ADMIT_METHOD, refused_because))
        if refused_because:  # by its next step
            await self._resume_cores()
            self._is_stopped = False

    @override
    async def flush_caches(self) -> None:
        """Drop caches. The KV cache of requests that were kept is recomputed; of those that continue, it is set apart."""
        if self._still_runs:
            await self._stop()
        try:
            is_empty = await self._ask(self._drop_prefix_caches())
        except RankFailedError as error:
            raise kept(str(error)) from error
        if not is_empty:
            raise kept()
        if self.config.model_config.is_multimodal_model:
            await self._ask(self._llm.reset_mm_cache())
            await self._ask(self._llm.reset_encoder_cache())

    async def _drop_prefix_caches(self) -> bool:
        """`reset_prefix_cache`, which returns what the first replica says, for all of them; or `set_apart_in_core`."""
        llm, how = self._llm, (True, has_connector(self.config))
        if self._in_flight == "continue":
            return all(await call_cores(llm.engine_core, SET_APART_METHOD))
        if self._num_replicas == 1:
            return bool(await llm.reset_prefix_cache(*how))
        return all(await call_cores(llm.engine_core, "reset_prefix_cache", *how))

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return tokenized(await token_ids(self._llm, prompts))

    @override
    async def publish_version(self, version: int) -> None:
        published, self._published = self._published, None
        if published != version and hasattr(self._llm, "update_weight_version"):
            await self._ask(self._llm.update_weight_version(str(version)))

    @property
    @override
    def num_ahead(self) -> int:
        return 1 if self._call_core is None else 2

    @override
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        """Send one message to the workers, or two to the core, which publishes the version once every rank has committed it."""
        call_core = self._call_core if len(messages) > 1 else None
        if call_core is None:
            answers = send_in_turn(self._call, self.flush_caches, messages, timeouts_s)
        else:
            stops = self._still_runs
            pair = Pair(self._method, tuple(messages), tuple(timeouts_s), has_connector(self.config), self._in_flight)
            called = call_core(CORE_METHOD, pair, self._timeout_s if stops else 0.0)
            answers = self._hear(called, sum(timeouts_s) + self._timeout_s, stops=stops)
        return await begun(answers, num_steps=_STEPS_TO_SEND) if begins else answers

    async def _call(self, message: str, timeout_s: float) -> Sequence[str]:
        if self._num_replicas == 1:
            return await self._ask_ranks(self._llm.collective_rpc(self._method, timeout_s, (message,)), timeout_s)
        if self._is_gathered:
            return await self._call_replicas([(message,)] * self._num_replicas, timeout_s)
        parallel = self.config.parallel_config
        host = "127.0.0.1" if parallel.data_parallel_hybrid_lb else parallel.data_parallel_master_ip
        with gathering(self._num_replicas, parallel.world_size, host=host, timeout_s=self._timeout_s) as places:
            asked = [(message, place.model_dump_json()) for place in places]
            answers = await self._call_replicas(asked, timeout_s + self._timeout_s)
        self._is_gathered = not any(map(failure_of, answers))
        return answers

    async def _call_replicas(self, asked: Sequence[tuple[str, ...]], timeout_s: float) -> list[str]:
        """Call the ranks of all replicas. Returns their answers, replica by replica.

        Args:
            asked: What each replica is asked.
            timeout_s: Time limit.
        """
        client = self._llm.engine_core
        async with self._standing_still():
            calls = [("collective_rpc", self._method, timeout_s, each, None) for each in asked]
            answers = await self._ask_ranks(call_each_core(client, calls), timeout_s)
        return [answer for of_replica in answers for answer in of_replica]

    @asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """Let no replica step while ranks vote, if they step together: those in a step would wait for those in a vote."""
        if not self._steps_together or self._is_stopped or await self._ask(self._llm.is_paused()):
            yield
            return
        try:
            await self._ask(self._pause_cores("keep"))
            yield
        finally:
            if not self._llm.errored:
                await self._resume_cores()

    async def _hear(self, called: Awaitable[Sequence[Any]], timeout_s: float, *, stops: bool) -> Answers:
        self._is_stopped |= stops  # as far as known
        outcome = Outcome(*await self._ask_ranks(called, timeout_s))
        self._published = outcome.version or None
        if stops:
            self._is_stopped = outcome.is_stopped
        if outcome.ended == "busy":
            raise still_running(self._num_unfinished, self._timeout_s)
        return to_answers(outcome)

    @property
    def _call_core(self) -> Callable[..., Awaitable[Any]] | None:
        """Calls a method of the engine core; None if the core does not take two messages in one exchange."""
        call: Callable[..., Awaitable[Any]] | None = getattr(self._llm.engine_core, "call_utility_async", None)
        # No replica may write before the caches of all are dropped.
        return call if self._num_replicas == 1 and takes_pairs(self.config, self._method) else None

    async def _ask_ranks(self, call: Awaitable[T], timeout_s: float) -> T:
        self._published = None
        try:
            return await self._ask(call, timeout_s)
        except RankFailedError as error:
            raise channel_lost(error) from error

    @property
    def _still_runs(self) -> bool:
        """Whether requests run on after `pause`."""
        return self._gate is not None and not self._is_stopped and is_frozen(self._in_flight)

    @property
    def _num_unfinished(self) -> int:
        return int(self._llm.output_processor.get_num_unfinished_requests())

    async def _ask(self, call: Awaitable[T], timeout_s: float | None = None) -> T:
        """Call vLLM, with a time limit.

        Raises:
            EngineLostError: The core is dead or stuck.
            RankFailedError: It raised something.
        """
        try:
            return await self._answer(call, self._timeout_s if timeout_s is None else timeout_s)
        except Exception as error:  # see `error_of`
            raise self._error_of(error) from error

    def _error_of(self, error: Exception) -> RefitError:
        if self._llm.errored:
            return EngineLostError(f"the engine core died ({error}); restart the engine")
        return error_of(error)

    async def _dying_or(self, error: Exception) -> RefitError:
        """The error for what a core raised that may be about to die: one whose workers are gone cancels what it does first."""
        deadline_s = time.monotonic() + _DYING_S
        while not self._llm.errored and time.monotonic() < deadline_s:
            await asyncio.sleep(_DYING_S / 100)
        return self._error_of(error)

    async def _answer(self, call: Awaitable[T], timeout_s: float) -> T:
        """Await a call, unless it takes too long or the engine core dies: vLLM never answers a call whose core has died."""
        answer = asyncio.ensure_future(call)
        try:
            for wait_s in until_answered(answer.done, timeout_s, lambda: bool(self._llm.errored)):
                await asyncio.wait((answer,), timeout=wait_s)
            return answer.result()
        finally:
            answer.cancel()

    def _close_gate(self) -> LlmGate:
        if self._gate is None:
            self._gate = LlmGate(self._llm, self._do_not_stay_paused)
        self._gate.close()
        return self._gate

    def _do_not_stay_paused(self) -> None:
        self._was_paused, self._was_resumed = False, True
