"""Whoever gives tensors may change the current stream of a GPU in between; whoever reads them stays on one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WorkStream:
    """The stream on which a reader queues all its work on one device: the one that is current when this is made.

    A generator that yields inside `with torch.cuda.stream(...)` makes that stream current for its reader, until it ends. A
    receiver may load each bucket on a stream of its own. If the reader followed them, what it queues later could overtake what
    it queued before, and memory that it took on one stream would be used again while another one reads it.

    Args:
        device: Where the work is queued. On a CPU nothing is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Queue work on the stream: after what the current one has queued, and before what that one queues next."""
        stream = self._stream
        current = torch.cuda.current_stream(self._device) if stream is not None else None
        if stream is None or current is None or current == stream:
            yield
            return
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def record(self) -> torch.cuda.Event:
        """An event of a GPU after all work that was queued on the stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait for all of it."""
        if self._stream is not None:
            self._stream.synchronize()
