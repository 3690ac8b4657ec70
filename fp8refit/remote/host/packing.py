"""Packs the tensors of a stream into buckets that ranks in other processes of this host can map.

There are two sets of buckets, each with one per device that tensors are on: one is filled while ranks read the other.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.live.slots import dtype_name
from fp8refit.remote.protocol import messages
from fp8refit.sources.row_runs import MakesPieces, Piece, Recipe
from fp8refit.sources.work_stream import WorkStream
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.ring import NUM_SETS
from fp8refit.transport.memory.segment import DTYPES, Segment, TensorRef

_SENDABLE = frozenset(DTYPES.values())
_MOST_REFS = 8192
"""Most references in one set."""
_MOST_REMEMBERED_BYTES = 64 << 20
"""Most bytes of texts that are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A filled set of buckets, and the text that the ranks get once the device has packed it."""

    text: str
    events: tuple[torch.cuda.Event, ...]

    def is_done(self) -> bool:
        """Whether the device has finished packing."""
        return all(event.query() for event in self.events)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the device has finished packing."""
        for event in self.events:
            event.synchronize()


class _Texts:
    """The texts of earlier sets: streams repeat them, and making one takes 4 us for each of up to 8192 tensors."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, ...], _Text] = OrderedDict()
        """By the identities of segments and references, which live as long as the text."""
        self._num_bytes = 0

    def of(self, segments: tuple[Segment, ...], refs: tuple[TensorRef, ...], runs: Mapping[str, messages.Run]) -> str:
        """Describe a set of buckets."""
        key = (*map(id, segments), len(segments), *map(id, refs))
        known = self._known.get(key)
        if known is None or known.runs != runs:
            told = messages.Packed(segments=segments, refs=refs, runs=dict(runs))
            known = _Text(segments=segments, refs=refs, runs=dict(runs), text=told.encode())
            self._remember(key, known)
        self._known.move_to_end(key)
        return known.text

    def _remember(self, key: tuple[int, ...], new: "_Text") -> None:
        old = self._known.pop(key, None)
        self._known[key] = new
        self._num_bytes += len(new.text) - (len(old.text) if old is not None else 0)
        while len(self._known) > 1 and self._num_bytes > _MOST_REMEMBERED_BYTES:
            self._num_bytes -= len(self._known.popitem(last=False)[1].text)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Text:
    """The text of a set of buckets, and what it was made from."""

    segments: tuple[Segment, ...]
    refs: tuple[TensorRef, ...]
    runs: Mapping[str, messages.Run]
    text: str


class Packer:
    """Packs streams into buckets, which are kept from one stream to the next.

    Copies are queued on one CUDA stream per device: the one that is current when its first tensor arrives.

    Args:
        make_bucket: Makes a bucket on a device, of a size in bytes.
    """

    def __init__(self, make_bucket: Callable[[torch.device, int], Bucket]) -> None:
        self._make_bucket = make_bucket
        self._sets: list[dict[torch.device, Bucket]] = [{} for _ in range(NUM_SETS)]
        self._refs: dict[str, TensorRef] = {}
        self._runs: dict[str, messages.Run] = {}
        self._work: dict[torch.device, WorkStream] = {}
        self._unmade: list[tuple[Recipe, Tensor]] = []
        """Recipes that the source has to compute before the set is sealed, with the memory for each."""
        self._source: MakesPieces | None = None
        self._dropped: list[Bucket] = []
        self._texts = _Texts()
        self._bucket_bytes = 0
        self.num_packed = 0
        """Number of sealed sets of this stream."""

    def begin(self, bucket_bytes: int, source: MakesPieces | None = None) -> None:
        """Begin a stream. No rank may be reading.

        Args:
            bucket_bytes: Size of new buckets.
            source: Makes recipes, if there are any.
        """
        self.end()
        self._bucket_bytes, self.num_packed, self._source = bucket_bytes, 0, source
        for work in self._work.values():
            work.synchronize()  # a failed stream may have left copies that would arrive late
        self._work.clear()
        self.free_dropped()
        self._refs.clear()
        self._runs.clear()
        self.open_set()

    def end(self) -> None:
        """Let go of the source."""
        self._unmade.clear()
        self._source = None

    @property
    def is_empty(self) -> bool:
        """Whether the set being filled is empty."""
        return not self._refs

    @property
    def has_buckets(self) -> bool:
        """Whether there are buckets, which ranks may have mapped."""
        return any(self._sets)

    @property
    def buckets(self) -> Mapping[torch.device, Bucket]:
        """The buckets of the set being filled."""
        return self._sets[self.num_packed % NUM_SETS]

    def open_set(self) -> None:
        """Switch to the next set, which every rank must have read."""
        for bucket in self.buckets.values():
            bucket.clear()

    def has_room(self, piece: Piece | Recipe) -> bool:
        """Whether a piece fits into the remaining room."""
        if piece.name in self._refs or len(self._refs) == _MOST_REFS:
            return False
        bucket = self.buckets.get(piece.tensor.device)
        return bucket is None or bucket.has_room(piece.tensor)

    def reserve(self, tensor: Tensor) -> None:
        """Make sure that every set has a bucket on the device of `tensor`, before anything is written.

        Raises:
            StagingMemoryError: There is none on its device.
        """
        num_bytes = max(self._bucket_bytes, tensor.nbytes)
        for buckets in self._sets:
            if tensor.device not in buckets:
                buckets[tensor.device] = self._make_bucket(tensor.device, num_bytes)

    def put(self, piece: Piece | Recipe) -> None:
        """Queue a copy of a piece, which must fit. A recipe is made when the set is sealed.

        Raises:
            InvalidSourceError: Its dtype is not that of a weight.
            StagingMemoryError: There is no room for the first bucket on its device.
        """
        name, tensor = piece.name, piece.tensor
        if tensor.dtype not in _SENDABLE:
            raise InvalidSourceError([f"{name}: has dtype {dtype_name(tensor.dtype)}, which no weight has"])
        buckets = self._sets[self.num_packed % NUM_SETS]
        if tensor.device not in buckets:
            self.reserve(tensor)
        if tensor.device not in self._work:
            self._work[tensor.device] = WorkStream(tensor.device)
        if isinstance(piece, Recipe):
            out, self._refs[name] = buckets[tensor.device].place(name, tensor)
            self._unmade.append((piece, out))
        else:
            with self._work[tensor.device].joined():
                self._refs[name] = buckets[tensor.device].put(name, tensor)
        if not piece.is_whole:
            self._runs[name] = messages.Run(first_row=piece.first_row, full_shape=piece.full_shape)

    def seal(self) -> Packed:
        """Close the filled set, and return the text for the ranks. Open the next set once they have read it.

        Raises:
            BaseException: What the source raised when it computed its recipes.
        """
        self._make()
        events = tuple(work.record() for device, work in self._work.items() if device.type == "cuda")
        segments = tuple(bucket.segment for buckets in self._sets for bucket in buckets.values())
        text = self._texts.of(segments, tuple(self._refs.values()), self._runs)
        self._refs.clear()
        self._runs.clear()
        self.num_packed += 1
        return Packed(text=text, events=events)

    @torch.inference_mode()
    def _make(self) -> None:
        unmade, self._unmade = self._unmade, []
        for device in {recipe.tensor.device for recipe, _ in unmade}:
            assert self._source is not None, "it gave the recipes"
            there = [each for each in unmade if each[0].tensor.device == device]
            with self._work[device].joined():
                self._source.make([recipe for recipe, _ in there], [out for _, out in there])

    def drop_bucket(self, device: torch.device) -> None:
        """Remove a bucket that is too small from the open set."""
        self._dropped.append(self._sets[self.num_packed % NUM_SETS].pop(device))

    def free_dropped(self) -> None:
        """Free dropped buckets. Every rank must have seen a set without them, or be idle."""
        while self._dropped:
            self._dropped.pop().close()

    def close(self, *, may_be_read: bool = False) -> None:
        """Give the buckets back.

        Args:
            may_be_read: Whether a rank may still have them mapped. GPU memory that another process has mapped must not be
                freed, so it is kept until this process ends. Host memory is freed, and lives on in the other process.
        """
        buckets = [*self._dropped, *(bucket for each in self._sets for bucket in each.values())]
        self._dropped.clear()
        for each in self._sets:
            each.clear()
        for bucket in buckets:
            if not may_be_read or bucket.segment.kind == "memfd":
                bucket.close()
