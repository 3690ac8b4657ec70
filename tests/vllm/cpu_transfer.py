"""What vLLM's weight transfer wants of CUDA and NCCL, on a host that has neither: broadcasts go through the group's store.

Everything around them is vLLM's own: rendezvous, packing, unpacking, loading. `install` is called by the trainer and, for
`FP8REFIT_TEST_TRANSFER=1`, in a server's workers by `cpu_plugin.py`.
"""

from contextlib import nullcontext
from typing import Any

import torch


class StoreCommunicator:
    """In place of `PyNcclCommunicator`."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        sent = self.group.broadcast_obj(tensor if self.group.rank == src else None, src)
        if sent is not tensor:
            tensor.copy_(sent)

    def destroy(self) -> None: ...


class Stream:
    """On which nothing is ever under way."""

    def __init__(self, device: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    from vllm.distributed.device_communicators import pynccl

    pynccl.PyNcclCommunicator = StoreCommunicator
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.current_stream = lambda _=None: Stream()
