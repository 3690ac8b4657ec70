"""Access to vLLM's internals that differ between versions. It probes attributes (tested with 0.22 to 0.33)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import entry_points
from inspect import currentframe, isawaitable, signature
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.driver.admission import refusal
from fp8refit.errors import EngineDirtyError
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.seams import Seam
from fp8refit.live.versions import Versions

_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


VERSIONS = Versions(engine="vLLM", oldest="0.22", newest="0.33")

WORKER = "vllm.v1.worker.worker_base.WorkerBase"
_CORE = "vllm.v1.engine.core.EngineCore"
_LLM, _ASYNC_LLM, _OUTPUTS = (
    "vllm.v1.engine.llm_engine.LLMEngine",
    "vllm.v1.engine.async_llm.AsyncLLM",
    "vllm.v1.engine.output_processor.OutputProcessor",
)
_TRANSFER, _RELOAD = "vllm.distributed.weight_transfer", "vllm.model_executor.model_loader.reload.layerwise"

NEEDED = (
    Seam(
        purpose="messages to workers",
        names=(WORKER, f"{_CORE}.collective_rpc(core, 'method', 1.0, ())", f"{_CORE}().model_executor"),
    ),
    Seam(
        purpose="refusing requests",
        names=(
            f"{_CORE}().step_fn",
            f"{_CORE}().scheduler",
            "vllm.v1.engine.EngineCoreOutput('id', [], finish_reason=0, stop_reason='')",
            "vllm.v1.engine.EngineCoreOutputs()",
            "vllm.v1.engine.FinishReason.ABORT",
            f"{_LLM}.abort_request(engine, [], internal=True)",
            f"{_LLM}.step(engine)",
            f"{_OUTPUTS}.abort_requests(processor, [], internal=True)",
            f"{_OUTPUTS}.process_outputs(processor, [])",
            "vllm.v1.request.RequestStatus.FINISHED_ABORTED",
        ),
    ),
    Seam(purpose="dropping caches", names=(f"{_CORE}.reset_prefix_cache(core, True, True)",)),
)
"""What the plugin reaches for, whatever it is used for."""

DROP_IN = Seam(
    purpose="the drop-in",
    names=(
        f"{_RELOAD}.initialize_layerwise_reload(network)",
        f"{_RELOAD}.finalize_layerwise_reload(network)",
        f"{_RELOAD}.finalize_layerwise_processing(network)",
        "vllm.model_executor.model_loader.utils.process_weights_after_loading(network)",
        "vllm.engine.arg_utils.EngineArgs.create_engine_config(arguments)",
        "vllm.transformers_utils.config.get_config(model, trusted, revision, code)",
    ),
    without="leave out the drop-in and refit with `Refitter`",
)
TRANSFER = Seam(
    purpose="weight transfer",
    names=(
        f"{_TRANSFER}.factory.WeightTransferEngineFactory.register_engine('name', 'module', 'class')",
        f"{_TRANSFER}.factory.WeightTransferTrainerFactory.register_engine('name', 'module', 'class')",
        f"{_TRANSFER}.base.ModuleSource",
        f"{_TRANSFER}.base.TrainerInitInfo",
        f"{_TRANSFER}.base.TrainerWeightTransferEngine",
        f"{_TRANSFER}.base.WeightTransferEngine(config, vllm_config, device, model)",
    ),
    without="use `Refitter`, the drop-in, or vLLM 0.26 or later",
)
ENDPOINT = Seam(
    purpose="servers",
    names=("vllm.plugins.ENDPOINT_PLUGINS_GROUP",),
    without="refit its workers with the drop-in, or use vLLM 0.26 or later",
)
ASYNC = Seam(
    purpose="an AsyncLLM",
    names=(
        f"{_ASYNC_LLM}.abort(llm, [], internal=True)",
        f"{_ASYNC_LLM}.add_request(llm)",
        f"{_ASYNC_LLM}.collective_rpc(llm, 'method', 1.0, ())",
        f"{_ASYNC_LLM}.encode(llm)",
        f"{_ASYNC_LLM}.errored",
        f"{_ASYNC_LLM}.generate(llm)",
        f"{_ASYNC_LLM}.is_paused(llm)",
        f"{_ASYNC_LLM}.reset_prefix_cache(llm, True, True)",
        f"{_ASYNC_LLM}.resume_generation(llm)",
        f"{_ASYNC_LLM}.wake_up(llm)",
        f"{_ASYNC_LLM}().output_processor",
        "vllm.v1.engine.core_client.AsyncMPClient.call_utility_async(client, 'method')",
        "vllm.v1.engine.core_client.AsyncMPClient.pause_scheduler_async(client, mode='keep', clear_cache=False)",
        "vllm.exceptions.GracefulHTTPError | vllm.entrypoints.openai.engine.protocol.GenerationError",
        "vllm.exceptions.GracefulHTTPError | vllm.v1.engine.async_llm.InputStreamError",
        f"{_OUTPUTS}.add_request(processor)",
        f"{_OUTPUTS}.get_num_unfinished_requests(processor)",
        f"{_OUTPUTS}().request_states",
    ),
    without="use an LLM",
)
SEAMS = (
    *NEEDED,
    DROP_IN,
    TRANSFER,
    ENDPOINT,
    ASYNC,
    Seam(
        purpose="reading the live model",
        names=(
            "vllm.config.set_current_vllm_config(config)",
            "vllm.distributed.parallel_state.get_tp_group()",
            "vllm.distributed.parallel_state.get_world_group()",
            "vllm.model_executor.layers.rotary_embedding",
            "vllm.model_executor.model_loader.utils.initialize_model(config)",
            "vllm.utils.deep_gemm.is_deep_gemm_e8m0_used()",
        ),
        without="every refit is refused",
    ),
    Seam(
        purpose="latent attention",
        names=("vllm.model_executor.layers.quantization.utils.quant_utils.get_and_maybe_dequant_weights(layer)",),
        without="models that use it are refused",
    ),
    Seam(
        purpose="calibration",
        names=("vllm.forward_context.set_forward_context(metadata, config)",),
        without="KV scales are given, not measured",
    ),
    Seam(
        purpose="an LLM whose engine core is in another process",
        names=(
            "vllm.v1.engine.EngineCoreRequestType.UTILITY",
            "vllm.v1.engine.core_client.SyncMPClient._send_input(client, kind, arguments)",
            "vllm.v1.engine.core_client.SyncMPClient().utility_results",
        ),
        without="refits take more exchanges",
    ),
    Seam(
        purpose="patches of single values",
        names=("vllm.model_executor.model_loader.checkpoint_weight_patch.load_checkpoint_weight_patches(network, [])",),
        without="there are none to refuse",
    ),
    Seam(
        purpose="the version of a policy in outputs",
        names=(f"{_CORE}.set_weight_version(core, '1')",),
        without="outputs do not say it",
    ),
)
"""Every place in vLLM that this adapter reaches for."""

PLUGIN_GROUP = "vllm.general_plugins"
BACKEND = "fp8refit"
"""Our backend name in `weight_transfer_config`."""


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
    """The `EngineDirtyError` for a request to an `AsyncLLM`. A server answers 503, with the reason."""
    try:
        from vllm.exceptions import GracefulHTTPError as Refused
    except ImportError:  # before 0.29
        from vllm.entrypoints.openai.engine.protocol import GenerationError as Refused
    methods = {"__init__": lambda *_: None, "__reduce__": lambda error: (EngineDirtyError, error.args)}
    error: Exception = type("EngineDirtyError", (EngineDirtyError, Refused), methods)(str(refusal(reason)))
    error.http_status = error.status_code = HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined]
    return error


def late_refusal(reason: str) -> Exception:
    """The same for a request under way: what `AsyncLLM.generate` raises as it is."""
    import vllm.exceptions

    error = http_refusal(reason)
    if hasattr(vllm.exceptions, "GracefulHTTPError"):
        return error
    from vllm.v1.engine.async_llm import InputStreamError

    late: Exception = InputStreamError(error)
    return late


def on_deep_sleep(worker: Any, call: Callable[[], None]) -> None:
    """Call `call` when a worker goes to a sleep level that discards the weights (2). May be repeated."""
    if "sleep" in worker.__dict__:
        return

    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            call()
        return type(worker).sleep(worker, level, *args, **kwargs)

    worker.sleep = sleep


def loads_plugin(name: str) -> bool:
    """Whether vLLM loads the general plugin `name`, in this process and those it starts."""
    import vllm.envs

    allowed = vllm.envs.VLLM_PLUGINS
    is_installed = any(point.name == name for point in entry_points(group=PLUGIN_GROUP))
    return is_installed and (allowed is None or name in allowed)


def engine_process_group(num_ranks: int) -> ProcessGroup | None:
    """The CPU process group of this engine's ranks, in a worker. None if vLLM has no group of exactly these ranks."""
    from vllm.distributed.parallel_state import get_tp_group, get_world_group

    for group in (get_tp_group(), get_world_group()):
        if group.world_size == num_ranks:
            process_group: ProcessGroup = group.cpu_group
            return process_group
    return None


def register_transfer() -> None:
    """Register our weight-transfer backend with vLLM, which imports the classes on use. May be repeated.

    A vLLM that lacks a part of what they need gets the rest, which then says so.
    """
    classes = {
        "WeightTransferEngineFactory": ("fp8refit_vllm.transfer", "RefitTransferEngine"),
        "WeightTransferTrainerFactory": ("fp8refit_vllm.trainer", "RefitTrainer"),
    }
    for name, (module, ours) in classes.items():
        with suppress(AttributeError, ImportError, ValueError):  # ValueError: already registered
            resolve_name(f"{_TRANSFER}.factory.{name}").register_engine(BACKEND, module, ours)


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


def is_updating(worker: Any) -> bool:
    """Whether a weight update through vLLM's API is in progress."""
    return bool(getattr(worker, "_weight_update_active", False))


def end_weight_update(worker: Any) -> None:
    """Mark the worker's weight update as ended, so that the next one can begin."""
    if is_updating(worker):
        worker._weight_update_active = False


def takes_version(client: Any) -> bool:
    """Whether a weight-transfer client can pass the version of an update (since 0.32)."""
    return "weight_version" in signature(client.finish_weight_update).parameters


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


def block_format(module: Any, *, has_powers_of_two: bool) -> BlockFormat:
    """The format of a layer whose kernel reads rows: with `fp8_per_block`, that of vLLM's own quantizer
    (`per_block_cast_to_fp8`).

    It divides block maxima by a Python number, which torch does on a CPU; on a GPU it multiplies by the reciprocal.
    """
    scale_format = ScaleFormat.UE8M0 if has_powers_of_two else ScaleFormat.FP32
    is_online = type(getattr(module, "quant_method", None)).__name__.startswith("Fp8PerBlockOnline")
    if is_online and not has_powers_of_two:
        is_cpu = next(module.parameters(recurse=False)).is_cpu
        scale_format = ScaleFormat.FP32_FLOORED if is_cpu else ScaleFormat.FP32_RECIPROCAL
    rows, columns = module.weight_block_size
    return BlockFormat(scale_format=scale_format, block_size=(int(rows), int(columns)))


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
