"""The only file that reaches into a live SGLang engine. It probes attributes, not versions (seen with 0.5.15, 0.5.17, 0.5.23).

The way in is SGLang's own request for weights by IPC handles: it reaches the scheduler of every rank, its handles are free
text, and it asks for no update session.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.admission import refusal

IN_SCHEDULER = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_ipc"
)
"""What a scheduler calls when it is asked for weights by IPC handles."""

IN_SERVER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_ipc"
"""What a server's process calls before that."""

_HANDLE = "fp8refit"
_ORDER = "fp8refit.order"


def register_hook(target: str, hook: Callable[..., Any]) -> None:
    """Have SGLang call `hook(original, ...)` in the place of `target`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Whether SGLang has put `hook` in the place of `target`, in this process and so in those it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    is_registered = any(entry[1] is hook for entry in HookRegistry._hooks.get(target, ()))
    return is_registered and target in HookRegistry._patched


def call_for(address: str) -> Any:
    """The request that has every rank answer at `address`."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput

    return UpdateWeightsFromIPCReqInput(zmq_handles={_HANDLE: address}, flush_cache=False)


def address_in(request: Any) -> str | None:
    """Where an answer is wanted, or None if the request is none of ours."""
    address: str | None = request.zmq_handles.get(_HANDLE)
    return address


def handles_for(order: str) -> dict[str, str]:
    """What to post to a server's process, so that it carries out `order`."""
    return {_ORDER: order}


def order_in(request: Any) -> str | None:
    """What a server's process shall do, or None if the request is none of ours."""
    order: str | None = request.zmq_handles.get(_ORDER)
    return order


def http_refusal(reason: str, request: Any) -> Exception:
    """What a server answers to a request that is not admitted: 503, with the reason."""
    from fastapi import HTTPException

    kind: type[Exception] = HTTPException
    if getattr(request, "stream", False):
        # The stream of `/generate` has begun to answer by then, and tells of ValueErrors alone.
        kind = type("StreamRefusal", (HTTPException, ValueError), {})
    return kind(status_code=503, detail=str(refusal(reason)))


def receipt(*, success: bool, message: str) -> Any:
    """What a scheduler returns for a request."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqOutput

    return UpdateWeightsFromIPCReqOutput(success=success, message=message)


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

    async def set_version(self, version: str) -> None:
        """Have outputs say which weights they come from."""
        if not hasattr(self.manager, "update_weight_version"):
            self.manager._update_weight_version_if_provided(version)
            return
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self.manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )


def why_not_refitted(arguments: Any) -> str | None:
    """What in an engine's arguments keeps it from being refitted, with the remedy; or None."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(arguments, name, default)

    if value("dp_size", 1) > 1 or value("enable_dp_attention"):
        return "it runs data-parallel replicas, or attention that is; start one engine a replica, and refit each"
    if value("pp_size", 1) > 1:
        return "it is pipeline-parallel; leave out pp_size"
    if value("nnodes", 1) > 1:
        return "it spans several hosts; start one engine a host"
    if value("tokenizer_worker_num", 1) > 1:
        return "it has several tokenizer processes; leave out tokenizer_worker_num"
    if value("disaggregation_mode", "null") != "null":
        return "prefill and decode are disaggregated, and the other side keeps the old policy; leave out disaggregation_mode"
    if value("hicache_storage_backend"):
        return "it reads KV of the old policy back from storage; leave out hicache_storage_backend"
    if value("enable_lmcache") or value("enable_flexkv"):
        return "it keeps KV of the old policy outside its radix cache; leave out enable_lmcache and enable_flexkv"
    if value("weight_cache_mode", "off") not in (None, "off"):
        return 'its weights are shared with other engines; set weight_cache_mode="off"'
    return None


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """The event loop that an `sglang.Engine` was made with."""
    loop: asyncio.AbstractEventLoop = engine.loop
    return loop


class Scheduler:
    """The scheduler of one rank.

    Args:
        scheduler: SGLang's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @property
    def model(self) -> nn.Module:
        """The live model."""
        model: nn.Module = self._scheduler.tp_worker.model_runner.model
        return model

    @property
    def process_group(self) -> ProcessGroup:
        """The CPU group of this engine's ranks."""
        group: ProcessGroup = self._scheduler.tp_group.cpu_group
        return group

    @property
    def rank(self) -> int:
        """Which of the ranks this is."""
        return int(self._scheduler.tp_group.rank_in_group)

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return int(self._scheduler.tp_group.world_size)

    @property
    def has_draft_model(self) -> bool:
        """Whether tokens are drafted by a model with weights of its own."""
        return getattr(self._scheduler, "draft_worker", None) is not None

    @property
    def has_dummy_weights(self) -> bool:
        """Whether the engine was booted without a checkpoint's values."""
        load_format = self._scheduler.server_args.load_format
        return str(getattr(load_format, "value", load_format)) == "dummy"

    @property
    def is_multimodal(self) -> bool:
        """Whether the model takes more than text."""
        return bool(getattr(self._scheduler.model_config, "is_multimodal", False))

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """What `release_memory_occupation` took away."""
        return frozenset(self._scheduler.weight_updater.offload_tags)

    @property
    def has_open_session(self) -> bool:
        """Whether somebody began an update of weights and has not ended it."""
        return getattr(self._scheduler.weight_updater, "_session", None) is not None

    def flush(self) -> bool:
        """Drop the KV cache; requests that wait hold none. False if something that runs holds blocks of it."""
        waiting = self._scheduler.waiting_queue
        self._scheduler.waiting_queue = type(waiting)()
        try:
            return bool(self._scheduler.flush_cache(empty_cache=False))
        finally:
            self._scheduler.waiting_queue = waiting


@dataclass(frozen=True, slots=True)
class KvScale:
    """One scale of an attention layer's FP8 KV cache: a tensor, and SGLang's copy of it as a Python number."""

    module: nn.Module
    tensor: Tensor
    copy: str
    """Name of the copy."""


def kv_scales(model: nn.Module) -> list[KvScale]:
    """Every scale of the KV cache of a model."""
    found = []
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            scale, copy = module._parameters.get(name), f"{name}_float"
            if scale is not None and hasattr(module, copy):
                found.append(KvScale(module, scale.data, copy))
    return found


def forget_kv_scales(scales: Sequence[KvScale]) -> None:
    """Set SGLang's copies to 1.0, as a boot from a checkpoint without KV scales does."""
    for scale in scales:
        setattr(scale.module, scale.copy, 1.0)


def restore_kv_scales(scales: Sequence[KvScale]) -> None:
    """Write every scale from its copy, in two launches."""
    if scales:
        tensors = [scale.tensor for scale in scales]
        torch._foreach_zero_(tensors)
        torch._foreach_add_(tensors, [float(getattr(scale.module, scale.copy)) for scale in scales])
