"""vLLM's weight transfer by NCCL on a host without a GPU: gloo instead of NCCL, and nothing instead of CUDA's streams.

Everything around them is vLLM's own: rendezvous, packing, unpacking, loading. As with NCCL, a rank that waits for a peer that
does not come goes on waiting, here for `TIMEOUT_S`. `install` is called by the trainer and, for `FP8REFIT_TEST_TRANSFER=1`,
in a server's workers by `cpu_plugin.py`.
"""

from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch

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


def install() -> None:
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.utils import torch_utils

    pynccl.PyNcclCommunicator = GlooCommunicator
    packed_tensor.packed_nccl_broadcast_producer.__defaults__ = (BUCKET_BYTES, 2)
    with suppress(ImportError):  # older versions leave the size to whoever sends
        from vllm.distributed.weight_transfer import nccl_common

        nccl_common.NCCLWeightTransferInitInfo.__init__.__kwdefaults__["packed_buffer_size_bytes"] = BUCKET_BYTES
    with suppress(AttributeError):  # LoRA pins memory on any host, in some versions
        torch_utils.async_tensor_h2d.__defaults__ = (False,)
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = torch.cuda.ipc_collect = lambda *_: None
    torch.cuda.device = torch.cpu.device = lambda _: nullcontext()
    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.cuda.current_stream = lambda _=None: Stream()
