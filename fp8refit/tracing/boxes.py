"""Computes which box of a checkpoint tensor a copy puts into which box of a parameter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod

import torch

from fp8refit.tracing.patterns import row_major
from fp8refit.tracing.records import Copy, Run

_MAX_PIECES = 1024
Range = tuple[int, int]
"""Start and length of a range in one dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes:
    """A box of a parameter, and the box of a checkpoint tensor that fills it."""

    into: tuple[Range, ...]
    """One range per dimension of the parameter."""
    read: tuple[Range, ...]
    """One range per dimension of the checkpoint tensor."""
    dims: tuple[int | None, ...]
    """For each dimension of the checkpoint tensor, the matching dimension of the parameter; None for a single element."""

    @property
    def is_transposed(self) -> bool:
        """Whether this is a box of a stack whose matrices have rows and columns swapped in the checkpoint."""
        return len(self.dims) == 3 and self.dims in ((0, 2, 1), (None, 2, 1), (None, 1, 0))

    def transposed(self) -> "Boxes":
        """The same boxes, if the checkpoint tensor had its rows and columns swapped."""
        *stack, rows, columns = self.read
        *stacked, row, column = self.dims
        return Boxes(into=self.into, read=(*stack, columns, rows), dims=(*stacked, column, row))


def boxes_of(copy: Copy, shape: tuple[int, ...], full_shape: tuple[int, ...]) -> Boxes | None:
    """Return the boxes of a copy; None if one side is not a box, or one dimension maps to several.

    Args:
        copy: A copy into a row-major parameter.
        shape: Shape of the parameter.
        full_shape: Shape of the checkpoint tensor.
    """
    into, read = corner_of(copy.into, shape), corner_of(copy.start, full_shape)
    sizes, lengths = [1] * len(shape), [1] * len(full_shape)
    dims: list[int | None] = [None] * len(full_shape)
    for run in copy.runs:
        size, step, stride = run.size, run.into, run.stride
        while size > 1:
            here, there = _dim_of(step, size, shape), _dim_of(stride, size, full_shape)
            if here is None or there is None:
                return None
            taken = min(size, shape[here], full_shape[there])
            # A run may cross dimensions that are whole on both sides: (C, 1, K) is the same as (C, K).
            if size % taken or sizes[here] != 1 or lengths[there] != 1:
                return None
            sizes[here], lengths[there], dims[there] = taken, taken, here
            size, step, stride = size // taken, step * taken, stride * taken
    boxes = Boxes(
        into=tuple(zip(into, sizes, strict=True)), read=tuple(zip(read, lengths, strict=True)), dims=tuple(dims)
    )
    pairs = (*zip(boxes.into, shape, strict=True), *zip(boxes.read, full_shape, strict=True))
    return boxes if all(start + length <= size for (start, length), size in pairs) else None


def pieces_of(copy: Copy, shape: tuple[int, ...], full_shape: tuple[int, ...]) -> list[Boxes] | None:
    """Split a copy into boxes whose dimensions have the same order on both sides; None if that takes too many.

    A stack of matrices may be transposed: then the last two dimensions of its box change places.

    Heads of queries, keys and values that alternate in a checkpoint become one box each.
    """
    boxes = boxes_of(copy, shape, full_shape)
    if boxes is not None:
        dims = [dim for dim in boxes.dims if dim is not None]
        return [boxes] if dims == sorted(dims) or boxes.is_transposed else None
    outer = next(iter(copy.runs), None)
    if outer is None or outer.size > _MAX_PIECES:
        return None
    found: list[Boxes] = []
    for index in range(outer.size):
        piece = copy._replace(
            into=copy.into + index * outer.into, start=copy.start + index * outer.stride, runs=copy.runs[1:]
        )
        boxes_of_piece = pieces_of(piece, shape, full_shape)
        if boxes_of_piece is None or len(found) + len(boxes_of_piece) > _MAX_PIECES:
            return None
        found += boxes_of_piece
    return found


def written_by(copy: Copy, shape: tuple[int, ...]) -> list[tuple[Range, ...]] | None:
    """Return the boxes of a parameter that a copy writes; None if there are too many."""
    runs = tuple(run._replace(stride=run.into) for run in copy.runs)
    pieces = pieces_of(copy._replace(start=copy.into, runs=runs), shape, shape)
    return None if pieces is None else [piece.into for piece in pieces]


def fault_of_cover(boxes: Sequence[tuple[Range, ...]], shape: tuple[int, ...]) -> str | None:
    """Say why `boxes` do not cover every element of `shape` exactly once; None if they do."""
    num_bare, num_twice = count_cover(boxes, shape)
    if num_twice:
        return f"{num_twice} of its {prod(shape)} elements are loaded twice"
    return f"{num_bare} of its {prod(shape)} elements are not loaded from any checkpoint tensor" if num_bare else None


def count_cover(boxes: Sequence[tuple[Range, ...]], shape: tuple[int, ...]) -> tuple[int, int]:
    """Count the elements of `shape` in none of `boxes`, and those in several."""
    if len(boxes) == 1:
        return prod(shape) - prod(size for _, size in boxes[0]), 0
    borders = [
        sorted({0, size, *(start for start, _ in ranges), *(start + length for start, length in ranges)})
        for size, ranges in zip(shape, zip(*boxes, strict=True) if boxes else [()] * len(shape), strict=True)
    ]
    cells = torch.zeros([len(marks) - 1 for marks in borders], dtype=torch.int32, device="cpu")
    places = [{mark: place for place, mark in enumerate(marks)} for marks in borders]
    for box in boxes:
        ends = [(place[start], place[start + length]) for place, (start, length) in zip(places, box, strict=True)]
        cells[tuple(slice(*end) for end in ends)] += 1
    if bool((cells == 1).all()):
        return 0, 0
    sizes = torch.ones((), dtype=torch.int64, device="cpu")
    for marks in borders:
        sizes = sizes[..., None] * torch.tensor([end - start for start, end in pairwise(marks)], device="cpu")
    return int(sizes[cells == 0].sum()), int(sizes[cells > 1].sum())


def corner_of(place: int, shape: tuple[int, ...]) -> list[int]:
    """Return the coordinates of an element of a row-major tensor."""
    return [place // stride % size if size else 0 for stride, size in zip(row_major(shape), shape, strict=True)]


def _dim_of(stride: int, size: int, shape: tuple[int, ...]) -> int | None:
    """The dimension whose neighbouring elements are `stride` apart."""
    for dim, found in enumerate(row_major(shape)):
        if found == stride and shape[dim] > 1:
            return dim
    return None


@lru_cache(maxsize=4096)
def are_whole(runs: tuple[Run, ...], shape: tuple[int, ...]) -> bool:
    """Whether runs that start at a dense tensor's first element cover all of its elements, in any order."""
    end = 1
    for run in sorted(runs, key=lambda run: run.stride):
        if run.stride == end:
            end *= run.size
        elif run.stride:
            return False
    return end == prod(shape)


def ranges_of(places: Iterable[int]) -> list[Range]:
    """Return sorted numbers as ranges: their first numbers and lengths."""
    groups = groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    return [(stretch[0][1], len(stretch)) for _, group in groups if (stretch := list(group))]
