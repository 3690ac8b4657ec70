"""Transfers between GPUs on a host without one: gloo instead of NCCL, shared memory instead of CUDA IPC, and nothing instead of
CUDA's streams.

Everything around them is vLLM's own: rendezvous, packing, unpacking, loading. As with NCCL, a rank that waits for a peer that
does not come goes on waiting, here for `TIMEOUT_S`. `install` is called by the trainer and, for `FP8REFIT_TEST_TRANSFER=1`,
in a server's workers by `cpu_plugin.py`.
"""

import os
import typing
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions

TIMEOUT_S = 60
BUCKET_BYTES = 1 << 18
"""Instead of 1 GiB, which a tiny model would not fill once."""


class GlooCommunicator:
    """In place of `PyNcclCommunicator`."""

    def __init__(self, group: Any, device: Any) -> None:
        from torch.distributed import PrefixStore
        from vllm.distributed.utils import init_gloo_process_group

        self.group, self.rank, self.device = group, group.rank, torch.device("cpu")
        store = PrefixStore("weights", group.store)
        self._gloo = init_gloo_process_group(store, group.rank, group.world_size, timedelta(seconds=TIMEOUT_S))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None: ...


class Stream:
    """On which nothing is ever under way."""

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def reduce_tensor(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple]:
    """In place of torch's for a GPU's memory: how another process gets the same memory. The seventh argument is the device."""
    manager, handle, size = tensor.untyped_storage()._share_filename_cpu_()
    return rebuild, (manager, handle, size, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), 0)


def rebuild(manager: bytes, handle: bytes, size: int, dtype: Any, offset: int, shape: tuple, *_: Any) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def allocate_on_host() -> None:
    """What is asked of a GPU's memory. Not before an engine has booted: a trace knows `torch.empty` by its identity."""
    allocate = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            options["device"] = "cpu"
        return allocate(*size, **options | ({"pin_memory": False} if "pin_memory" in options else {}))

    torch.empty = empty


def stand_for_gpus() -> None:
    """Every rank of torch's has a GPU of its own."""

    def properties(_: Any = None) -> SimpleNamespace:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else os.environ.get("RANK", 0)
        return SimpleNamespace(uuid=f"{os.environ.get('FP8REFIT_TEST_GPUS', 'cpu')}-{rank}")

    torch.multiprocessing.reductions.reduce_tensor = reduce_tensor
    torch.cuda.get_device_properties, torch.cuda.current_device = properties, lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = torch.cuda.ipc_collect = lambda *_: None
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.device = torch.cpu.device = lambda _: nullcontext()
    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.current_stream = lambda _=None: Stream()


def install() -> None:
    """Also in vLLM."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.utils import torch_utils

    pynccl.PyNcclCommunicator = GlooCommunicator
    packed_tensor.packed_nccl_broadcast_producer.__defaults__ = (BUCKET_BYTES, 2)
    with suppress(ImportError, TypeError):  # before 0.31 whoever sends says the size
        from vllm.distributed.weight_transfer import nccl_common

        nccl_common.NCCLWeightTransferInitInfo.__init__.__kwdefaults__["packed_buffer_size_bytes"] = BUCKET_BYTES
    stand_for_gpus()
    typing.TypedDict = (
        typing_extensions.TypedDict
    )  # SkyRL's wheel says Python 3.11, where pydantic does not take the other
    if getattr(getattr(torch_utils, "async_tensor_h2d", None), "__defaults__", None) == (True,):
        torch_utils.async_tensor_h2d.__defaults__ = (False,)  # LoRA pins memory on any host, in some versions
