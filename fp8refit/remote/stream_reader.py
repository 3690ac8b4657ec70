"""Reads on a rank what `fp8refit.remote.stream_sender` hands over: sets of buckets, announced through a ring."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8refit.fill.fills import Prepared
from fp8refit.ranks.rank import Rank
from fp8refit.remote import messages
from fp8refit.remote.mapped_memory import keep_only
from fp8refit.sources.row_runs import Piece
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.ring import Call, Ring

_LINGERING_S = 0.005
"""Seconds that a rank polls for more of a stream before it returns. It never sleeps, because the shortest sleep lasts as
long as reading half a bucket.
"""
_FOLLOWING_S = 0.25
"""Seconds after which it returns even if more keeps arriving."""
_MOST_REMEMBERED_BYTES = 64 << 20
"""Most bytes of texts whose tensors are remembered."""


class StreamReader:
    """Writes streams to one rank. Keeps their buckets mapped from one stream to the next, as the trainer does.

    Args:
        rank: The rank.
        importer: Maps the buckets.
    """

    def __init__(self, rank: Rank, importer: Importer) -> None:
        self._rank, self._importer = rank, importer
        self._ring: Ring | None = None
        self._packed: OrderedDict[str, _Contents] = OrderedDict()
        """The contents that each text of a stream describes, least recently used first."""

    def follow(self, order: messages.Stream, prepared: Prepared) -> bool:
        """Write what arrives through a ring, until nothing more arrives or `_FOLLOWING_S` have passed.

        A text counts as taken when the device has read the buckets it describes. Unless the stream is over, all received
        texts are taken when this returns.

        Returns:
            Whether the stream is over.

        Raises:
            RefitError: This rank failed.
        """
        if self._ring is None or self._ring.segment != order.ring:
            self._ring = Ring.find(order.ring)
        try:
            if order.begins:
                self._rank.target.begin(prepared)
            with self._rank.target.live.on_device():
                return self._take_from(self._ring)
        finally:
            self._ring.leave(self._rank.group.rank)

    def unmap(self) -> None:
        """Unmap all buckets, once nothing reads them any more."""
        self._ring = None
        self._keep_only(())

    def _take_from(self, ring: Ring) -> bool:
        place, is_gpu = self._rank.group.rank, self._rank.target.live.device.type == "cuda"
        num_received = ring.num_taken_by(place)
        reading: deque[tuple[int, torch.cuda.Event]] = deque()
        began_s = came_s = time.monotonic()
        while (now_s := time.monotonic()) - began_s < _FOLLOWING_S:
            call = ring.call  # read this first: a text may still arrive before it is set
            text = ring.receive(num_received)
            if text is not None:
                self._write_packed(text)
                num_received, came_s = num_received + 1, now_s
                if is_gpu:
                    reading.append((num_received, _recorded()))
                else:
                    ring.take(place, num_received)
            elif call is Call.OVER:
                return True
            elif call is not Call.STAY or now_s - came_s > _LINGERING_S:
                break
            else:
                time.sleep(0)
            while reading and reading[0][1].query():  # type: ignore[no-untyped-call]
                ring.take(place, reading.popleft()[0])
        if reading:
            reading[-1][1].synchronize()
            ring.take(place, num_received)
        return False

    def _write_packed(self, text: str) -> None:
        """Write the contents of a set of buckets. Streams repeat their texts, and the tensors are where they were."""
        contents = self._packed.get(text)
        if contents is not None:
            self._keep_only(contents.segments)
        else:
            told = messages.Packed.model_validate_json(text)
            segments = frozenset(segment.id for segment in told.segments)
            self._keep_only(segments)
            tensors = self._importer.open(told.segments, told.refs)
            contents = _Contents(segments=segments, tensors=list(_pieces(tensors, told.runs)))
        self._packed[text] = contents
        self._packed.move_to_end(text)
        self._rank.target.push(contents.tensors)
        while len(self._packed) > 1 and sum(map(len, self._packed)) > _MOST_REMEMBERED_BYTES:
            self._packed.popitem(last=False)

    def _keep_only(self, ids: Iterable[str]) -> None:
        if keep_only(ids, self._importer, self._rank.target.live):
            self._packed.clear()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Contents:
    """What a set of buckets holds."""

    segments: frozenset[str]
    """All buckets that were in use."""
    tensors: list[tuple[str, Tensor] | Piece]


def _pieces(tensors: Mapping[str, Tensor], runs: Mapping[str, messages.Run]) -> Iterator[tuple[str, Tensor] | Piece]:
    for name, tensor in tensors.items():
        run = runs.get(name)
        if run is None:
            yield name, tensor
        else:
            yield Piece(name=name, first_row=run.first_row, tensor=tensor, full_shape=run.full_shape)


def _recorded() -> torch.cuda.Event:
    """Record an event after everything launched on the current device."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
