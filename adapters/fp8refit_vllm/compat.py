"""Access to vLLM's internals that differ between versions. It probes attributes (tested with 0.26 to 0.33)."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from http import HTTPStatus
from importlib.metadata import entry_points
from inspect import currentframe, isawaitable, signature
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.driver.admission import refusal
from fp8refit.live.versions import Versions

_LAST_OUTPUTS_S = 0.02
_LOOK_S = 5e-4
_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


T = TypeVar("T")

VERSIONS = Versions(engine="vLLM", oldest="0.26", newest="0.33")

StepOutputs: TypeAlias = tuple[dict[int, Any] | None, bool]
"""The result of one engine-core step: outputs per client, and whether the model ran."""
_REFUSED = "fp8refit: "
"""Prefix of the stop reason of a request that an engine core refused."""

PLUGIN_GROUP = "vllm.general_plugins"


def is_async_client(candidate: Any) -> bool:
    """Whether `candidate` is an AsyncLLM rather than an LLM."""
    return hasattr(candidate, "pause_generation") and hasattr(candidate, "output_processor")


def num_api_servers(config: Any) -> int:
    """The number of processes that take requests for one server."""
    return int(getattr(config.parallel_config, "_api_process_count", 1))


def api_keys(arguments: Any) -> list[str]:
    """The API keys that a server accepts; empty if it needs none."""
    import vllm.envs

    return [key for key in getattr(arguments, "api_key", None) or [vllm.envs.VLLM_API_KEY] if key]


def http_refusal(reason: str) -> Exception:
    """The error that makes a server answer 503, with the reason."""
    try:
        from vllm.exceptions import RetryableRequestError as Refused
    except ImportError:  # 0.26
        from vllm.entrypoints.openai.engine.protocol import GenerationError as Refused
    error: Exception = Refused(str(refusal(reason)))
    error.status_code = HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined]
    return error


async def pause_generation(llm: Any, mode: str) -> None:
    """Pause like `AsyncLLM.pause_generation`, without dropping caches. `mode` is a `RefitConfig.in_flight`.

    vLLM's own method ends with a fixed sleep for the last outputs, which is longer than most refits. This one returns
    as soon as they have arrived.
    """
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
    deadline_s = time.monotonic() + _LAST_OUTPUTS_S
    while mode != "keep" and llm.output_processor.get_num_unfinished_requests() and time.monotonic() < deadline_s:
        await asyncio.sleep(_LOOK_S)


def in_process_executor(engine: Any) -> Any:
    """The executor of an LLM's engine, if its engine core is in this process."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    return getattr(core, "model_executor", None)


def core_caller(engine: Any) -> Callable[..., Any] | None:
    """A function that calls a method of the engine core by name. None if the client cannot do that.

    Args:
        engine: The engine of an LLM; or an AsyncLLM, whose calls are awaited.
    """
    client = getattr(engine, "engine_core", None)
    name = "call_utility_async" if is_async_client(engine) else "call_utility"
    call: Callable[..., Any] | None = getattr(client, name, None)
    return call


def add_to_core(name: str, method: Callable[..., Any]) -> None:
    """Add a method that clients can call to vLLM's engine core. Must run in the core's process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, method)


def begin_call(core: Any, method: str, timeout_s: float, message: str) -> Callable[[], list[Any]] | None:
    """Send a message to every worker of an engine core, and return a function that waits for the answers.

    None if the workers run in the core's own process. Wait before you call the workers again.
    """
    executor = core.model_executor
    if getattr(executor, "rpc_broadcast_mq", None) is None:
        return None
    wait: Callable[[], list[Any]] = executor.collective_rpc(method, timeout_s, (message,), non_block=True).result
    return wait


def begin_in_workers(engine: Any, method: str, timeout_s: float, message: str) -> Callable[[float], list[Any]] | None:
    """Send a message to every worker of an LLM's engine, and return a function that waits for the answers with a time
    limit.

    None if vLLM cannot do that here. vLLM's own calls block, so a core in another process is asked through its client's
    message queue.
    """
    client = getattr(engine, "engine_core", None)
    core, futures = getattr(client, "engine_core", None), getattr(client, "utility_results", None)
    if core is not None and hasattr(core, "model_executor"):
        wait = begin_call(core, method, timeout_s, message)
        return (lambda _: wait()) if wait is not None else None
    if futures is None or not hasattr(client, "_send_input"):
        return None
    from vllm.v1.engine import EngineCoreRequestType

    future: Future[list[Any]] = Future()
    call_id = uuid.uuid1().int >> 64  # as vLLM makes them
    futures[call_id] = future
    arguments = (method, timeout_s, (message,), None)
    client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, "collective_rpc", arguments))
    return future.result


def is_cache_idle(core: Any) -> bool:
    """Whether dropping an engine core's prefix cache cannot fail: no block except the null block is in use."""
    try:
        managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        pools = [manager.block_pool for manager in managers]
        return bool(pools) and all(pool.num_gpu_blocks - pool.get_num_free_blocks() == 1 for pool in pools)
    except AttributeError:
        return False


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


def on_deep_sleep(worker: Any, call: Callable[[], None]) -> None:
    """Call `call` when a worker goes to a sleep level that discards the weights (2). May be repeated."""
    if "sleep" in worker.__dict__:
        return

    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            call()
        return type(worker).sleep(worker, level, *args, **kwargs)

    worker.sleep = sleep


def drop_core_caches(core: Any) -> bool:
    """Drop all caches of an engine core; KV of running requests is recomputed. Returns whether that succeeded."""
    has_connector = core.vllm_config.kv_transfer_config is not None
    if not core.reset_prefix_cache(True, has_connector):
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
    """Make every `LLM` of this process raise an error when its engine core refuses a request. May be repeated."""
    from vllm.v1.engine.llm_engine import LLMEngine

    original = LLMEngine.step
    if hasattr(original, "fp8refit_original"):
        return

    @wraps(original)
    def step(engine: Any) -> Any:
        outputs = original(engine)
        for output in outputs:
            for one in getattr(output, "outputs", None) or ():
                said = getattr(one, "stop_reason", None)
                if isinstance(said, str) and said.startswith(_REFUSED):
                    engine.abort_request(list(engine.output_processor.request_states), internal=True)
                    raise refusal(said.removeprefix(_REFUSED))
        return outputs

    step.fp8refit_original = original  # type: ignore[attr-defined]
    LLMEngine.step = step  # type: ignore[method-assign]


def publish_in_core(core: Any, version: int) -> bool:
    """Make an engine core show the policy version in its outputs, if vLLM can (since 0.32). Returns whether it can."""
    if not hasattr(core, "set_weight_version"):
        return False
    core.set_weight_version(str(version))
    return True


def loads_plugin(name: str) -> bool:
    """Whether vLLM loads the general plugin `name`, in this process and those it starts."""
    import vllm.envs

    allowed = vllm.envs.VLLM_PLUGINS
    is_installed = any(point.name == name for point in entry_points(group=PLUGIN_GROUP))
    return is_installed and (allowed is None or name in allowed)


def says_dead(error: Exception) -> bool:
    """Whether `error` means that vLLM's engine core is gone."""
    return type(error).__name__ == "EngineDeadError"


def engine_process_group(num_ranks: int) -> ProcessGroup | None:
    """The CPU process group of this engine's ranks, in a worker. None if vLLM has no group of exactly these ranks."""
    from vllm.distributed.parallel_state import get_tp_group, get_world_group

    for group in (get_tp_group(), get_world_group()):
        if group.world_size == num_ranks:
            process_group: ProcessGroup = group.cpu_group
            return process_group
    return None


def register_transfer(name: str, worker_class: str, trainer_class: str) -> None:
    """Register our weight-transfer backend with vLLM, which imports the classes on use. May be repeated.

    Args:
        name: The backend.
        worker_class: Dotted path of the worker's class.
        trainer_class: Dotted path of the trainer's class.
    """
    from vllm.distributed.weight_transfer import factory

    for registry, path in (
        (factory.WeightTransferEngineFactory, worker_class),
        (factory.WeightTransferTrainerFactory, trainer_class),
    ):
        module, _, class_name = path.rpartition(".")
        with suppress(ValueError):  # already registered
            registry.register_engine(name, module, class_name)


def booting_worker() -> Any:
    """The worker whose model is being loaded by the calling code; None if there is none.

    vLLM creates weight-transfer engines at that point, and passes them the model but not the worker.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    frame = currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), WorkerBase):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def end_weight_update(worker: Any) -> bool:
    """Mark the worker's weight update as ended, so that the next one can begin. Returns whether one was in progress."""
    was_active = bool(getattr(worker, "_weight_update_active", False))
    if was_active:
        worker._weight_update_active = False
    return was_active


def takes_version(client: Any) -> bool:
    """Whether a weight-transfer client can pass the version of an update (since 0.32)."""
    return "weight_version" in signature(client.finish_weight_update).parameters


def call_in_time(call: Callable[[], T], timeout_s: float) -> T:
    """Call, and wait at most `timeout_s` seconds. vLLM itself waits for an engine core without a limit.

    Raises:
        TimeoutError: It takes longer. The call continues in its own thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)

    Thread(target=run, name="fp8refit-call", daemon=True).start()
    return future.result(timeout_s)


def has_dummy_weights(config: Any) -> bool:
    """Whether the engine was booted with dummy weights."""
    load_format = config.load_config.load_format
    return str(getattr(load_format, "value", load_format)) == "dummy"


def draft_method(config: Any) -> str | None:
    """The speculative method, if it has a draft model with its own weights; else None."""
    method = getattr(config.speculative_config, "method", None)
    return None if method is None or method in _DRAFTS_WITHOUT_WEIGHTS else str(method)


def linear_kernel(module: nn.Module) -> object | None:
    """The kernel object of a block-FP8 linear layer."""
    return getattr(getattr(module, "quant_method", None), "fp8_linear", None)


def wants_powers_of_two(kernel: object | None) -> bool:
    """Whether the kernel rounded the scales to powers of two at boot (DeepGEMM with UE8M0)."""
    flag = getattr(kernel, "use_deep_gemm_e8m0", None)
    if flag is None:
        flag = getattr(getattr(kernel, "fallback", None), "use_deep_gemm_e8m0", False)
    return bool(flag)


def dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of a linear layer, dequantized as vLLM does it at boot.

    This calls vLLM's own function, because its result depends on the kernel: with DeepGEMM it multiplies by an identity
    matrix, which loses the sign of zeros and, unless scales are powers of two, rounds as the kernel does.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    weight: Tensor = get_and_maybe_dequant_weights(layer, out_dtype=dtype)
    return weight


async def token_ids(engine: Any, prompts: Sequence[str]) -> list[list[int]] | None:
    """Tokenize prompts; None if the engine has no tokenizer."""
    if engine.vllm_config.model_config.skip_tokenizer_init:
        return None
    tokenizer = engine.get_tokenizer()
    if isawaitable(tokenizer):
        tokenizer = await tokenizer
    return [list(tokenizer.encode(prompt)) for prompt in prompts]
