"""Gathers tensors that are spread over a trainer's ranks, in buckets and in blocks of rows.

A `Batch` is what the trainer's ranks vote on. A `Bucket` holds whole tensors and takes one collective operation per mesh
dimension. `Rows` are part of a tensor that is larger than a bucket. A `Whole` tensor is sharded in a way that only its
own library can undo. Every rank of the mesh makes the same batches and gathers them in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from fp8refit.errors import RankFailedError
from fp8refit.sources.row_runs import row_ranges
from fp8refit.sources.sharded.shards import Part, ShardLayout
from fp8refit.transport.process_group import wait_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALIGNMENT_BYTES = 16
_all_gather_single = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
"""Newer versions of PyTorch deprecate the older name."""
Launch: TypeAlias = Callable[[], Sequence[Any]]
"""Starts collective operations and returns what to wait for."""
PartRows: TypeAlias = Iterator[tuple[Part, int, Tensor]]
"""A part, the position of its first row here, and the rows."""


class Batch(ABC):
    """What is gathered between two votes of the trainer's ranks: operations, each of which needs the result of the one before.

    Only the memory of the first is allocated beforehand, to hold less at once.
    """

    _steps: Iterator[Launch]
    _launch: Launch | None
    _works: Sequence[Any]

    def allocate(self) -> None:
        """Allocate memory and copy this rank's data into it: everything that may fail on one rank alone."""
        self._steps = self._communicate()
        self._launch = next(self._steps, None)

    def begin(self) -> None:
        """Start communicating, as far as possible without waiting. Every rank of the mesh calls it.

        Raises:
            RankFailedError: A rank died.
        """
        self._works = self._launch() if self._launch is not None else ()

    def finish(self, timeout_s: float) -> None:
        """Wait for what was started, and communicate the rest.

        Raises:
            RankFailedError: A rank died, or did not join in time.
        """
        while self._launch is not None:
            with no_rank_lost():
                for work in self._works:
                    wait_for(work, timeout_s)
            self._launch, self._works = None, ()
            self._launch = next(self._steps, None)
            if self._launch is not None:
                self._works = self._launch()

    @abstractmethod
    def tensors(self) -> PartRows:
        """Yield what was gathered, once. Each tensor has memory of its own or of the trainer; nothing is kept after the
        last.
        """

    @abstractmethod
    def _communicate(self) -> Iterator[Launch]:
        """Yield what starts each step. Its operations have finished when the next one is requested."""


def batches(parts: Iterable[Part], max_bytes: int) -> Iterator[Batch]:
    """Split `parts` into batches of at most `max_bytes` of whole tensors, in order. Equal on every rank."""
    waiting: list[Part] = []
    mesh, num_bytes = None, 0
    for part in parts:
        needed = part.num_bytes if part.mesh is not None else 0
        fits = part.mesh is None or (part.layout is not None and needed <= max_bytes)
        is_apart = part.mesh is not None and mesh is not None and part.mesh is not mesh and part.mesh != mesh
        if waiting and (not fits or is_apart or num_bytes + needed > max_bytes):
            yield Bucket(waiting)
            waiting, mesh, num_bytes = [], None, 0
        if fits:
            waiting.append(part)
            mesh = part.mesh if part.mesh is not None else mesh
            num_bytes += needed + _ALIGNMENT_BYTES * bool(needed)
        elif part.layout is None:
            yield Whole(part)
        else:
            yield from (Rows(part, first, count) for first, count in row_ranges(part.meta, max_bytes))
    if waiting:
        yield Bucket(waiting)


class Bucket(Batch):
    """Whole tensors on one mesh, and tensors that need no gather.

    Peak memory: what is sent plus what arrives, or what arrives plus one of its tensors.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._mesh = next((part.mesh for part in parts if part.mesh is not None), None)
        self._rounds: list[_Round] = []
        self._boxes: dict[int, Tensor] = {}

    @override
    def tensors(self) -> PartRows:
        last = self._rounds[-1] if self._rounds else None
        for index, part in enumerate(self._parts):
            if last is not None and index in last.entries:
                yield part, 0, last.take(index)
            else:
                yield part, 0, self._boxes.pop(index, part.local)
        self._rounds.clear()

    @override
    def _communicate(self) -> Iterator[Launch]:
        if self._mesh is None:
            return
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None, "checked when it was read"
        axes = {stage.axis for part in self._parts if part.layout is not None for stage in part.layout.stages}
        self._rounds = [_Round(self._parts, self._mesh, coordinate, axis) for axis in sorted(axes, reverse=True)]
        for number, one in enumerate(self._rounds):
            if number:
                before = self._rounds[number - 1]
                self._boxes |= {index: before.take(index) for index in before.entries}
                before.came = None
            one.pack(self._boxes)
            yield one.gather
            one.sent = None


class _Round:
    """One collective operation along one mesh axis, for every part of a bucket that is split along it."""

    def __init__(self, parts: Sequence[Part], mesh: "DeviceMesh", coordinate: Sequence[int], axis: int) -> None:
        self._parts, self._group = parts, mesh.get_group(axis)
        self._size = mesh.shape[axis]
        self.entries: dict[int, _Entry] = {}
        joins: dict[int, _Join | None] = {}
        end = 0
        for index, part in enumerate(parts):
            layout = part.layout
            if layout is None:
                continue
            if id(layout) not in joins:
                joins[id(layout)] = _Join.along(axis, layout, coordinate)
            join = joins[id(layout)]
            if join is not None:
                num_bytes = join.num_elements * part.meta.dtype.itemsize
                self.entries[index] = _Entry(join=join, start=end, end=end + num_bytes, dtype=part.meta.dtype)
                end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._num_bytes = end
        self._device = parts[next(iter(self.entries))].device
        self.sent: Tensor | None = None
        self.came: Tensor | None = None

    def pack(self, inner: dict[int, Tensor]) -> None:
        """Copy this rank's boxes in. Boxes assembled by an earlier round are removed from `inner`."""
        self.sent = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        self.came = torch.empty(self._num_bytes * self._size, dtype=torch.uint8, device=self._device)
        for index, entry in self.entries.items():
            box = inner.pop(index, self._parts[index].local)
            place = self.sent[entry.start : entry.end].view(entry.dtype).view(entry.join.padded)
            dim = entry.join.dim
            if box.shape[dim] != place.shape[dim]:
                place = place.narrow(dim, 0, box.shape[dim])
            place.copy_(box)

    def gather(self) -> Sequence[Any]:
        assert self.sent is not None and self.came is not None, "packed"
        return [_all_gather(self.came, self.sent, self._group)]

    def take(self, index: int) -> Tensor:
        """Assemble the box that was spread over the ranks of this axis."""
        assert self.came is not None, "gathered"
        entry = self.entries[index]
        boxes = self.came.view(self._size, -1)[:, entry.start : entry.end].view(entry.dtype)
        return _join(boxes.view(self._size, *entry.join.padded), entry.join.dim, entry.join.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Join:
    """How boxes of one layout are assembled along one axis."""

    dim: int
    padded: tuple[int, ...]
    """Shape of what every rank sends."""
    shape: tuple[int, ...]
    """Shape of the result."""
    num_elements: int

    @classmethod
    def along(cls, axis: int, layout: ShardLayout, coordinate: Sequence[int]) -> "_Join | None":
        """Return None if `layout` is not split along `axis`."""
        for depth, stage in enumerate(layout.stages):
            if stage.axis == axis:
                padded = layout.padded(coordinate, depth)
                shape = layout.box(coordinate, depth).shape
                return cls(dim=stage.dim, padded=padded, shape=shape, num_elements=prod(padded))
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Where one part lies in what one rank sends."""

    join: _Join
    start: int
    end: int
    dtype: torch.dtype


class Rows(Batch):
    """Some rows of a tensor that is larger than a bucket.

    Ranks that hold whole rows broadcast them into place. Columns and other cuts come from every rank at once. Peak
    memory: these rows, and as much again if they are assembled from columns.
    """

    def __init__(self, part: Part, first: int, count: int) -> None:
        assert part.layout is not None and part.mesh is not None, f"{part.name=}"
        self._part, self._layout, self._mesh = part, part.layout, part.mesh
        self._first, self._count = first, count
        self._rows: Tensor | None = None

    @override
    def tensors(self) -> PartRows:
        rows, self._rows = self._rows, None
        assert rows is not None, "gathered"
        yield self._part, self._first, rows

    @override
    def _communicate(self) -> Iterator[Launch]:
        own = self._layout.box(self._coordinate, len(self._layout.stages))
        first, count = own.rows(self._first, self._count)
        rows = self._part.local.narrow(0, first - own.start[0] if count else 0, count).to(self._part.device)
        for depth, stage in reversed(list(enumerate(self._layout.stages))):
            if stage.dim == 0:
                whole = torch.empty(self._shape(depth), dtype=self._part.meta.dtype, device=self._part.device)
                yield partial(self._broadcast, depth, rows, whole)
                rows = whole
            else:
                sent, came = self._pack(depth, rows)
                yield partial(self._all_gather, depth, sent, came)
                del sent
                rows = _join(came, stage.dim, self._shape(depth))
                del came
        self._rows = rows

    @property
    def _coordinate(self) -> list[int]:
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None, "checked when it was read"
        return list(coordinate)

    def _shape(self, depth: int) -> tuple[int, ...]:
        """Shape of these rows as held by this rank and those along the axis of cut number `depth`."""
        box = self._layout.box(self._coordinate, depth)
        return (box.rows(self._first, self._count)[1], *box.shape[1:])

    def _broadcast(self, depth: int, own: Tensor, rows: Tensor) -> list[Any]:
        """Copy what each rank along the axis of cut number `depth` holds into its place in `rows`."""
        stage, coordinate = self._layout.stages[depth], self._coordinate
        group, me = self._mesh.get_group(stage.axis), coordinate[stage.axis]
        begin, _ = self._layout.box(coordinate, depth).rows(self._first, self._count)
        works = []
        for owner in range(self._mesh.shape[stage.axis]):
            coordinate[stage.axis] = owner
            first, count = self._layout.box(coordinate, depth + 1).rows(self._first, self._count)
            if not count:
                continue
            place = rows.narrow(0, first - begin, count)
            if owner == me:
                place.copy_(own)
            works.append(broadcast(place, owner, group))
        return works

    def _pack(self, depth: int, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank sends along the axis of cut number `depth`, and a buffer for what every rank sends."""
        stage = self._layout.stages[depth]
        padded = (self._shape(depth)[0], *self._layout.padded(self._coordinate, depth)[1:])
        sent, came = own.new_empty(padded), own.new_empty((self._mesh.shape[stage.axis], *padded))
        sent.narrow(stage.dim, 0, own.shape[stage.dim]).copy_(own)
        return sent, came

    def _all_gather(self, depth: int, sent: Tensor, came: Tensor) -> list[Any]:
        if not came.numel():
            return []
        return [_all_gather(_bytes(came), _bytes(sent), self._mesh.get_group(self._layout.stages[depth].axis))]


class Whole(Batch):
    """A tensor that only PyTorch can gather: partial sums, or shards cut by two libraries in turn.

    Peak memory: the tensor, and whatever PyTorch needs.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._tensor: Tensor | None = None

    @override
    def tensors(self) -> PartRows:
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "gathered"
        yield self._part, 0, tensor

    @override
    def _communicate(self) -> Iterator[Launch]:
        yield lambda: ()  # PyTorch's gather waits, so nothing begins before `finish`
        with no_rank_lost(), torch.no_grad():
            self._tensor = self._part.local.full_tensor()  # type: ignore[attr-defined]


def _join(boxes: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Join boxes (number, ...) along `dim`, without padding, into memory that holds nothing else."""
    merged = boxes.movedim(0, dim)
    joined = boxes.new_empty((*merged.shape[:dim], merged.shape[dim] * merged.shape[dim + 1], *merged.shape[dim + 2 :]))
    joined.view(merged.shape).copy_(merged)
    return joined if joined.shape[dim] == shape[dim] else joined.narrow(dim, 0, shape[dim]).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _all_gather(came: Tensor, sent: Tensor, group: ProcessGroup) -> Any:
    with no_rank_lost():
        return _all_gather_single(came, sent, group=group, async_op=True)


def broadcast(tensor: Tensor, owner: int, group: ProcessGroup) -> Any:
    """Start sending a tensor from one rank of a group to all others, and return what to wait for."""
    with no_rank_lost():
        return torch.distributed.broadcast(_bytes(tensor), group_src=owner, group=group, async_op=True)


@contextmanager
def no_rank_lost() -> Iterator[None]:
    """Translate what a collective operation raises if a rank is gone.

    Raises:
        RankFailedError: A rank died, or did not join in time.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankFailedError(
            f"a rank of the trainer died or did not join while its shards were gathered ({error})"
        ) from error
