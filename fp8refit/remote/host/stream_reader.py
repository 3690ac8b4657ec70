"""Reads on a rank what `fp8refit.remote.host.stream_sender` hands over: sets of buckets, announced through a ring."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from fp8refit.fill.fills import Prepared
from fp8refit.live.turn import DisplacedError
from fp8refit.ranks.rank import Rank
from fp8refit.remote.host.mapped_memory import keep_only
from fp8refit.remote.protocol import messages
from fp8refit.report import RankReport
from fp8refit.sources.row_runs import Piece
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.ring import Call, Ring


class State(Enum):
    """How far the stream to this rank is."""

    NONE = "none is written"
    OPEN = "it goes on with the next order, until which this rank keeps its target's turn"
    READING = "an order to read the ring is carried out"
    OVER = "all of it was read"


class Event(Enum):
    """What leads from one state to the next."""

    BEGIN = "the rank was ordered to get ready"
    FOLLOW = "the rank was ordered to read the ring"
    LEAVE = "nothing more arrived, the time was up, or the sender called back"
    END = "the sender said that nothing more will come"
    FINISH = "the rank was ordered to finish, or may do so without an order"
    FAIL = "the rank failed"
    DISPLACE = "the refit was abandoned, another one began, or the engine was closed"


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.NONE, Event.BEGIN): State.OPEN,
        (State.OPEN, Event.FOLLOW): State.READING,
        (State.READING, Event.LEAVE): State.OPEN,
        (State.READING, Event.END): State.OVER,
        (State.OPEN, Event.FINISH): State.NONE,
        (State.OVER, Event.FINISH): State.NONE,
    }
    | {(state, event): State.NONE for state in State for event in (Event.FAIL, Event.DISPLACE)}
)
"""All that may happen to a stream. The rest is refused: what the order is for was given up."""

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

    Attributes:
        state: How far the stream is.
    """

    def __init__(self, rank: Rank, importer: Importer) -> None:
        self.state = State.NONE
        self._rank, self._importer = rank, importer
        self._ring: Ring | None = None
        self._packed: OrderedDict[str, _Contents] = OrderedDict()
        """The contents that each text of a stream describes, least recently used first."""

    def begin(self, prepared: Prepared) -> None:
        """Get ready to write a stream.

        Raises:
            DisplacedError: Another one is written.
            RefitError: This rank failed.
        """
        with self._undone_on_error():
            self._go(Event.BEGIN)
            self._rank.target.begin(prepared)

    def follow(self, order: messages.Stream, prepared: Prepared) -> bool:
        """Write what arrives through a ring, until nothing more arrives or `_FOLLOWING_S` have passed.

        A text counts as taken when the device has read the buckets it describes. Unless the stream is over, all received
        texts are taken when this returns.

        Returns:
            Whether the stream is over.

        Raises:
            DisplacedError: It did not begin, or was given up.
            RefitError: This rank failed.
        """
        with self._undone_on_error():
            if self._ring is None or self._ring.segment != order.ring:
                self._ring = Ring.find(order.ring)
            try:
                if order.begins:
                    self.begin(prepared)
                self._go(Event.FOLLOW)
                with self._rank.target.live.on_device():
                    self._go(self._take_from(self._ring))
            finally:
                self._ring.leave(self._rank.group.rank)
        return self.state is State.OVER

    def finish(self, prepared: Prepared) -> list[RankReport]:
        """Complete the stream, and commit it with all ranks. See `Rank.finish`.

        Raises:
            DisplacedError: It did not begin, or was given up.
            RefitError: This rank failed, or another one did.
        """
        self._go(Event.FINISH)
        return self._rank.finish(prepared)

    def displace(self) -> None:
        """Take no more of the stream, if there is one."""
        self._go(Event.DISPLACE)

    def _go(self, event: Event) -> None:
        if (self.state, event) not in TRANSITIONS:
            raise DisplacedError
        self.state = TRANSITIONS[self.state, event]

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._go(Event.DISPLACE if isinstance(error, DisplacedError) else Event.FAIL)
            raise

    def unmap(self) -> None:
        """Unmap all buckets, once nothing reads them any more."""
        self._ring = None
        self._keep_only(())

    def _take_from(self, ring: Ring) -> Event:
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
                return Event.END
            elif call is not Call.STAY or now_s - came_s > _LINGERING_S:
                break
            else:
                time.sleep(0)
            while reading and reading[0][1].query():  # type: ignore[no-untyped-call]
                ring.take(place, reading.popleft()[0])
        if reading:
            reading[-1][1].synchronize()
            ring.take(place, num_received)
        return Event.LEAVE

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
