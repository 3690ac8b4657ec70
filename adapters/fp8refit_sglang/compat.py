"""Access to SGLang's internals that differ between versions. It probes attributes (tested with 0.5.12 to 0.5.23).

Messages travel in SGLang's own request for weights by IPC handles: it reaches the scheduler of every rank, its handles
are free text, and it needs no update session.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from fp8refit.driver.admission import refusal
from fp8refit.live.formats import FLOAT_SCALES, WHOLE, BlockFormat
from fp8refit.live.seams import Seam, found, within
from fp8refit.live.versions import Versions
from fp8refit.tracing.asked import format_of

VERSIONS = Versions(engine="SGLang", oldest="0.5.12", newest="0.5.23")

_MANAGERS, _HOOKS = "sglang.srt.managers", "sglang.srt.plugins.hook_registry"
_UPDATERS = (
    f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    f"{_MANAGERS}.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin",
)
"""The class whose methods handle weight updates in a scheduler; in older versions a base of the scheduler."""


def in_updater(name: str) -> str:
    """A method of that class, as a hook's target or a seam."""
    return " | ".join(f"{updater}.{name}" for updater in _UPDATERS)


IN_SCHEDULER = in_updater("update_weights_from_ipc")
"""Runs in a scheduler for a request for weights by IPC handles."""

IN_SERVER = f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_ipc"
"""Runs in a server's process before that."""

IN_START = f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin.init_communicators"
"""Runs once in the process that takes requests, before it serves any."""

IN_ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention.__init__"
"""Creates an attention layer."""

IN_ADMISSION = f"{_MANAGERS}.scheduler.Scheduler.process_input_requests"
"""Runs in a scheduler with the requests that arrived since its last step."""

IN_SLEEP = in_updater("release_memory_occupation")
"""Runs in a scheduler to release memory."""

_LORA = "sglang.srt.lora"
IN_LORA = f"{_LORA}.lora.LoRAAdapter._normalize_weights"
"""Runs in a scheduler for an adapter that is loaded: joins matrices of modules that are one for SGLang."""

_ARGUMENTS = ("sglang.srt.runtime_context.get_server_args", "sglang.srt.server_args.get_global_server_args")
_RANKS = "sglang.srt.runtime_context.get_parallel"
_IO, _TOKENIZER = f"{_MANAGERS}.io_struct", f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_LOADER, _EXECUTOR = "sglang.srt.model_loader.loader", "sglang.srt.model_executor"
_MOE = "sglang.srt.layers.moe.utils"
_BUILD_SCOPE = "draft_model_build_scope"
_DRAFT_SCOPES = ("speculative_moe_backend_context", "speculative_moe_a2a_backend_context", _BUILD_SCOPE)

NEEDED = (
    Seam(
        purpose="hooks",
        names=within(_HOOKS, "HookRegistry._hooks HookRegistry._patched HookRegistry.register('',1,2) HookType.AROUND"),
    ),
    Seam(
        purpose="messages to ranks",
        names=(
            *(IN_SCHEDULER, IN_SERVER, IN_START),
            f"{_IO}.UpdateWeightsFromIPCReqInput(zmq_handles=1,flush_cache=False)",
            f"{_IO}.UpdateWeightsFromIPCReqOutput(success=True,message='')",
        ),
    ),
    Seam(purpose="refusing requests and noticing sleep", names=(IN_ADMISSION, IN_SLEEP)),
    Seam(
        purpose="KV scales",
        names=(
            IN_ATTENTION,
            "sglang.srt.layers.quantization.kv_cache.BaseKVCacheMethod.create_weights(method,layer)",
            " | ".join(f"{name}()" for name in _ARGUMENTS),
        ),
    ),
)
"""What the plugin reaches for, whatever it is used for."""

DROP_IN = Seam(
    purpose="the drop-in",
    names=(
        *(in_updater(f"update_weights_from_{source}") for source in ("disk", "distributed", "tensor")),
        f"{_LOADER}.DefaultModelLoader.load_weights_and_postprocess",
        f"{_IO}.FlushCacheReqInput",
    ),
    without="leave out the drop-in and refit with `Refitter`",
)
ADAPTERS = Seam(
    purpose="adapters",
    names=(
        f"{IN_LORA}(it)",
        *within(f"{_LORA}.lora.LoRALayer()", "weights"),
        *within(f"{_LORA}.lora.LoRAAdapter()", "embedding_layers layers scaling"),
        f"{_LORA}.lora_manager.LoRAManager.fetch_new_loras(it,uids)",
        *within(
            f"{_LORA}.lora_manager.LoRAManager()",
            "embed_tokens_module lm_head_module lora_modules lora_refs loras memory_pool",
        ),
        f"{_LORA}.mem_pool.EMPTY_SLOT",
        f"{_LORA}.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer(it,uid,0,lora,modules,embedding,head)",
        *within(
            f"{_LORA}.mem_pool.LoRAMemoryPool()",
            "A_buffer B_buffer buffer_id_to_uid eviction_policy pin_memory_available uid_to_buffer_id",
        ),
    ),
    without="adapters are merged",
)
SEAMS = (
    *NEEDED,
    DROP_IN,
    ADAPTERS,
    Seam(purpose="updates that say when", names=(f"{_IO}.BeginWeightUpdateReqOutput",), without="their tensors say it"),
    Seam(
        purpose="pausing requests",
        names=(
            f"{_IO}.PauseGenerationReqInput(mode='retract')",
            f"{_IO}.ContinueGenerationReqInput(torch_empty_cache=False)",
            *within(_TOKENIZER, "pause_generation(it,request) continue_generation(it,request)"),
            *within(_TOKENIZER, "_validate_and_resolve_lora(it,request) abort_request(it,abort_all=True)"),
            *within(f"{_TOKENIZER}()", "is_pause_cond model_update_lock rid_to_state"),
            *within(f"{_MANAGERS}.scheduler.Scheduler", "flush_cache(it,empty_cache=False) abort_request(it,request)"),
            f"{_MANAGERS}.scheduler.Scheduler.pause_generation(it,request)",
        ),
        without="every refit fails before anything is written",
    ),
    Seam(
        purpose="data-parallel replicas",
        names=(f"{_MANAGERS}.scheduler.Scheduler().ps | {_RANKS}()",),
        without="boot replicas as engines of their own (dp_size=1)",
    ),
    Seam(
        purpose="stages of a pipeline",
        names=within(f"{_MANAGERS}.scheduler.Scheduler()", "world_group pp_group"),
        without="boot without pp_size",
    ),
    Seam(
        purpose="requests that go on with their KV",
        names=(
            f"{_IO}.PauseGenerationReqInput(mode='in_place')",
            f"{_IO}.TokenizedGenerateReqInput.extra_key",
            f"{_MANAGERS}.schedule_batch.Req().extra_key",
            f"{_MANAGERS}.scheduler.Scheduler()._engine_paused",
        ),
        without='no refit with in_flight="continue"; choose "keep"',
    ),
    Seam(
        purpose="reading the live model",
        names=(
            "sglang.srt.layers.rotary_embedding.factory._ROPE_DICT",
            *within(_LOADER, "_get_quantization_config(config,load) _initialize_model(config,load,quantization)"),
        ),
        without="every refit is refused",
    ),
    Seam(
        purpose="drafts",
        names=(
            f"{_MANAGERS}.scheduler.Scheduler().draft_worker",
            *within(_MOE, "speculative_moe_backend_context() speculative_moe_a2a_backend_context()"),
        ),
        without="a draft is traced as its target is built",
    ),
    Seam(
        purpose="building drafts",
        names=within(_MOE, f"{_BUILD_SCOPE}()"),
        without="a draft is traced with the MoE settings of its target",
    ),
    Seam(
        purpose="forward contexts, and graphs by kind",
        names=within(
            _EXECUTOR, "forward_context.forward_context(it) cuda_graph_config.check_cuda_graph_backend('','')"
        ),
        without="a forward needs no context, and the engine's arguments say whether there are graphs",
    ),
)
"""Every place in SGLang that this adapter reaches for."""

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_HANDLE, _PLACE = "fp8refit", "fp8refit.place"
_ORDER = "fp8refit.order"


def register_hook(target: str, hook: Callable[..., Any]) -> None:
    """Make SGLang call `hook(original, ...)` instead of `target`, which may have alternatives."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(found(target), hook, HookType.AROUND)


def is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether SGLang has replaced `target` with `hook`, in this process and therefore in those it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    name = found(target)
    is_registered = any(entry[1] is hook for entry in HookRegistry._hooks.get(name, ()))
    return is_registered and name in HookRegistry._patched


def scheduler_of(manager: Any) -> Any:
    """The scheduler of what handles weight updates in it, which may be the scheduler itself."""
    return getattr(manager, "scheduler", manager)


def updater_of(scheduler: Any) -> Any:
    """What handles weight updates in a scheduler."""
    return getattr(scheduler, "weight_updater", scheduler)


OF_STAGES = (
    "a stage of a pipeline cannot be updated from its scheduler: the next one does not hear of it meanwhile; refit the engine "
    "or the server with fp8refit.Refitter"
)


def has_dp_attention(arguments: Any) -> bool:
    """Whether replicas of attention step together, under either of SGLang's two options."""
    return bool(getattr(arguments, "enable_dp_attention", False)) or (getattr(arguments, "attn_dp_size", None) or 1) > 1


def num_replicas(arguments: Any) -> int:
    """How many replicas an engine with these arguments has, each with a process group of its own."""
    return 1 if has_dp_attention(arguments) else int(getattr(arguments, "dp_size", 1))


def num_stages(arguments: Any) -> int:
    """How many stages the pipeline of each replica has."""
    return int(getattr(arguments, "pp_size", 1))


def replica_of(scheduler: Any) -> int:
    """The number of a scheduler's replica."""
    if num_replicas(scheduler.server_args) == 1:
        return 0
    ranks = getattr(scheduler, "ps", None)
    return int((ranks if ranks is not None else resolve_name(_RANKS)()).dp_rank)


def dead_processes() -> dict[int, str]:
    """The names of SGLang's processes that ended unnoticed, by PID: what starts replicas does not look after them."""
    import psutil

    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE and child.name().startswith("sglang::"):
                found[child.pid] = child.name()
    return found


def call_for(address: str, place: str | None = None) -> Any:
    """The request that makes every rank connect to `address`, and meet the others at `place` if there is one."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

    places = {} if place is None else {_PLACE: place}
    return UpdateWeightsFromIPCReqInput(zmq_handles={_HANDLE: address, **places}, flush_cache=False)


def is_call(request: Any) -> bool:
    """Whether a request is ours."""
    return _HANDLE in request.zmq_handles


def address_in(call: Any) -> str:
    """The address to connect to."""
    address: str = call.zmq_handles[_HANDLE]
    return address


def place_in(call: Any) -> str | None:
    """Where to meet the ranks of other replicas."""
    place: str | None = call.zmq_handles.get(_PLACE)
    return place


def handles_for(order: str) -> dict[str, str]:
    """The handles that older drivers posted to a server to send an order."""
    return {_ORDER: order}


def has_order(request: Any) -> bool:
    """Whether a request comes from such an older driver."""
    return _ORDER in request.zmq_handles


def api_keys(manager: Any) -> list[str]:
    """The API keys that a server accepts for weight updates: the admin key if there is one."""
    arguments = manager.server_args
    key = getattr(arguments, "admin_api_key", None) or getattr(arguments, "api_key", None)
    return [key] if key else []


def app_to_start() -> Any | None:
    """The FastAPI app of this process, if it has not started serving.

    None in a user's process with an engine, and in one of several HTTP workers, whose app already runs.
    """
    app = getattr(sys.modules.get(_HTTP_SERVER), "app", None)
    return app if app is not None and app.middleware_stack is None else None


def http_refusal(reason: str, request: Any) -> Exception:
    """The error that makes a server answer 503, with the reason."""
    from fastapi import HTTPException

    kind: Any = HTTPException
    if getattr(request, "stream", False):
        # By then the stream of `/generate` has begun to answer, and it only reports ValueErrors.
        kind = type("StreamRefusal", (HTTPException, ValueError), {})
    error: Exception = kind(status_code=503, detail=str(refusal(reason)))
    return error


def loses_weights(request: Any, scheduler: Any) -> bool:
    """Whether a request to release memory discards the weights."""
    tags = getattr(request, "tags", None)
    is_kept = getattr(scheduler.server_args, "enable_weights_cpu_backup", False)
    return (not tags or "weights" in tags) and not is_kept


def refuse_requests(scheduler: Any, requests: Sequence[Any], reason: str) -> list[Any]:
    """Answer 503 to the requests that need computation, abort those that wait or would go on, and return the others."""
    from sglang.srt.managers.io_struct import (
        AbortReq,
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
        ContinueGenerationReqInput,
        PauseGenerationReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )

    said = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": str(refusal(reason))}
    others = []
    for request in requests:
        if isinstance(request, (BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput)):
            refused = list(request)
        elif isinstance(request, (TokenizedGenerateReqInput, TokenizedEmbeddingReqInput)):
            refused = [request]
        else:
            others.append(request)
            continue
        for one in refused:
            send_to_manager(scheduler, AbortReq(finished_reason=said, rid=one.rid), one)
    if any(isinstance(request, ContinueGenerationReqInput) for request in others):
        # What was paused in place would run; in the queue it is aborted.
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    if scheduler.waiting_queue:
        scheduler.abort_request(AbortReq(abort_all=True, finished_reason=said))
    return others


def send_to_manager(scheduler: Any, answer: Any, request: Any) -> None:
    """Answer a request to a scheduler; only the first rank of each replica does."""
    getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer.send_output(answer, request)


def receipt(*, success: bool, message: str) -> Any:
    """A scheduler's answer to our request."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqOutput

    return UpdateWeightsFromIPCReqOutput(success=success, message=message)


def weights_receipt(method: str, message: str) -> Any:
    """A scheduler's answer to a failed weight update, for the method that took it."""
    from sglang.srt.managers import io_struct

    answers = {
        "begin_weight_update": "BeginWeightUpdateReqOutput",
        "end_weight_update": "EndWeightUpdateReqOutput",
        "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
        "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
        "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    }
    more = {"num_paused_requests": 0} if method == "update_weights_from_disk" else {}
    return getattr(io_struct, answers[method])(success=False, message=message, **more)


def has_sessions() -> bool:
    """Whether weight updates have a begin and an end (0.5.23 has, 0.5.15 has not)."""
    from sglang.srt.managers import io_struct

    return hasattr(io_struct, "BeginWeightUpdateReqOutput")


def close_session(manager: Any) -> None:
    """Mark the weight update as ended, so that the next one can begin."""
    if hasattr(manager, "_session"):
        manager._session = None


def why_not_refitted(arguments: Any) -> str | None:
    """Why an engine with these arguments cannot be refitted, with the remedy; None if it can."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(arguments, name, default)

    if value("enable_dp_attention_local_control_broadcast") and has_dp_attention(arguments):
        return (
            "its ranks step together, but hear of a refit in different steps; leave out "
            "enable_dp_attention_local_control_broadcast"
        )
    if value("nnodes", 1) > 1:
        return "it spans several hosts; start one engine per host"
    if value("tokenizer_worker_num", 1) > 1:
        return (
            "requests reach it past the process that would refit it, through its others; leave out tokenizer_worker_num"
        )
    if value("disaggregation_mode", "null") != "null":
        return "prefill and decode are disaggregated, and the other side keeps the old policy; leave out disaggregation_mode"
    if value("hicache_storage_backend"):
        return "it would read KV of the old policy back from storage; leave out hicache_storage_backend"
    if value("enable_lmcache") or value("enable_flexkv"):
        return "it would keep KV of the old policy outside its radix cache; leave out enable_lmcache and enable_flexkv"
    if value("enable_eplb") or value("elastic_ep_backend"):
        return "it moves experts between ranks while it runs; leave out enable_eplb and elastic_ep_backend"
    if value("enable_cp_decode_attn_tp"):
        return "it decodes with copies of slices of the weights; leave out enable_cp_decode_attn_tp"
    if value("weight_cache_mode", "off") not in (None, "off"):
        return 'its weights are shared with other engines; set weight_cache_mode="off"'
    return None


def is_cache_fp8() -> bool:
    """Whether the engine being built in this process is to have an FP8 (E4M3) KV cache."""
    get_server_args = resolve_name(found(" | ".join(_ARGUMENTS)))
    return bool(get_server_args().kv_cache_dtype == "fp8_e4m3")


def has_graphs(kind: str, backend: str, arguments: Any) -> bool:
    """Whether CUDA graphs of `kind`, decode or prefill, are of `backend`."""
    try:
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
    except ImportError:  # then those of prefill leave attention to Python
        return kind == "decode" and backend == "disabled" and bool(arguments.disable_cuda_graph)
    return bool(check_cuda_graph_backend(kind, backend))


def recapture(runner: Any) -> None:
    """Recapture decode graphs, as SGLang's own updates do with `recapture_cuda_graph`."""
    updater = getattr(runner, "weight_updater", None)
    if updater is not None:
        updater.recapture_cuda_graph()
    elif hasattr(runner, "init_decode_cuda_graph"):
        runner.init_decode_cuda_graph()
    else:
        runner.init_device_graphs()


def forward_scope(runner: Any) -> AbstractContextManager[None]:
    """The context in which SGLang runs every forward of its model."""
    try:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    except ImportError:
        return nullcontext()
    scope: AbstractContextManager[None] = forward_context(ForwardContext(attn_backend=runner.attn_backend))
    return scope


def empty_slot() -> Any:
    """What SGLang has in a slot for adapters that none has."""
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    return EMPTY_SLOT


def draft_runner_of(scheduler: Any) -> Any:
    """The `ModelRunner` of the draft; None if there are several, or none."""
    worker = getattr(getattr(scheduler, "draft_worker", None), "draft_worker", None)
    is_single = not hasattr(worker, "draft_runner_list")  # of drafts with one model per step
    return getattr(worker, "draft_runner", None) if is_single else None


@contextmanager
def draft_scope(*, is_plain: bool) -> Iterator[None]:
    """The context in which SGLang builds a draft, which may have another MoE backend than the target."""
    scopes = import_module(_MOE)
    with ExitStack() as entered:
        for name in (_BUILD_SCOPE,) if is_plain else _DRAFT_SCOPES:
            if hasattr(scopes, name):
                entered.enter_context(getattr(scopes, name)())
        yield


def make_kv_scales(layer: Any) -> None:
    """Add to an attention layer under construction the KV scales that SGLang adds to others, and their quant method."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    layer.quant_method = BaseKVCacheMethod(None)
    layer.quant_method.create_weights(layer)


@cache
def own_rows(device: torch.device) -> BlockFormat | None:
    """How SGLang's own quantizer makes scales of rows, which its versions do by several kernels: it is asked. None if in no way
    that is known.

    Not asked of rows of zeros: one of its kernels divides them by zero.
    """
    from sglang.srt.layers.quantization import fp8

    probe = probe_of_rows().to(device)
    return _of_rows(probe, *fp8.per_token_group_quant_fp8(probe, probe.shape[1]))


@cache
def own_weights(device: torch.device) -> BlockFormat | None:
    """How SGLang's quantizer makes the scale of a whole matrix, such as half an expert: it is asked of one row at a time."""
    from sglang.srt.layers.quantization import fp8

    probe = probe_of_rows().to(device)
    codes, scales = zip(*(fp8.scaled_fp8_quant(row[None]) for row in probe), strict=True)
    of_rows = _of_rows(probe, torch.cat(codes), torch.cat(scales)[:, None])
    return None if of_rows is None else replace(of_rows, block_size=(WHOLE, WHOLE))


def _of_rows(probe: Tensor, codes: Tensor, scale: Tensor) -> BlockFormat | None:
    formats = (BlockFormat(block_size=(1, WHOLE), scale_format=each) for each in FLOAT_SCALES)
    return format_of(probe, codes, scale, formats)


def probe_of_rows() -> Tensor:
    """Rows of which every rule makes other scales or codes: multiples of 7 as maxima, by which midpoints between codes can be
    reached exactly, and maxima below the least of every rule.
    """
    rows = torch.zeros(12, 512)  # as wide as no group that has a kernel of its own
    midpoints = torch.arange(17, 33, 2) / 16 * 2.0 ** torch.arange(-2, 6)[:, None]
    for row, seventh in zip(rows, (19, 20, 22, 24, 26, 28, 30, 33, 36), strict=False):
        row[0] = 7 * seventh / 128
        row[1:65] = midpoints.flatten() * row[0] / 448
    rows[9:, :2] = torch.tensor([[1e-3, 3e-4], [3e-5, 1e-5], [1e-8, 3e-9]])
    return rows.bfloat16()
