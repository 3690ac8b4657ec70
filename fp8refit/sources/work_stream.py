"""Keeps a reader of tensors on one CUDA stream, even if the source changes the current stream in between."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_current_stream: Callable[[int], tuple[int, int, int]] | None = getattr(torch._C, "_cuda_getCurrentStream", None)
"""What `torch.cuda.current_stream` calls. It takes a tenth of the time, once for every tensor. Private to torch."""


def _identity_of_current(device: torch.device) -> object:
    """Something that equals itself as long as the current stream of a device stays the same."""
    if _current_stream is None or device.index is None:
        return torch.cuda.current_stream(device)
    return _current_stream(device.index)


class WorkStream:
    """The stream on which a reader queues all its work on one device: the one that is current at construction.

    A generator that yields inside `with torch.cuda.stream(...)` changes its reader's current stream, and a receiver may
    load each bucket on a different stream. If the reader followed, its later work could overtake earlier work, and
    memory allocated on one stream could be reused while another still reads it.

    Args:
        device: The device. On a CPU this does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._identity = _identity_of_current(device) if self._stream is not None else None

    def joined(self) -> AbstractContextManager[None]:
        """Queue work on the stream: after what the current stream has queued so far, and before what it queues next."""
        stream = self._stream
        if stream is None or _identity_of_current(self._device) == self._identity:
            return nullcontext()
        return self._between(stream, torch.cuda.current_stream(self._device))

    @staticmethod
    @contextmanager
    def _between(stream: torch.cuda.Stream, current: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def record(self) -> torch.cuda.Event:
        """Record an event after all work queued on the stream so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait for all work queued on the stream."""
        if self._stream is not None:
            self._stream.synchronize()
