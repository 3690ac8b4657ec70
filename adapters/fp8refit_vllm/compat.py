"""Access to vLLM's internals that differ between versions. It probes attributes (tested with 0.22 to 0.33)."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from importlib.metadata import entry_points
from inspect import currentframe, isawaitable, signature
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.driver.admission import refusal
from fp8refit.errors import EngineDirtyError
from fp8refit.live.formats import NVFP4, PER_ROW, PER_TENSOR, AmaxOver, BlockFormat, Placement, ScaleFormat
from fp8refit.live.seams import Seam, within
from fp8refit.live.slots import FP8_DTYPE
from fp8refit.live.versions import Versions
from fp8refit.tracing.asked import format_of

logger = logging.getLogger(__name__)

_MX_BLOCK = 32
_MX_PROBES = (480.0, 462.0, 450.0, 448.0, 256.0, 255.0, 1.75, 1.0, 0.0)
"""Maxima of which the rules of MXFP8 make different scales."""
MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)
"""dtypes of exponents."""
_CONNECTOR: dict[str, Any] = {"kv_connector_module_path": None, "kv_connector_extra_config": {}}
_PASS_ON = frozenset(
    {
        *("DecodeBenchConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"),
        *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    }
)
"""KV connectors that hold KV only until the engine that decodes has it, or make it up."""
_IN_MEMORY = "CPUOffloadingSpec"
_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


VERSIONS = Versions(engine="vLLM", oldest="0.22", newest="0.33")

WORKER = "vllm.v1.worker.worker_base.WorkerBase"
_ENGINE, _TRANSFER = "vllm.v1.engine", "vllm.distributed.weight_transfer"
_CORE, _CORE_CLIENT = f"{_ENGINE}.core.EngineCore", f"{_ENGINE}.core_client"
_LLM, _ASYNC_LLM = f"{_ENGINE}.llm_engine.LLMEngine", f"{_ENGINE}.async_llm.AsyncLLM"
_OUTPUTS = f"{_ENGINE}.output_processor.OutputProcessor"
_RELOAD, _REFUSED = "vllm.model_executor.model_loader.reload.layerwise", "vllm.exceptions.GracefulHTTPError"
_LORA = "vllm.lora"
_EPLB, _CONNECTORS = "vllm.distributed.eplb.eplb_state", "vllm.distributed.kv_transfer.kv_connector"
_MODELS, _EXECUTOR = "vllm.model_executor", "vllm.v1.executor.multiproc_executor.MultiprocExecutor"

NEEDED = (
    Seam(
        purpose="messages to workers and dropping caches",
        names=(
            WORKER,
            *within(_CORE, "collective_rpc(it,'method',1.0,()) reset_prefix_cache(it,True,True)"),
            *within(f"{_CORE}()", "model_executor scheduler step_fn"),
        ),
    ),
    Seam(
        purpose="refusing requests",
        names=(
            *within(_ENGINE, "EngineCoreOutput('id',[],finish_reason=0,stop_reason='') EngineCoreOutputs()"),
            f"{_ENGINE}.FinishReason.ABORT",
            *within(_LLM, "abort_request(engine,[],internal=True) step(engine)"),
            *within(_OUTPUTS, "abort_requests(processor,[],internal=True) process_outputs(processor,[])"),
            "vllm.v1.request.RequestStatus.FINISHED_ABORTED",
        ),
    ),
)
"""What the plugin reaches for, whatever it is used for."""

DROP_IN = Seam(
    purpose="the drop-in",
    names=(
        *within(_RELOAD, "initialize_layerwise_reload(network) finalize_layerwise_reload(network,config)"),
        f"{_RELOAD}.finalize_layerwise_processing(network,config)",
        f"{_MODELS}.model_loader.utils.process_weights_after_loading(network,config,device)",
        "vllm.engine.arg_utils.EngineArgs.create_engine_config(arguments)",
        "vllm.transformers_utils.config.get_config(model,trusted,revision,code)",
    ),
    without="leave out the drop-in and refit with `Refitter`",
)
TRANSFER = Seam(
    purpose="weight transfer",
    names=(
        f"{_TRANSFER}.factory.WeightTransferEngineFactory.register_engine('name','module','class')",
        f"{_TRANSFER}.factory.WeightTransferTrainerFactory.register_engine('name','module','class')",
        *within(f"{_TRANSFER}.base", "ModuleSource TrainerInitInfo TrainerWeightTransferEngine"),
        f"{_TRANSFER}.base.WeightTransferEngine(config,vllm_config,device,model)",
    ),
    without="use `Refitter`, the drop-in, or vLLM 0.26 or later",
)
ENDPOINT = Seam(
    purpose="servers",
    names=("vllm.plugins.ENDPOINT_PLUGINS_GROUP",),
    without="refit its workers with the drop-in, or use vLLM 0.26 or later",
)
SEAMS = (
    *NEEDED,
    DROP_IN,
    TRANSFER,
    ENDPOINT,
    Seam(
        purpose="an AsyncLLM",
        names=(
            *within(_ASYNC_LLM, "add_request encode errored generate wake_up is_paused(llm) resume_generation(llm)"),
            *within(_ASYNC_LLM, "abort(llm,[],internal=True) collective_rpc(llm,'method',1.0,())"),
            *within(_ASYNC_LLM, "reset_prefix_cache(llm,True,True)"),
            f"{_ASYNC_LLM}().output_processor",
            f"{_CORE_CLIENT}.AsyncMPClient.call_utility_async(client,'method')",
            f"{_CORE_CLIENT}.AsyncMPClient.pause_scheduler_async(client,mode='keep',clear_cache=False)",
            *within(_CORE, "is_scheduler_paused(it) pause_scheduler(it,'keep',False) resume_scheduler(it)"),
            f"{_CORE}Proc().input_queue",
            f"{_ENGINE}.EngineCoreRequestType.WAKEUP",
            f"{_REFUSED} | vllm.entrypoints.openai.engine.protocol.GenerationError",
            f"{_REFUSED} | {_ENGINE}.async_llm.InputStreamError",
            *within(_OUTPUTS, "add_request get_num_unfinished_requests(processor)"),
            f"{_OUTPUTS}().request_states",
        ),
        without="use an LLM",
    ),
    Seam(
        purpose="data-parallel replicas",
        names=(
            f"{_CORE_CLIENT}.AsyncMPClient._call_utility_async(client,'method',engine=b'core')",
            f"{_CORE_CLIENT}.MPClient().core_engines",
            *within("vllm.config.parallel.ParallelConfig", "world_size_across_dp _api_process_rank"),
            *within("vllm.config.parallel.ParallelConfig", "data_parallel_index data_parallel_master_ip"),
            "vllm.v1.core.sched.interface.PauseState.PAUSED_ALL",
            "vllm.v1.core.sched.scheduler.Scheduler.set_pause_state(scheduler,0)",
        ),
        without="boot replicas as engines of their own (data_parallel_size=1)",
    ),
    Seam(
        purpose="KV connectors",
        names=(
            f"{_CONNECTORS}.v1.base.KVConnectorBase_V1.reset_cache(connector)",
            f"{_CONNECTORS}.factory.KVConnectorFactory.get_connector_class(transfer)",
        ),
        without="boot without kv_transfer_config",
    ),
    Seam(
        purpose="experts that move between ranks (EPLB)",
        names=(
            *within(f"{_EPLB}.EplbState()", "model_states is_async parallel_config"),
            *within(f"{_EPLB}.EplbModelState", "physical_to_logical_map model"),
        ),
        without="boot without enable_eplb",
    ),
    Seam(
        purpose="requests that go on with their KV",
        names=(
            *within("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks(pool) BlockPool().num_gpu_blocks"),
            *within("vllm.v1.request", "Request().block_hashes Request().num_computed_tokens"),
            f"{_CORE}.reset_prefix_cache(it,False,False)",
        ),
        without='no refit with in_flight="continue"; choose "keep"',
    ),
    Seam(
        purpose="an LLM",
        names=within(_LLM, "add_request collective_rpc(it,'',1.0,()) has_unfinished_requests(it) reset_prefix_cache"),
        without="use an AsyncLLM",
    ),
    Seam(
        purpose="vision", names=within(_CORE, "reset_mm_cache(it) reset_encoder_cache(it)"), without="text is refitted"
    ),
    Seam(
        purpose="reading the live model",
        names=(
            *within("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "get_model(runner) reload_weights"),
            *within("vllm.distributed.parallel_state", "get_tp_group() get_world_group()"),
            *within(_MODELS, "layers.rotary_embedding model_loader.utils.initialize_model(config)"),
            f"{_MODELS}.layers.quantization.utils.quant_utils.get_and_maybe_dequant_weights(layer)",
            "vllm.config.set_current_vllm_config(config)",
            "vllm.utils.deep_gemm.is_deep_gemm_e8m0_used()",
        ),
        without="every refit is refused",
    ),
    Seam(
        purpose="adapters",
        names=(
            "vllm.lora.utils.parse_fine_tuned_lora_name(name,mapper)",
            *within(
                f"{_LORA}.worker_manager",
                "WorkerLoRAManager._load_adapter(it,request) WorkerLoRAManager.remove_adapter(it,1)",
            ),
            f"{_LORA}.worker_manager.WorkerLoRAManager()._adapter_manager",
            *within(f"{_LORA}.model_manager.LoRAModelManager", "activate_adapter(it,1) list_adapters(it)"),
            f"{_LORA}.model_manager.LoRAModelManager.deactivate_adapter(it,1)",
            f"{_LORA}.model_manager.LoRAModelManager._get_lora_layer_weights(it,lora,name)",
            *within(
                f"{_LORA}.model_manager.LoRAModelManager()", "lora_index_to_id modules packed_modules _last_mapping"
            ),
        ),
        without="adapters are merged",
    ),
    Seam(
        purpose="calibration", names=("vllm.forward_context.set_forward_context(m,c)",), without="KV scales are given"
    ),
    Seam(
        purpose="fewer exchanges with other processes",
        names=(
            *within("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks(pool) BlockPool().num_gpu_blocks"),
            f"{_EXECUTOR}.collective_rpc(executor,'method',1.0,(),non_block=True)",
            f"{_EXECUTOR}().rpc_broadcast_mq",
            f"{_ENGINE}.EngineCoreRequestType.UTILITY",
            *within(_CORE_CLIENT, "SyncMPClient._send_input(it,kind,()) SyncMPClient().utility_results"),
        ),
        without="refits take more exchanges",
    ),
    Seam(
        purpose="patches of single values",
        names=("vllm.model_executor.model_loader.checkpoint_weight_patch.load_checkpoint_weight_patches(network,[])",),
        without="there are none to refuse",
    ),
    Seam(purpose="versions in outputs", names=(f"{_CORE}.set_weight_version(it,'1')",), without="outputs have none"),
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


def is_first_api_server(config: Any) -> bool:
    """Whether this process is the first of those that take requests for one server."""
    return int(getattr(config.parallel_config, "_api_process_rank", 0)) == 0


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


def on_adapter_load(worker: Any, call: Callable[[Any, Any, Any], None]) -> None:
    """Call `call` with a worker's `WorkerLoRAManager`, a `LoRARequest`, and the `LoRAModel` that was loaded for it, before its
    scales are merged. What `keep_adapter` was called with is used instead of files that vLLM would load again, unless they are
    asked for: by their path, `load_inplace`, or after `remove_lora`. May be repeated.
    """
    loader = getattr(worker.model_runner, "lora_manager", None)
    if loader is None or "_load_adapter" in vars(loader):
        return
    kept: dict[int, tuple[tuple[str, str], Any]] = {}

    def load(request: Any) -> Any:
        number, files = request.lora_int_id, (request.lora_name, request.lora_path)
        if number in kept and kept[number][0] == files and not getattr(request, "load_inplace", False):
            return kept[number][1]
        lora = type(loader)._load_adapter(loader, request)
        if kept.pop(number, None) is not None:
            logger.warning("adapter %s is loaded from files: what it was refitted to is dropped", request.lora_name)
        try:
            call(loader, request, lora)
        except Exception:
            logger.debug("fp8refit will not know adapter %s", request.lora_name, exc_info=True)
        return lora

    def remove(number: int) -> Any:
        kept.pop(number, None)
        return type(loader).remove_adapter(loader, number)

    loader._load_adapter, loader.remove_adapter, loader._fp8refit_kept = load, remove, kept


def keep_adapter(worker: Any, request: Any, lora: Any) -> None:
    """Keep a `LoRAModel` that differs from the files of its `LoRARequest`. See `on_adapter_load`."""
    worker.model_runner.lora_manager._fp8refit_kept[request.lora_int_id] = (request.lora_name, request.lora_path), lora


def peft_modules(loader: Any, request: Any, lora: Any) -> dict[str, str]:
    """PEFT's names of an adapter's modules by vLLM's, as far as they differ and its files, if they are on this host, say so.

    Args:
        loader: The `WorkerLoRAManager`.
        request: The `LoRARequest` for which the adapter was loaded.
        lora: The `LoRAModel`.
    """
    mapper = getattr(loader._adapter_manager.model, "hf_to_vllm_mapper", None)
    file = Path(request.lora_path, "adapter_model.safetensors").expanduser()
    if mapper is None or not file.exists():
        return {}
    for narrowed in ("get_rename_mapper", "get_unstacked_mapper"):  # since 0.30; before
        if hasattr(mapper, narrowed):
            mapper = getattr(mapper, narrowed)()
            break
    from vllm.lora.utils import parse_fine_tuned_lora_name

    found: dict[str, str] = {}
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - it is no mapping
            with suppress(ValueError):  # of what vLLM does not load
                found[parse_fine_tuned_lora_name(name, mapper)[0]] = parse_fine_tuned_lora_name(name)[0]
    return {here: there for here, there in found.items() if here in lora.loras}


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


def names_parameters(worker: Any) -> bool:
    """Whether a weight update is in progress that names live parameters instead of a checkpoint's tensors (before 0.26)."""
    return not getattr(worker, "_is_checkpoint_format", True)


def end_weight_update(worker: Any) -> None:
    """Mark the worker's weight update as ended, so that the next one can begin. Extensions of workers have their own marks."""
    for name in [name for name in vars(worker) if name.endswith("_weight_update_active")]:
        setattr(worker, name, False)


def takes_version(client: Any) -> bool:
    """Whether a weight-transfer client can pass the version of an update (since 0.32)."""
    return "weight_version" in signature(client.finish_weight_update).parameters


def has_dummy_weights(load_config: Any) -> bool:
    """Whether a model was booted with dummy weights."""
    load_format = load_config.load_format
    return str(getattr(load_format, "value", load_format)) == "dummy"


def keeping_connectors(transfer: Any) -> list[str]:
    """KV connectors that keep KV for later requests, and that vLLM cannot make drop it.

    Args:
        transfer: vLLM's `KVTransferConfig`, if there is one.
    """
    name = getattr(transfer, "kv_connector", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    if name is None or (name in _PASS_ON and getattr(transfer, "kv_connector_module_path", None) is None):
        return []
    # What a tier of files keeps outlives a reset, and of other specs nobody knows.
    if name == "OffloadingConnector" and (
        extra.get("spec_name", _IN_MEMORY) != _IN_MEMORY or "spec_module_path" in extra
    ):
        return [name]
    if name == "MultiConnector":
        parts = extra.get("connectors", ())
        return [each for part in parts for each in keeping_connectors(SimpleNamespace(**_CONNECTOR | part))]
    base = resolve_name(f"{_CONNECTORS}.v1.base.KVConnectorBase_V1")
    try:
        kind = resolve_name(f"{_CONNECTORS}.factory.KVConnectorFactory").get_connector_class(transfer)
    except Exception:
        logger.debug("the KV connector %s cannot be looked at", name, exc_info=True)
        return [name]
    return [name] if kind.reset_cache is base.reset_cache else []


def draft_method(config: Any) -> str | None:
    """The speculative method, if it has a draft model with its own weights; else None."""
    method = getattr(config.speculative_config, "method", None)
    return None if method is None or method in _DRAFTS_WITHOUT_WEIGHTS else str(method)


def linear_kernel(module: nn.Module) -> object | None:
    """The kernel object of a block-FP8 linear layer, wherever its container has it."""
    places = ("scheme", "fp8_linear"), ("quant_method", "fp8_linear"), ("quant_method", "kernel")
    kernels = (getattr(getattr(module, holder, None), name, None) for holder, name in places)
    return next((kernel for kernel in kernels if kernel is not None), None)


def wants_powers_of_two(kernel: object | None) -> bool:
    """Whether the kernel rounded the scales to powers of two at boot (DeepGEMM with UE8M0)."""
    flag = getattr(kernel, "use_deep_gemm_e8m0", None)
    if flag is None:
        flag = getattr(getattr(kernel, "fallback", None), "use_deep_gemm_e8m0", False)
    return bool(flag)


def block_format(module: Any, *, has_powers_of_two: bool) -> BlockFormat | None:
    """The format of a layer whose kernel reads rows: with `fp8_per_block`, that of vLLM's own quantizer
    (`per_block_cast_to_fp8`).

    It divides block maxima by a Python number, which torch does on a CPU; on a GPU it multiplies by the reciprocal. With
    `fp8_per_channel`, a rank that holds a part of a row took the maximum of that part in 0.24 and 0.25.
    """
    scales = {name: each for name, each in module.named_parameters(recurse=False) if name.endswith("weight_scale")}
    name, scale = next(iter(scales.items()), ("", None))
    if scale is not None and scale.dtype is FP8_DTYPE:
        return _nvfp4_format(module)
    if scale is not None and scale.dtype in MX_SCALES:
        held = _mx_rows(scale.device) if _is_online(module) else None
        if held is None:
            return None
        is_tiled = module._parameters[name.removesuffix("_scale")].dtype is torch.int32
        placement = Placement.MARLIN if is_tiled else Placement.ROW_MAJOR
        return replace(held, placement=placement)
    if getattr(module, "weight_block_size", None) is None:
        from vllm.model_executor.layers.quantization.utils import quant_utils

        is_of_part = _is_online(module) and not hasattr(quant_utils, "amax_for_tp_weight_quant")
        held = PER_TENSOR if scale is not None and scale.ndim < 2 else PER_ROW
        return replace(held, amax_over=AmaxOver.OWN_SLICE) if is_of_part else held
    scale_format = ScaleFormat.UE8M0 if has_powers_of_two else ScaleFormat.FP32
    if _is_online(module) and not has_powers_of_two:
        is_cpu = next(module.parameters(recurse=False)).is_cpu
        scale_format = ScaleFormat.FP32_FLOORED if is_cpu else ScaleFormat.FP32_RECIPROCAL
    rows, columns = module.weight_block_size
    return BlockFormat(scale_format=scale_format, block_size=(int(rows), int(columns)))


def _nvfp4_format(module: Any) -> BlockFormat | None:
    """The format of a layer that booted from a checkpoint of ModelOpt's NVFP4."""
    weight = module._parameters["weight" if "weight" in module._parameters else "w13_weight"]
    is_tiled = weight.dtype is torch.int32
    is_modelopt = "ModelOpt" in type(module.quant_method).__name__
    if not is_modelopt or (is_tiled and module.params_dtype is not torch.bfloat16):
        return None
    return replace(NVFP4, placement=Placement.MARLIN if is_tiled else Placement.ROW_MAJOR)


def has_small_scales(module: nn.Module) -> bool:
    """Whether a layer's scales of blocks are E4M3, as those of NVFP4."""
    own = module.named_parameters(recurse=False)
    return any(each.dtype is FP8_DTYPE for name, each in own if name.endswith("weight_scale"))


def holds_nvfp4(quantization: Any) -> bool:
    """Whether checkpoints of this configuration hold NVFP4, whose packed weights no BF16 tensor fits."""
    return quantization is not None and quantization.get_name() == "modelopt_fp4"


@cache
def _mx_rows(device: torch.device) -> BlockFormat | None:
    """How vLLM's own quantizer of MXFP8 makes scales of maxima, which its versions do in several ways: it is asked. None if it
    is none of those that are known.
    """
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize

    probe = torch.zeros(len(_MX_PROBES), _MX_BLOCK, dtype=torch.bfloat16, device=device)
    probe[:, 0] = torch.tensor(_MX_PROBES, device=device)
    codes, scale = mxfp8_e4m3_quantize(probe)
    rules = (each for each in ScaleFormat if each.has_exponents)
    return format_of(probe, codes, scale, (BlockFormat(block_size=(1, _MX_BLOCK), scale_format=each) for each in rules))


def _is_online(module: Any) -> bool:
    """Whether vLLM itself quantized a layer, when it was booted."""
    return "Online" in type(getattr(module, "quant_method", None)).__name__


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
