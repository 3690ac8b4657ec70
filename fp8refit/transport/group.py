"""The ranks of an engine as PyTorch's own process group of that engine joins them."""

from datetime import timedelta

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from fp8refit.errors import EngineLostError

_HEADER_BYTES = 8
_SMALL_BYTES = 2048
"""Size of the first round; most messages fit, and need no second."""


class ProcessGroupExchange:
    """Implements `fp8refit.vote.Group` over the CPU (gloo) group that an engine keeps for its ranks.

    Args:
        group: The process group. Nobody else uses it while messages are exchanged.
        device: Where the messages lie; for NCCL this rank's GPU.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | None = None) -> None:
        self._group = group
        self._device = device if device is not None else torch.device("cpu")
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """See `fp8refit.vote.Group`."""
        framed = len(message).to_bytes(_HEADER_BYTES) + message
        frames = self._gather(framed, _SMALL_BYTES, timeout_s)
        sizes = [int.from_bytes(frame[:_HEADER_BYTES]) for frame in frames]
        largest = _HEADER_BYTES + max(sizes)
        if largest > _SMALL_BYTES:
            frames = self._gather(framed, largest, timeout_s)
        return [frame[_HEADER_BYTES : _HEADER_BYTES + size] for frame, size in zip(frames, sizes, strict=True)]

    def _gather(self, frame: bytes, num_bytes: int, timeout_s: float) -> list[bytes]:
        """The first `num_bytes` of every rank's frame, with zeros after its end."""
        own = torch.frombuffer(bytearray(frame[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8)
        own = own.to(self._device)
        gathered = [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(self.size)]
        try:
            work = torch.distributed.all_gather(gathered, own, group=self._group, async_op=True)
            assert work is not None, "asynchronous"
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise EngineLostError(
                f"rank {self.rank} of {self.size} did not hear from every other rank within {timeout_s:g} s, or one of them "
                f"died ({error}). Every rank has to call refit; start the engine again"
            ) from error
        return [bytes(tensor.cpu().numpy()) for tensor in gathered]
