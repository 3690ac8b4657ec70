"""Access to SGLang's internals that differ between versions. It probes attributes (tested with 0.5.15 to 0.5.23).

Messages travel in SGLang's own request for weights by IPC handles: it reaches the scheduler of every rank, its handles
are free text, and it needs no update session.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.driver.admission import refusal
from fp8refit.errors import EngineAsleepError
from fp8refit.live.slots import FP8_DTYPE, dtype_name
from fp8refit.live.versions import Versions

VERSIONS = Versions(engine="SGLang", oldest="0.5.15", newest="0.5.23")

IN_SCHEDULER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_ipc"
)
"""Runs in a scheduler for a request for weights by IPC handles."""

IN_SERVER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_ipc"
"""Runs in a server's process before that."""

IN_START = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators"
"""Runs once in the process that takes requests, before it serves any."""

IN_ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention.__init__"
"""Creates an attention layer."""

IN_ADMISSION = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
"""Runs in a scheduler with the requests that arrived since its last step."""

IN_SLEEP = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
"""Runs in a scheduler to release memory."""

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_HANDLE = "fp8refit"
_ORDER = "fp8refit.order"


def register_hook(target: str, hook: Callable[..., Any]) -> None:
    """Make SGLang call `hook(original, ...)` instead of `target`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether SGLang has replaced `target` with `hook`, in this process and therefore in those it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    is_registered = any(entry[1] is hook for entry in HookRegistry._hooks.get(target, ()))
    return is_registered and target in HookRegistry._patched


def call_for(address: str) -> Any:
    """The request that makes every rank connect to `address`."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

    return UpdateWeightsFromIPCReqInput(zmq_handles={_HANDLE: address}, flush_cache=False)


def address_in(request: Any) -> str | None:
    """The address to connect to, or None if the request is not ours."""
    address: str | None = request.zmq_handles.get(_HANDLE)
    return address


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

    kind: type[Exception] = HTTPException
    if getattr(request, "stream", False):
        # By then the stream of `/generate` has begun to answer, and it only reports ValueErrors.
        kind = type("StreamRefusal", (HTTPException, ValueError), {})
    return kind(status_code=503, detail=str(refusal(reason)))


def loses_weights(request: Any, scheduler: Any) -> bool:
    """Whether a request to release memory discards the weights."""
    tags = getattr(request, "tags", None)
    is_kept = getattr(scheduler.server_args, "enable_weights_cpu_backup", False)
    return (not tags or "weights" in tags) and not is_kept


def refuse_requests(scheduler: Any, requests: Sequence[Any], reason: str) -> list[Any]:
    """Answer 503 to the requests that need computation, abort those that wait, and return the others."""
    from sglang.srt.managers.io_struct import (
        AbortReq,
        BatchTokenizedEmbeddingReqInput,
        BatchTokenizedGenerateReqInput,
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
            scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(finished_reason=said, rid=one.rid), one)
    if scheduler.waiting_queue:
        scheduler.abort_request(AbortReq(abort_all=True, finished_reason=said))
    return others


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


class Tokenizer:
    """The tokenizer manager of one engine: the object through which every request goes.

    Args:
        manager: SGLang's.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that drives the engine, once it has done anything."""
        loop: asyncio.AbstractEventLoop | None = self.manager.event_loop
        return loop

    @property
    def num_ranks(self) -> int:
        """How many ranks the engine has."""
        return int(self.manager.server_args.tp_size)

    @property
    def num_unfinished(self) -> int:
        """How many requests wait or run."""
        return len(self.manager.rid_to_state)

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return bool(self.manager.is_pause)

    async def is_drained(self) -> bool:
        """Whether no request is with the scheduler; some may wait for the end of a pause."""
        return not self.manager.rid_to_state or not await self.manager.model_update_lock.is_locked()

    async def ring(self, address: str) -> tuple[bool, str]:
        """Have every rank answer at `address`; success and message of rank 0."""
        self.manager.auto_create_handle_loop()
        results = await self.manager.update_weights_from_ipc_communicator(call_for(address))
        return bool(results[0].success), str(results[0].message)

    async def pause(self) -> None:
        """Stop the schedulers. Requests that run go back to the queue, and their KV is computed anew later."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.manager.auto_create_handle_loop()
        await type(self.manager).pause_generation(self.manager, PauseGenerationReqInput(mode="retract"))

    async def go_on(self) -> None:
        """Let the schedulers run again."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        request = ContinueGenerationReqInput(torch_empty_cache=False)
        await type(self.manager).continue_generation(self.manager, request)

    def abort_all(self) -> None:
        """Abort every request that the schedulers have."""
        self.manager.abort_request(abort_all=True)

    async def wake_those_that_wait(self) -> None:
        """Let requests that wait for the end of a pause go on to the next step, in this process alone."""
        async with self.manager.is_pause_cond:
            self.manager.is_pause = False
            self.manager.is_pause_cond.notify_all()

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]] | None:
        """Token ids as of requests with these texts; None if the engine has no tokenizer."""
        tokenizer = self.manager.tokenizer
        return [list(tokenizer.encode(prompt)) for prompt in prompts] if tokenizer is not None else None

    async def set_version(self, version: str) -> None:
        """Have outputs say which weights they come from. A server that waits for its first weights has them now."""
        if getattr(self.manager, "initial_weights_loaded", True) is False:
            self.manager.initial_weights_loaded = True
        if not hasattr(self.manager, "update_weight_version"):
            self.manager._update_weight_version_if_provided(version)
            return
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self.manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )


def why_not_refitted(arguments: Any) -> str | None:
    """Why an engine with these arguments cannot be refitted, with the remedy; None if it can."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(arguments, name, default)

    if value("dp_size", 1) > 1 or value("enable_dp_attention"):
        return "it uses data-parallel replicas or data-parallel attention; start one engine per replica, and refit each"
    if value("pp_size", 1) > 1:
        return "it is pipeline-parallel; leave out pp_size"
    if value("nnodes", 1) > 1:
        return "it spans several hosts; start one engine per host"
    if value("tokenizer_worker_num", 1) > 1:
        return "it has several tokenizer processes; leave out tokenizer_worker_num"
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


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """The event loop that an `sglang.Engine` was created with."""
    loop: asyncio.AbstractEventLoop = engine.loop
    return loop


class Scheduler:
    """The scheduler of one rank.

    Args:
        scheduler: SGLang's scheduler object.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def itself(self) -> Any:
        """SGLang's scheduler object."""
        return self._scheduler

    @property
    def model(self) -> nn.Module:
        """The live model."""
        model: nn.Module = self._runner.model
        return model

    @property
    def process_group(self) -> ProcessGroup:
        """The CPU process group of this engine's ranks."""
        group: ProcessGroup = self._scheduler.tp_group.cpu_group
        return group

    @property
    def rank(self) -> int:
        """This rank's number."""
        return int(self._scheduler.tp_group.rank_in_group)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return int(self._scheduler.tp_group.world_size)

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model with its own weights is used."""
        return getattr(self._scheduler, "draft_worker", None) is not None

    @property
    def has_dummy_weights(self) -> bool:
        """Whether the engine was booted with dummy weights."""
        load_format = self._scheduler.server_args.load_format
        return str(getattr(load_format, "value", load_format)) == "dummy"

    @property
    def is_multimodal(self) -> bool:
        """Whether the model takes more than text."""
        return bool(getattr(self._scheduler.model_config, "is_multimodal", False))

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """What `release_memory_occupation` released."""
        return frozenset(self._scheduler.weight_updater.offload_tags)

    @property
    def has_open_session(self) -> bool:
        """Whether one of SGLang's own weight updates has begun and not ended."""
        return getattr(self._scheduler.weight_updater, "_session", None) is not None

    @property
    def model_config(self) -> Any:
        """SGLang's `ModelConfig`."""
        return self._runner.model_config

    @property
    def load_config(self) -> Any:
        """SGLang's `LoadConfig`."""
        return self._runner.load_config

    @property
    def cache_dtype(self) -> str:
        """The dtype of the KV cache. For E4M3, which SGLang uses for several formats, the value of `kv_cache_dtype`."""
        runner = self._runner
        if runner.kv_cache_dtype is not FP8_DTYPE:
            return dtype_name(runner.kv_cache_dtype)
        # 0.5.15 has only the arguments, and replaces `auto` in them by what it chose.
        has_name = hasattr(runner, "kv_cache_dtype_str")
        return str(runner.kv_cache_dtype_str if has_name else runner.server_args.kv_cache_dtype)

    @property
    def attention_backends(self) -> tuple[str, str]:
        """SGLang's attention backends for prefill and for decode."""
        runner = self._runner
        return str(runner.prefill_attention_backend_str), str(runner.decode_attention_backend_str)

    @property
    def has_latent_cache(self) -> bool:
        """Whether the KV cache holds latents (MLA)."""
        return bool(self._runner.use_mla_backend)

    @property
    def has_decode_graphs(self) -> bool:
        """Whether CUDA graphs capture decoding."""
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend

        return not check_cuda_graph_backend("decode", "disabled")

    @property
    def has_full_prefill_graphs(self) -> bool:
        """Whether CUDA graphs capture prefill with its attention; other prefill graphs leave attention to Python."""
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend

        return bool(check_cuda_graph_backend("prefill", "full"))

    def check_can_recapture(self) -> None:
        """Check that CUDA graphs can be captured now.

        Raises:
            EngineAsleepError: A part of the engine is asleep.
        """
        if self.sleeping_tags:
            raise EngineAsleepError(
                "new KV scales require recapturing CUDA graphs, and part of the engine is asleep; call "
                "resume_memory_occupation() before refit"
            )

    def recapture(self) -> None:
        """Recapture decode graphs, as SGLang's own updates do with `recapture_cuda_graph`.

        Raises:
            EngineAsleepError: A part of the engine is asleep.
        """
        self.check_can_recapture()
        updater = getattr(self._runner, "weight_updater", None)
        (updater.recapture_cuda_graph if updater is not None else self._runner.init_decode_cuda_graph)()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self._scheduler.model_config.vocab_size)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a sequence."""
        return int(self._scheduler.model_config.context_len)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that SGLang prefills at once."""
        chunk = self._scheduler.chunked_prefill_size
        return int(chunk if chunk is not None else self._scheduler.max_prefill_tokens)

    def forward_scope(self) -> AbstractContextManager[None]:
        """The context in which SGLang runs every forward of its model."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        scope: AbstractContextManager[None] = forward_context(ForwardContext(attn_backend=self._runner.attn_backend))
        return scope

    @property
    def _runner(self) -> Any:
        return self._scheduler.tp_worker.model_runner

    def flush(self) -> bool:
        """Drop the KV cache. Returns False if a running request uses it; waiting requests do not."""
        waiting = self._scheduler.waiting_queue
        self._scheduler.waiting_queue = type(waiting)()
        try:
            return bool(self._scheduler.flush_cache(empty_cache=False))
        finally:
            self._scheduler.waiting_queue = waiting


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The part of a language model between token ids and logits, if it takes the arguments of SGLang's own models."""
    decoder = getattr(model, "model", None)
    if not isinstance(decoder, nn.Module):
        return None
    # From the class: piecewise CUDA graphs wrap the instance's method.
    names = list(inspect.signature(type(decoder).forward).parameters)
    return decoder if names[1:4] == ["input_ids", "positions", "forward_batch"] else None


def prefill_batch(token_ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Any:
    """A batch of whole sequences without requests and without space in the KV cache.

    Args:
        token_ids: (N,) int64, one sequence after another.
        positions: (N,) int64, each token's position in its sequence.
        lengths: Number of tokens of each sequence.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    device = token_ids.device
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=token_ids,
        req_pool_indices=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros_like(token_ids),
        seq_lens_sum=len(token_ids),
        positions=positions,
    )


def is_cache_fp8() -> bool:
    """Whether the engine being built in this process is to have an FP8 (E4M3) KV cache."""
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().kv_cache_dtype == "fp8_e4m3")


def make_kv_scales(layer: Any) -> None:
    """Add to an attention layer under construction the KV scales that SGLang adds to others, and their quant method."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    layer.quant_method = BaseKVCacheMethod(None)
    layer.quant_method.create_weights(layer)
