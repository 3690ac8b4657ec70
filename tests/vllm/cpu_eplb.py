"""What vLLM needs to move experts between ranks on a CPU (EPLB), which it allows on GPUs only.

Its own code loads redundant experts, moves rows between ranks, in a step or in the background, and keeps the maps. Of the tests
are the map that a router applies, a kernel of Triton's in vLLM, and the streams and events that a CPU does not have.
"""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.config import parallel
from vllm.distributed.eplb import async_worker, eplb_communicator, eplb_state, eplb_utils, rebalance_execute
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.models.interfaces import is_mixture_of_experts
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.engines.looking import digest


class LikeGpu:
    """A platform that says it is one like CUDA, and is otherwise what it is."""

    def __init__(self, platform) -> None:
        self._platform = platform

    def __getattr__(self, name: str):
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


class Stream:
    def synchronize(self) -> None:
        pass


class Event:
    """vLLM's, between two threads that have no streams; and torch's, which measures nothing."""

    def __init__(self, **_) -> None:
        self._recorded = threading.Event()

    def record(self, stream=None) -> None:
        self._recorded.set()

    def wait(self, stream=None) -> None:
        self._recorded.wait()
        self._recorded.clear()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other) -> float:
        return 0.0


def _map_to_physical(topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count, *_, **__):
    """As vLLM's kernel: which copy of an expert a token goes to depends on the token's place in the batch."""
    tokens = torch.arange(topk_ids.shape[0])[:, None] * 2654435769 & 0xFFFFFFFF
    copy = tokens % logical_replica_count[topk_ids.long()]
    return logical_to_physical_map[topk_ids.long(), copy].to(topk_ids.dtype)


def install() -> None:
    """Let engines in this process be booted with `enable_eplb`."""
    if isinstance(parallel.current_platform, LikeGpu):
        return
    parallel.current_platform = LikeGpu(parallel.current_platform)
    base_router.eplb_map_to_physical_and_record = _map_to_physical
    for module in (async_worker, eplb_communicator, eplb_state, eplb_utils, rebalance_execute):
        for name, instead in (("CpuGpuEvent", Event), ("device_stream", lambda _: nullcontext())):
            if hasattr(module, name):
                setattr(module, name, instead)
    exchange = eplb_communicator.batch_isend_irecv

    def exchange_bytes(operations) -> list:
        for each in operations:  # gloo carries no FP8 in older versions of torch
            each.tensor = each.tensor.view(torch.uint8)
        return exchange(operations)

    eplb_communicator.batch_isend_irecv = exchange_bytes
    load_model = CPUModelRunner.load_model

    def load_and_note(runner, *arguments, **options) -> None:
        load_model(runner, *arguments, **options)
        if runner.parallel_config.enable_eplb:  # as a GPU's runner does
            assert is_mixture_of_experts(runner.model)
            runner._moe_model = runner.model
            runner.eplb_state = eplb_state.EplbState(runner.parallel_config, runner.device)
            runner.eplb_state.add_model(runner.model, runner.model_config)
            _model_of(runner).communicator.set_stream(Stream())

    CPUModelRunner.load_model = load_and_note


def _model_of(runner):
    (model,) = runner.eplb_state.model_states.values()
    return model


def experts_at(worker) -> list[list[int]]:
    """Which expert is at which place, by layer. Places are those of all ranks."""
    return _model_of(worker.model_runner).physical_to_logical_map.tolist()


def move_experts(worker, places: list[list[int]]) -> None:
    """Let vLLM move experts in a step, so that they are at `places`."""
    state = worker.model_runner.eplb_state
    state.policy = SimpleNamespace(rebalance_experts=lambda *_: torch.tensor(places))
    with patch.object(torch, "Event", Event), patch.object(torch.cuda, "Event", Event):
        state.rearrange()
    assert experts_at(worker) == places


def move_in_background(worker, places: list[list[int]]) -> bool:
    """Let vLLM begin to move experts in the background. Returns whether the first layer's are copied apart."""
    state, model = worker.model_runner.eplb_state, _model_of(worker.model_runner)
    state.policy = SimpleNamespace(rebalance_experts=lambda *_: torch.tensor(places))
    state.is_async = True
    state.async_worker = threading.Thread(
        target=async_worker.transfer_run_periodically, args=(state, Stream()), daemon=True
    )
    state.async_worker.start()
    state.rearrange()
    while not state._all_ranks_result_ready(model):
        pass
    return model.rebalanced and model.pending_result.layer_idx == 0


def is_moving(worker) -> list:
    """What is being moved in the background."""
    model = _model_of(worker.model_runner)
    return [model.rebalanced, model.pending_result is not None]


def row_digests(worker) -> list[list[str]]:
    """A sha256 of every row of each layer's experts."""
    layers = [
        module
        for module in worker.model_runner.get_model().modules()
        if "w13_weight" in dict(module.named_parameters())
    ]
    return [
        [" ".join(digest(tensor[row]) for tensor in layer.parameters()) for row in range(len(layer.w13_weight))]
        for layer in layers
    ]


OBSERVATIONS = {each.__name__: each for each in (experts_at, move_experts, move_in_background, is_moving, row_digests)}
