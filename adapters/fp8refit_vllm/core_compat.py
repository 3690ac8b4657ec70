"""Access to vLLM's engine core, and to its client in another process, where versions differ. It probes attributes (tested with
0.22 to 0.33).
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial, wraps
from secrets import token_bytes
from threading import Thread
from typing import Any, TypeAlias, TypeVar

from fp8refit.driver.admission import cannot_continue, refusal
from fp8refit.errors import EngineDirtyError
from fp8refit_vllm.compat import late_refusal

T = TypeVar("T")

_LOOK_FOR_DEATH_S = 0.25
"""How often, in seconds, to check that a core that was called is still alive."""
_LAST_OUTPUTS_S = 0.02
_LOOK_S = 5e-4
_HALF_HASH = 16
"""Bytes."""

StepOutputs: TypeAlias = tuple[dict[int, Any] | None, bool]
"""The result of one engine-core step: outputs per client, and whether the model ran."""
_REFUSED = "fp8refit: "
"""Prefix of the stop reason of a request that an engine core refused."""


def is_frozen(mode: str) -> bool:
    """Whether running requests stay in the engine core while it is paused. `mode` is a `RefitConfig.in_flight`."""
    return mode in ("keep", "continue")


async def pause_generation(llm: Any, mode: str) -> None:
    """Pause like `AsyncLLM.pause_generation`, without dropping caches. `mode` is a `RefitConfig.in_flight`.

    vLLM's own method ends with a fixed sleep for the last outputs, which is longer than most refits. This one returns
    as soon as they have arrived.
    """
    await llm.engine_core.pause_scheduler_async(mode="keep" if is_frozen(mode) else mode, clear_cache=False)
    deadline_s = time.monotonic() + _LAST_OUTPUTS_S
    while not is_frozen(mode) and llm.output_processor.get_num_unfinished_requests() and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)


def cores_of(client: Any) -> list[Any]:
    """The engine cores in other processes that a client reaches, as it names them: one for each replica."""
    return list(getattr(client, "core_engines", ()))


def steps_with_others(config: Any) -> bool:
    """Whether each step of an engine core takes all replicas, because their ranks share experts."""
    return config.parallel_config.data_parallel_size > 1 and bool(config.model_config.is_moe)


async def call_cores(client: Any, *call: Any) -> list[Any]:
    """Call a method of all engine cores with the same arguments. Returns their results; vLLM's calls return the first's."""
    num_cores = len(cores_of(client))
    if num_cores < 2:
        return [await client.call_utility_async(*call)]
    return await call_each_core(client, [call] * num_cores)


async def call_each_core(client: Any, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Make one call to each of a client's engine cores, at the same time. Returns their results."""
    begun = (client._call_utility_async(*call, engine=core) for core, call in zip(cores_of(client), calls, strict=True))
    return list(await asyncio.gather(*begun))


def in_process_executor(engine: Any) -> Any:
    """The executor of an LLM's engine, if its engine core is in this process."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    return getattr(core, "model_executor", None)


def add_to_core(name: str, method: Callable[..., Any]) -> None:
    """Add a method that clients can call to vLLM's engine core. Must run in the core's process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, method)


def has_queue(executor: Any) -> bool:
    """Whether an executor sends to its workers through a queue, because they run in other processes."""
    return getattr(executor, "rpc_broadcast_mq", None) is not None


def begin_call(executor: Any, method: str, timeout_s: float, message: str) -> Callable[[], list[Any]] | None:
    """Send a message to every worker of an executor, and return a function that waits for the answers.

    None if the workers run in the core's own process. Wait before you call the workers again.
    """
    if not has_queue(executor):
        return None
    wait: Callable[[], list[Any]] = executor.collective_rpc(method, timeout_s, (message,), non_block=True).result
    return wait


def core_beginner(engine: Any) -> Callable[..., Callable[[float], Any]] | None:
    """A function that starts a call to a method of an LLM's engine core, by name, without waiting for it.

    It returns a function that waits for the result with a time limit. None if vLLM cannot do that here.
    """
    client = getattr(engine, "engine_core", None)
    futures: dict[int, Future[Any]] | None = getattr(client, "utility_results", None)
    if client is None or futures is None or not hasattr(client, "_send_input"):
        return None
    from vllm.v1.engine import EngineCoreRequestType

    def begin(method: str, *arguments: Any) -> Callable[[float], Any]:
        future: Future[Any] = Future()
        call_id = uuid.uuid1().int >> 64  # as vLLM makes them
        futures[call_id] = future
        client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, arguments))
        return lambda timeout_s: result_in_time(future, timeout_s, partial(is_core_dead, engine))

    return begin


def skip_unread_replies(core: Any) -> None:
    """Make the executor of an engine core skip replies of workers that it left unread.

    vLLM stops reading at the first error, or when time is up, and would take the rest for replies to its next calls.
    """
    executor = core.model_executor
    if getattr(executor, "response_mqs", None):
        executor.response_mqs = _AllReplies(map(_Replies, executor.response_mqs))


class _AllReplies(list["_Replies"]):
    """The queues that vLLM reads one after another for the replies to a call."""

    def __iter__(self) -> Iterator["_Replies"]:
        for each in super().__iter__():
            each.catch_up()
        queues = super().__iter__()
        try:
            yield from queues
        finally:
            for unread in queues:
                unread.num_due += 1


class _Replies:
    """One worker's queue of replies."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.num_due = queue, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def catch_up(self) -> None:
        """Take the replies that were left unread and are there, since a worker waits while its queue is full."""
        with suppress(TimeoutError):
            while self.num_due:
                self._queue.dequeue(timeout=0)
                self.num_due -= 1

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """Return the reply to the latest call."""
        reply, self.num_due = None, self.num_due + 1
        while self.num_due:
            reply = self._queue.dequeue(*args, **kwargs)
            self.num_due -= 1
        return reply


def is_cache_idle(core: Any) -> bool:
    """Whether dropping an engine core's prefix cache cannot fail: no block except the null block is in use."""
    try:
        pools = _pools_of(core)
        return bool(pools) and all(pool.num_gpu_blocks - pool.get_num_free_blocks() == 1 for pool in pools)
    except AttributeError:
        return False


def _pools_of(core: Any) -> list[Any]:
    """An engine core's pools of KV blocks."""
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    return list({id(manager.block_pool): manager.block_pool for manager in managers}.values())


def stop_requests(
    core: Any, then: Callable[[float], T], too_late: Callable[[], T], timeout_s: float
) -> "T | Future[T]":
    """Let no request of an engine core run once its current step has ended, and call `then` with the seconds that took; or
    `too_late`, if whoever wanted it has given up: it took longer than `timeout_s`, or requests were let run again.

    Returns what they return, or a future of it. vLLM answers the client that called once the future is done.
    """
    start_s = time.perf_counter()
    stopped = core.pause_scheduler("keep", False)
    if not isinstance(stopped, Future):
        return then(time.perf_counter() - start_s)
    from vllm.v1.engine import EngineCoreRequestType

    found: Future[T] = Future()

    def go_on(stopped: "Future[None]") -> None:
        try:
            stopped.result()
            pause_s = time.perf_counter() - start_s
            is_wanted = pause_s < timeout_s and core.is_scheduler_paused()
            found.set_result(then(pause_s) if is_wanted else too_late())
        except Exception as error:  # noqa: BLE001 - the future would drop it
            found.set_exception(error)
        finally:
            # vLLM calls this when it has no work, and then waits for a message without looking for work again.
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    stopped.add_done_callback(go_on)
    return found


def freeze_in_core(core: Any) -> None:
    """Wait for no request of an engine core any more, if it is being paused. A second pause could begin as the first ends in
    another core of those that step together, and wait for that one for ever.
    """
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def set_apart_in_core(core: Any) -> bool:
    """Let requests of an engine core that have begun go on with their KV, and no other request share a block of it.

    All blocks lose their hashes, as if none were in use when vLLM drops its prefix cache. The hashes of a request that has
    begun are replaced by some that no other request can have: vLLM computes those of its later blocks from them.
    """
    pools = _pools_of(core)
    for pool in pools:
        pool.get_num_free_blocks = partial(int, pool.num_gpu_blocks - 1)
    try:
        is_empty = bool(core.reset_prefix_cache(False, False))
    finally:
        for pool in pools:
            del pool.get_num_free_blocks
    for request in core.scheduler.requests.values():
        if request.num_computed_tokens:
            own = token_bytes(_HALF_HASH)
            request.block_hashes[:] = [block_hash[:_HALF_HASH] + own for block_hash in request.block_hashes]
    return is_empty


def on_core_start(call: Callable[[Any], None]) -> None:
    """Call `call` on every engine core as it is created, in this process and those it starts. May be repeated.

    A spawned process loads plugins when its core is half created, so `EngineCore.__init__` cannot be wrapped there. The
    step function is the last thing that a core is given.
    """
    from vllm.v1.engine.core import EngineCore

    EngineCore.step_fn = _StepFunction(call)


class _StepFunction:
    """The attribute `step_fn` of engine cores; calls `call` when a core is given its first."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    def __get__(self, core: Any, kind: type | None = None) -> Any:
        return self if core is None else vars(core)["step_fn"]

    def __set__(self, core: Any, step: Callable[[], StepOutputs]) -> None:
        is_new = "step_fn" not in vars(core)
        vars(core)["step_fn"] = step
        if is_new:
            self._call(core)


def check_continues(config: Any) -> None:
    """Check that KV of requests that go on can be kept from others; see `set_apart_in_core`.

    Raises:
        UnsupportedEngineError: It cannot.
    """
    if config.kv_transfer_config is not None:
        raise cannot_continue("this engine's KV connector gives blocks of the old policy to later requests")
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        raise cannot_continue("outputs such as routed experts are kept by block of KV")


def drop_core_caches(core: Any, *, continues: bool = False) -> bool:
    """Drop all caches of an engine core; KV of running requests is recomputed, or set apart. Returns whether that succeeded."""
    has_connector = core.vllm_config.kv_transfer_config is not None
    if not (set_apart_in_core(core) if continues else core.reset_prefix_cache(True, has_connector)):
        return False
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_mm_cache()
        core.reset_encoder_cache()
    return True


def refuse_in_core(core: Any, step: Callable[[], StepOutputs], reason: str) -> StepOutputs:
    """Do a step that computes nothing and ends every request of an engine core with `reason`."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    requests = list(core.scheduler.requests.values())
    core.scheduler.finish_requests([one.request_id for one in requests], RequestStatus.FINISHED_ABORTED)
    outputs, was_executed = step()
    outputs = dict(outputs or {})
    how = getattr(FinishReason, "ERROR", FinishReason.ABORT)
    for one in requests:
        mine = outputs.setdefault(one.client_index, EngineCoreOutputs())
        mine.outputs.append(EngineCoreOutput(one.request_id, [], finish_reason=how, stop_reason=_REFUSED + reason))
    return outputs, was_executed


def raise_refusals() -> None:
    """Make every `LLM` and `AsyncLLM` of this process raise when its engine core refuses a request. May be repeated."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    step, process_outputs = LLMEngine.step, OutputProcessor.process_outputs
    if hasattr(step, "fp8refit_original"):
        return

    @wraps(process_outputs)
    def process(processor: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        others = []
        for output in outputs:
            state, said = processor.request_states.get(output.request_id), output.stop_reason
            if not (isinstance(said, str) and said.startswith(_REFUSED)):
                others.append(output)
            elif state is not None and state.queue is None:
                raise refusal(said.removeprefix(_REFUSED))
            elif state is not None:  # else it has ended with another answer to the same prompt
                state.queue.put(late_refusal(said.removeprefix(_REFUSED)))
                processor.abort_requests([getattr(state.parent_req, "request_id", output.request_id)], internal=True)
        return process_outputs(processor, others, *args, **kwargs)

    @wraps(step)
    def step_or_raise(engine: Any) -> Any:
        try:
            return step(engine)
        except EngineDirtyError:
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    step_or_raise.fp8refit_original = step  # type: ignore[attr-defined]
    LLMEngine.step = step_or_raise
    OutputProcessor.process_outputs = process


def publish_in_core(core: Any, version: int) -> bool:
    """Make an engine core show the policy version in its outputs, if vLLM can (since 0.27). Returns whether it can."""
    if not hasattr(core, "set_weight_version"):
        return False
    core.set_weight_version(str(version))
    return True


def says_dead(error: Exception) -> bool:
    """Whether `error` means that vLLM's engine core is gone."""
    return type(error).__name__ == "EngineDeadError"


def is_core_dead(engine: Any) -> bool:
    """Whether an LLM's engine has noticed that its engine core in another process is gone."""
    return bool(getattr(getattr(getattr(engine, "engine_core", None), "resources", None), "engine_dead", False))


def until_answered(is_done: Callable[[], bool], timeout_s: float, is_dead: Callable[[], bool]) -> Iterator[float]:
    """Yield, until the engine core has answered, how many seconds to wait before looking again.

    vLLM never answers a call whose core has died.

    Raises:
        TimeoutError: It takes longer than `timeout_s`, or the core is dead.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        left_s = deadline_s - time.monotonic()
        # An answer may have arrived while nobody looked: the event loop stands still while a caller reads its source.
        is_over = is_dead() or left_s <= 0
        yield _LOOK_FOR_DEATH_S if is_over else min(_LOOK_FOR_DEATH_S, left_s)
        if is_over and not is_done():
            raise TimeoutError("the engine core left a call unanswered")


def result_in_time(future: Future[T], timeout_s: float, is_dead: Callable[[], bool]) -> T:
    """Wait for the result of a call to an engine core; see `until_answered`."""
    for wait_s in until_answered(future.done, timeout_s, is_dead):
        wait_for((future,), timeout=wait_s)
    return future.result()


def call_in_time(call: Callable[[], T], timeout_s: float, is_dead: Callable[[], bool] = lambda: False) -> T:
    """Call, and wait at most `timeout_s` seconds. vLLM itself waits for an engine core without a limit.

    Raises:
        TimeoutError: It takes longer, or the engine core is dead. The call continues in its own thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)

    Thread(target=run, name="fp8refit-call", daemon=True).start()
    return result_in_time(future, timeout_s, is_dead)
