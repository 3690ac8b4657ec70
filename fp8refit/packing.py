"""The trainer's side of a stream to ranks on this host: reads a source in a thread of its own, and packs it into buckets.

There are two sets of buckets, one on each device that tensors come from: one is filled while the ranks read the other. Nobody
is waited for but a rank that reads, and the device that packs is looked at, not waited for.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8refit.caught import Caught
from fp8refit.errors import InvalidSourceError, RankFailedError, TransportError
from fp8refit.pieces import Piece, in_pieces
from fp8refit.slots import dtype_name
from fp8refit.sources import Source
from fp8refit.transport import messages
from fp8refit.transport.memory import Bucket, TensorRef
from fp8refit.transport.ring import NUM_SETS, Ring, wait_until
from fp8refit.transport.segment import DTYPES

_MOST_REFS = 8192
"""Of one message."""


@dataclass(slots=True)
class _Packed:
    """What was packed and not sent yet: the device may still be at it."""

    message: str
    events: list[torch.cuda.Event]

    def is_done(self) -> bool:
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]


class Packer:
    """Packs sources, one after another, into buckets that are kept.

    Args:
        make_bucket: Makes one on a device, of a size.
    """

    def __init__(self, make_bucket: Callable[[torch.device, int], Bucket]) -> None:
        self._make_bucket = make_bucket
        self._sets: list[dict[torch.device, Bucket]] = [{} for _ in range(NUM_SETS)]
        self._refs: dict[str, TensorRef] = {}
        self._runs: dict[str, messages.Run] = {}
        self._packed: _Packed | None = None
        self._num_packed = 0
        self._refit, self._num_ranks, self._timeout_s, self._bucket_bytes = "", 0, 0.0, 0
        self.ring = Ring.make()

    def pack(self, source: Source, refit: str, *, num_ranks: int, bucket_bytes: int, timeout_s: float) -> None:
        """Read everything once, and send it.

        Raises:
            RefitError: A rank cannot go on, or died; what the source raised.
        """
        self._refit, self._num_ranks, self._timeout_s = refit, num_ranks, timeout_s
        self._bucket_bytes, self._num_packed = bucket_bytes, 0
        self._refs.clear()
        self._runs.clear()
        self._packed = None
        self._begin_set()
        for piece in in_pieces(source, bucket_bytes):
            self._put(piece)
            del piece
        if self._refs:
            self._end_set()
        self._send_packed()
        self.ring.end(is_complete=True)

    def close(self) -> None:
        """Give the buckets back. Every rank has let go of them."""
        self.ring.close()
        for buckets in self._sets:
            for bucket in buckets.values():
                bucket.close()
            buckets.clear()

    @property
    def _buckets(self) -> dict[torch.device, Bucket]:
        return self._sets[self._num_packed % NUM_SETS]

    def _put(self, piece: Piece) -> None:
        name, tensor = piece.name, piece.tensor
        if dtype_name(tensor.dtype) not in DTYPES:
            raise InvalidSourceError([f"{name}: has dtype {dtype_name(tensor.dtype)}, which no weight has"])
        bucket = self._bucket_for(tensor)
        if self._refs and (name in self._refs or len(self._refs) == _MOST_REFS or not bucket.has_room(tensor)):
            self._end_set()
            self._begin_set()
            bucket = self._bucket_for(tensor)
        if not bucket.has_room(tensor):
            bucket = self._grow(tensor)
        self._refs[name] = bucket.put(name, tensor.detach())
        if not piece.is_whole:
            self._runs[name] = messages.Run(first_row=piece.first_row, full_shape=piece.full_shape)

    def _bucket_for(self, tensor: Tensor) -> Bucket:
        device = tensor.device
        if device not in self._buckets:
            self._buckets[device] = self._make_bucket(device, max(self._bucket_bytes, tensor.nbytes))
        return self._buckets[device]

    def _grow(self, tensor: Tensor) -> Bucket:
        """A larger bucket in the place of one that cannot take `tensor`, and of which every rank has let go.

        There is need of one where a single row of blocks is larger than a bucket.
        """
        while (old := self._buckets.get(tensor.device)) is not None and old.num_bytes < tensor.nbytes:
            del self._buckets[tensor.device]
            self._end_set()
            self._send_packed()
            self._wait(lambda: self.ring.num_taken(self._num_ranks) == self.ring.num_sent)
            old.close()
            self._begin_set()
        return self._bucket_for(tensor)

    def _begin_set(self) -> None:
        """Wait until every rank has read what was in the next set."""

        def is_free() -> bool:
            if self._packed is not None and self._packed.is_done():
                self._send_packed()
            return self.ring.num_taken(self._num_ranks) > self._num_packed - NUM_SETS

        self._wait(is_free)
        for bucket in self._buckets.values():
            bucket.clear()

    def _end_set(self) -> None:
        """What is in the set is sent as soon as the device has packed it."""
        self._send_packed()
        segments = tuple(bucket.segment for buckets in self._sets for bucket in buckets.values())
        events = []
        for device in self._buckets:
            if device.type == "cuda":
                events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                events[-1].record(torch.cuda.current_stream(device))
        order = messages.Push(
            refit=self._refit, segments=segments, refs=tuple(self._refs.values()), runs=dict(self._runs)
        )
        self._packed = _Packed(order.encode(), events)
        self._refs.clear()
        self._runs.clear()
        self._num_packed += 1

    def _send_packed(self) -> None:
        packed, self._packed = self._packed, None
        if packed is not None:
            for event in packed.events:
                event.synchronize()
            self.ring.send(packed.message)

    def _wait(self, is_true: Callable[[], bool]) -> None:
        wait_until(is_true, timeout_s=self._timeout_s, who="a rank of the engine")


class Packing:
    """A source that is being packed, in a thread of its own: the ranks are asked to take it meanwhile.

    What it reads is ready on the caller's current stream, and is packed on that.

    Args:
        pack: Packs it; see `Packer.pack`.
        ring: To which it goes.
    """

    def __init__(self, pack: Callable[[], None], ring: Ring) -> None:
        self._pack, self._ring = pack, ring
        self._caught = Caught()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="fp8refit-packer", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether the thread still reads the source, and uses buckets."""
        return self._thread.is_alive()

    def end(self, error: BaseException | None, *, timeout_s: float) -> BaseException | None:
        """Wait for the thread, and give the error to raise.

        Args:
            error: What the ranks answered, if it is an error.
            timeout_s: After an error, for whatever the trainer's source is in the middle of.
        """
        if error is not None:
            self._ring.fail(0)
        self._thread.join(timeout_s if error is not None else None)
        own, self._caught.error = self._caught.error, None
        # What the source itself raised is the cause; what was heard of the ranks, they tell better.
        is_heard = isinstance(own, RankFailedError | TransportError)
        return own if own is not None and (error is None or not is_heard) else error

    def _run(self) -> None:
        with self._caught, ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            self._pack()
        if self._caught.error is not None:
            self._ring.end(is_complete=False)
