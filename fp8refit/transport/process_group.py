"""Exchanges messages between an engine's ranks over the engine's own PyTorch process group."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from fp8refit.errors import EngineLostError

if TYPE_CHECKING:  # not in every build
    from torch.distributed import ProcessGroupGloo

_HEADER_BYTES = 8
_MAX_BYTES = 1 << 28
_SMALL_BYTES = 2048
"""Size of the first round. Most messages fit and need no second round."""
_POLL_S = 2e-5
_SLOWEST_POLL_S = 1e-3
_FIRST_LOOK_S = 0.1


class ProcessGroupExchange:
    """Implements `fp8refit.transport.vote.Group` over the CPU (gloo) group that an engine keeps for its ranks.

    Args:
        group: The process group. Nothing else may use it during an exchange.
        is_left: Says whether another rank has left the group for good, so that it is not waited for. It is asked seldom.
    """

    def __init__(self, group: "ProcessGroup | ProcessGroupGloo", is_left: Callable[[], bool] | None = None) -> None:
        self._group: Any = group
        self._is_left = is_left
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Send `message` to every rank and return all, in rank order."""
        framed = len(message).to_bytes(_HEADER_BYTES) + message
        frames = self._gather(framed, _SMALL_BYTES, timeout_s)
        sizes = [int.from_bytes(frame[:_HEADER_BYTES]) for frame in frames]
        largest = _HEADER_BYTES + max(sizes)
        if largest > _MAX_BYTES:
            raise EngineLostError(f"a rank announced a message of {max(sizes)} bytes, which is not one of ours")
        if largest > _SMALL_BYTES:
            frames = self._gather(framed, largest, timeout_s)
        return [frame[_HEADER_BYTES : _HEADER_BYTES + size] for frame, size in zip(frames, sizes, strict=True)]

    def _gather(self, frame: bytes, num_bytes: int, timeout_s: float) -> list[bytes]:
        """Return the first `num_bytes` of every rank's frame, zero-padded."""
        own = torch.frombuffer(bytearray(frame[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(self.size)]
        try:
            work = self._group.allgather([gathered], [own])
            self._wait(work, timeout_s)
        except RuntimeError as error:
            raise EngineLostError(
                f"rank {self.rank} of {self.size} did not hear from every other rank within {timeout_s:g} s, or one of them "
                f"died ({error}). Every rank must call refit; restart the engine"
            ) from error
        return [bytes(tensor.numpy()) for tensor in gathered]

    def _wait(self, work: Any, timeout_s: float) -> None:
        """Wait for an operation. Who may have left is asked after a while, then after twice that, and so on."""
        deadline_s = time.monotonic() + timeout_s
        pause_s = timeout_s if self._is_left is None else _FIRST_LOOK_S
        while pause_s < (left_s := deadline_s - time.monotonic()):
            try:
                work.wait(timedelta(seconds=pause_s))
                return
            except RuntimeError:
                if work.is_completed() or (self._is_left is not None and self._is_left()):
                    raise
            pause_s *= 2
        work.wait(timedelta(seconds=max(left_s, _SLOWEST_POLL_S)))


def wait_for(work: Any, timeout_s: float) -> None:
    """Wait for a collective operation, on the current stream too. NCCL's own `wait` polls only once per millisecond.

    Raises:
        RuntimeError: It failed or takes too long.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, _POLL_S
    while not work.is_completed() and time.monotonic() < deadline_s:
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _SLOWEST_POLL_S)
    work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), _SLOWEST_POLL_S)))
