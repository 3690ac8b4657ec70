"""The only file that reaches into a live vLLM engine. It probes attributes, not versions (seen with 0.26, 0.32, 0.33)."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
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
from fp8refit.live.slots import ScaleFormat
from fp8refit.live.tracing.rules import Why
from fp8refit.live.versions import Versions

_LEAST_FLASHINFER_SCALE = 1e-10
_LAST_OUTPUTS_S = 0.02
_LOOK_S = 5e-4
_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


T = TypeVar("T")

VERSIONS = Versions(engine="vLLM", oldest="0.26", newest="0.33")

StepOutputs: TypeAlias = tuple[dict[int, Any] | None, bool]
"""Of one step of an engine core: what it has for each of its clients, and whether the model ran."""
_REFUSED = "fp8refit: "
"""How the reason begins for which a request ended that an engine core refused."""

PLUGIN_GROUP = "vllm.general_plugins"


def is_async_client(candidate: Any) -> bool:
    """Whether `candidate` is an AsyncLLM rather than an LLM."""
    return hasattr(candidate, "pause_generation") and hasattr(candidate, "output_processor")


def num_api_servers(config: Any) -> int:
    """How many processes take the requests of one server."""
    return int(getattr(config.parallel_config, "_api_process_count", 1))


def api_keys(arguments: Any) -> list[str]:
    """Those that a server asks for one of."""
    import vllm.envs

    return [key for key in getattr(arguments, "api_key", None) or [vllm.envs.VLLM_API_KEY] if key]


def http_refusal(reason: str) -> Exception:
    """What a server answers to a request that is not admitted: 503, with the reason."""
    try:
        from vllm.exceptions import RetryableRequestError as Refused
    except ImportError:  # 0.26
        from vllm.entrypoints.openai.engine.protocol import GenerationError as Refused
    error: Exception = Refused(str(refusal(reason)))
    error.status_code = HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined]
    return error


async def pause_generation(llm: Any, mode: str) -> None:
    """What `AsyncLLM.pause_generation` does for a mode of `RefitConfig.in_flight`; caches stay.

    It sleeps at its end, for longer than a refit of most models takes, in case outputs are still on their way. Here they are
    waited for as long, and no longer than until they are there.
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
    """What calls a method of an engine core by its name, in the core's own process; None if it is in this one.

    Args:
        engine: The engine of an LLM; or an AsyncLLM, whose calls are awaited.
    """
    client = getattr(engine, "engine_core", None)
    name = "call_utility_async" if is_async_client(engine) else "call_utility"
    call: Callable[..., Any] | None = getattr(client, name, None)
    return call


def add_to_core(name: str, method: Callable[..., Any]) -> None:
    """Give vLLM's engine core a method that a client can call; in the process of the core, before it is asked."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, method)


def begin_call(core: Any, method: str, timeout_s: float, message: str) -> Callable[[], list[Any]] | None:
    """Give every worker of an engine core a message, and what waits for their answers; None if they run where the core does.

    The next call of the workers has to come after that wait.
    """
    executor = core.model_executor
    if getattr(executor, "rpc_broadcast_mq", None) is None:
        return None
    wait: Callable[[], list[Any]] = executor.collective_rpc(method, timeout_s, (message,), non_block=True).result
    return wait


def begin_in_workers(engine: Any, method: str, timeout_s: float, message: str) -> Callable[[float], list[Any]] | None:
    """Give every worker of an LLM's engine a message, and what waits for their answers for so long; None if that cannot be.

    Its own calls wait where they are made. What is sent to a core in another process is answered by a future, in any order.
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
    """Whether an engine core can be told to drop its prefix cache without a refusal: no block is in use but the null block."""
    try:
        managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        pools = [manager.block_pool for manager in managers]
        return bool(pools) and all(pool.num_gpu_blocks - pool.get_num_free_blocks() == 1 for pool in pools)
    except AttributeError:
        return False


def on_core_start(call: Callable[[Any], None]) -> None:
    """Have every engine core of this process, and of those that it starts, call this once it is made. May be repeated."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__
    if getattr(original, "fp8refit_call", None) is call:
        return

    @wraps(original)
    def init(core: Any, *args: Any, **kwargs: Any) -> None:
        original(core, *args, **kwargs)
        call(core)

    init.fp8refit_call = call  # type: ignore[attr-defined]
    EngineCore.__init__ = init  # type: ignore[method-assign]


def on_deep_sleep(worker: Any, call: Callable[[], None]) -> None:
    """Have a worker call this when it is sent to a sleep (level 2) that keeps no weights. May be repeated."""
    if "sleep" in worker.__dict__:
        return

    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            call()
        return type(worker).sleep(worker, level, *args, **kwargs)

    worker.sleep = sleep


def drop_core_caches(core: Any) -> bool:
    """Drop all that an engine core keeps of requests; running ones have theirs computed anew. Whether nothing stayed."""
    has_connector = core.vllm_config.kv_transfer_config is not None
    if not core.reset_prefix_cache(True, has_connector):
        return False
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_mm_cache()
        core.reset_encoder_cache()
    return True


def refuse_in_core(core: Any, step: Callable[[], StepOutputs], reason: str) -> StepOutputs:
    """Do a step in which every request of an engine core ends, with a reason, and nothing is computed for any."""
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
    """Have every `LLM` of this process raise what its engine core refused. May be repeated."""
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
    """Have an engine core name the policy in its outputs, where vLLM does that (since 0.32)."""
    if not hasattr(core, "set_weight_version"):
        return False
    core.set_weight_version(str(version))
    return True


def loads_plugin(name: str) -> bool:
    """Whether vLLM loads the general plugin `name` in this process and those it starts."""
    import vllm.envs

    allowed = vllm.envs.VLLM_PLUGINS
    is_installed = any(point.name == name for point in entry_points(group=PLUGIN_GROUP))
    return is_installed and (allowed is None or name in allowed)


def says_dead(error: Exception) -> bool:
    """Whether vLLM raised `error` because its engine core is gone."""
    return type(error).__name__ == "EngineDeadError"


def engine_process_group(num_ranks: int) -> ProcessGroup | None:
    """The CPU group of this engine's ranks, in a worker. None if vLLM made none that holds exactly them."""
    from vllm.distributed.parallel_state import get_tp_group, get_world_group

    for group in (get_tp_group(), get_world_group()):
        if group.world_size == num_ranks:
            process_group: ProcessGroup = group.cpu_group
            return process_group
    return None


def register_transfer(name: str, worker_class: str, trainer_class: str) -> None:
    """Make our weight-transfer engines known to vLLM, which imports them when they are asked for. May be repeated.

    Args:
        name: The backend.
        worker_class: Module and name of the worker's side.
        trainer_class: Of the trainer's.
    """
    from vllm.distributed.weight_transfer import factory

    for registry, path in (
        (factory.WeightTransferEngineFactory, worker_class),
        (factory.WeightTransferTrainerFactory, trainer_class),
    ):
        module, _, class_name = path.rpartition(".")
        with suppress(ValueError):  # it is registered
            registry.register_engine(name, module, class_name)


def booting_worker() -> Any:
    """The worker that is loading its model while this is called; None if none is.

    vLLM makes a weight-transfer engine there, and gives it the model but not the worker.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    frame = currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), WorkerBase):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def end_weight_update(worker: Any) -> None:
    """Let the next weight update begin on this worker, whether or not the last one came to its end."""
    if hasattr(worker, "_weight_update_active"):
        worker._weight_update_active = False


def takes_version(client: Any) -> bool:
    """Whether a client of vLLM's weight updates can name the version of what it brought (since 0.32)."""
    return "weight_version" in signature(client.finish_weight_update).parameters


def module_of(source: Any) -> nn.Module | None:
    """The module whose weights vLLM's `ModuleSource` gives; None for another source."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    return source._module if type(source) is ModuleSource else None


def announced(source: Any) -> list[Any]:
    """What vLLM's `WeightSource` says of every tensor: name, dtype and shape. A method until 0.32, an attribute since."""
    metadata = source.metadata
    metas: list[Any] = metadata() if callable(metadata) else metadata
    return metas


def full_pass(source: Any) -> Iterator[tuple[str, Tensor]]:
    """One pass over whole tensors: the source's own iteration until 0.32, `iter_full` since."""
    iter_full = getattr(source, "iter_full", None)
    tensors: Iterator[tuple[str, Tensor]] = iter(source) if iter_full is None else iter_full()
    return tensors


def why_not_whole(source: Any) -> str:
    """Why rank 0 of a trainer is not given every tensor whole by a source; empty if it is."""
    if not hasattr(source, "iter_full"):
        held_names = getattr(source, "held_names", lambda: None)
        return "" if held_names() is None else "this rank holds a part of the model"
    if not source.implements_iter_full():
        return "it gives pieces of tensors alone, as it does not implement iter_full"
    absent = len(source.metadata) - len(source.owned_names(0))
    return f"rank 0 does not own {absent} of its tensors" if absent else ""


def call_in_time(call: Callable[[], T], timeout_s: float) -> T:
    """Call and wait at most `timeout_s`: vLLM's own wait for an engine core has no end.

    Raises:
        TimeoutError: It takes longer, and goes on in a thread of its own.
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
    """Whether an engine was booted without a checkpoint's values."""
    load_format = config.load_config.load_format
    return str(getattr(load_format, "value", load_format)) == "dummy"


def draft_method(config: Any) -> str | None:
    """How an engine drafts tokens with weights of their own, or None if it drafts without or not at all."""
    method = getattr(config.speculative_config, "method", None)
    return None if method is None or method in _DRAFTS_WITHOUT_WEIGHTS else str(method)


def linear_kernel(module: nn.Module) -> object | None:
    """The object that multiplies by a block-FP8 module's weight."""
    return getattr(getattr(module, "quant_method", None), "fp8_linear", None)


def wants_powers_of_two(kernel: object | None) -> bool:
    """Whether the kernel rounded its scales to powers of two when the engine booted (DeepGEMM with UE8M0)."""
    flag = getattr(kernel, "use_deep_gemm_e8m0", None)
    if flag is None:
        flag = getattr(getattr(kernel, "fallback", None), "use_deep_gemm_e8m0", False)
    return bool(flag)


def dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of a linear layer as vLLM itself dequantizes it when it boots.

    What vLLM does depends on its kernels: where DeepGEMM is supported it multiplies by an identity matrix, which loses the
    sign of zeros and, with scales that are no powers of two, rounds as the kernel does. So the same function is asked.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    weight: Tensor = get_and_maybe_dequant_weights(layer, out_dtype=dtype)
    return weight


def experts_backend(module: nn.Module) -> str:
    """The name of the product over a layer of experts."""
    method = getattr(module, "quant_method", None)
    return str(getattr(getattr(method, "fp8_backend", None), "name", type(method).__name__))


def deep_gemm_scale_format() -> ScaleFormat:
    """What DeepGEMM's experts are rounded to when an engine boots."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return ScaleFormat.UE8M0 if is_deep_gemm_e8m0_used() else ScaleFormat.FP32


def why_experts_move(module: Any) -> Why:
    """What is against taking it that a layer's experts stay in the places that they were loaded into."""
    config = module.moe_config
    if config.moe_parallel_config.enable_eplb:
        return "its experts move between ranks (EPLB)", "Boot without enable_eplb"
    if config.num_experts != config.num_logical_experts:
        reason = f"holds {config.num_experts} experts for {config.num_logical_experts} of the checkpoint"
        return reason, "Boot without redundant experts, and with shared experts apart"
    return None


def sync_experts(module: Any) -> None:
    """Bring up to date what vLLM's product reads of a layer of experts, after its parameters were written.

    Reads scales through an object that vLLM's own reload leaves pointing at other tensors. FlashInfer's boot keeps scales from
    being smaller than 1e-10.
    """
    if experts_backend(module) == "FLASHINFER_CUTLASS":
        for scale in (module.w13_weight_scale_inv, module.w2_weight_scale_inv):
            scale.data.clamp_(min=_LEAST_FLASHINFER_SCALE)
    config = module.quant_method.moe_quant_config
    for scale, live in ((config.w1_scale, module.w13_weight_scale_inv), (config.w2_scale, module.w2_weight_scale_inv)):
        if scale is not None and scale.data_ptr() != live.data_ptr():
            scale.copy_(live)


def kv_scale_buffers(module: nn.Module) -> list[Tensor]:
    """The scale buffers of an attention layer."""
    names = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")
    return [module._buffers[name] for name in names if module._buffers.get(name) is not None]  # type: ignore[misc]


def reset_kv_scales(model: nn.Module) -> None:
    """Set every copy of every KV-cache scale to 1.0, as a boot from a checkpoint without KV scales does."""
    for module in model.modules():
        buffers = kv_scale_buffers(module)
        if not buffers or not hasattr(module, "_k_scale_float"):
            continue
        for buffer in buffers:
            buffer.fill_(1.0)
        for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float", "_prob_scale_float"):
            if hasattr(module, name):
                setattr(module, name, 1.0)
        for name in ("_k_scale_cpu", "_v_scale_cpu"):
            if hasattr(module, name):
                getattr(module, name).fill_(1.0)


def write_kv_scale_copies(module: Any, kind: str, value: float) -> None:
    """Bring up to date what an attention layer keeps of a scale beside its buffer: a number, a host tensor, products of it."""
    setattr(module, f"_{kind}_scale_float", value)
    if getattr(module, "calculate_kv_scales", False):
        module.calculate_kv_scales = False  # or the next forward would compute scales of its own (0.26)
    on_host = getattr(module, f"_{kind}_scale_cpu", None)
    if on_host is not None:
        on_host.fill_(value)
    for product in ("bmm1_scale", "bmm2_scale"):  # FlashInfer computes them when they are None
        if getattr(module.impl, product, None) is not None:
            setattr(module.impl, product, None)


def keep_kv_scales_through_wake(runner: Any, layers: Sequence[Any]) -> None:
    """Have a runner that sets scales to 1.0 when its KV cache wakes up (0.26, its first model runner) write them again."""
    reset = getattr(type(runner), "init_fp8_kv_scales", None)
    if reset is None:
        return

    def reset_and_restore() -> None:
        reset(runner)
        for layer in layers:
            layer._k_scale.fill_(layer._k_scale_float)
            layer._v_scale.fill_(layer._v_scale_float)

    runner.__dict__["init_fp8_kv_scales"] = reset_and_restore


def has_full_graphs(config: Any) -> bool:
    """Whether attention is captured in CUDA graphs; in piecewise ones it is not."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return mode is not None and bool(mode.has_full_cudagraphs())


def is_multimodal(config: Any) -> bool:
    """Whether a model takes more than text, or has positions of more than one dimension."""
    return bool(config.model_config.is_multimodal_model or config.model_config.uses_mrope)


@contextmanager
def eager_forward(config: Any, num_tokens: int) -> Iterator[None]:
    """Let the model be called directly: not compiled, no graphs, no attention metadata."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=num_tokens, skip_compiled=True):
        yield


async def token_ids(engine: Any, prompts: Sequence[str]) -> list[list[int]] | None:
    """What an engine makes of prompts, or None if it has no tokenizer."""
    if engine.vllm_config.model_config.skip_tokenizer_init:
        return None
    tokenizer = engine.get_tokenizer()
    if isawaitable(tokenizer):
        tokenizer = await tokenizer
    return [list(tokenizer.encode(prompt)) for prompt in prompts]
