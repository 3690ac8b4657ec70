"""Tensors in runs of rows: what is larger than a bucket goes piece by piece, and no block of a weight is cut."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from torch import Tensor

from fp8refit.slots import TensorMeta
from fp8refit.sources import Source, check_readable

BLOCK_ROWS = 128
"""Rows of one block of a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some rows of a tensor, or all of them."""

    name: str
    """Checkpoint name of the whole tensor."""
    first_row: int
    tensor: Tensor
    full_shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return tuple(self.tensor.shape) == self.full_shape

    @property
    def end_row(self) -> int:
        """The first row after it."""
        return self.first_row + (self.tensor.shape[0] if self.tensor.ndim else 1)


@runtime_checkable
class InPieces(Protocol):
    """A source that gives large tensors in runs of rows, which it need not hold whole."""

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Everything once, cut as `cut` does: the pieces of one tensor one after another, in order of their rows."""
        ...


def in_pieces(source: Source, max_bytes: int) -> Iterator[Piece]:
    """Read a source once, its large tensors in runs of rows. See `cut` for how large they are.

    Raises:
        InvalidSourceError: A tensor has no bytes here.
    """
    if isinstance(source, InPieces):
        for piece in source.pieces(max_bytes):
            check_readable(piece.name, piece.tensor)
            yield piece
            del piece
        return
    for name, tensor in source:
        check_readable(name, tensor)
        yield from cut(name, tensor, max_bytes)


def cut(
    name: str, tensor: Tensor, max_bytes: int, *, first_row: int = 0, full_shape: tuple[int, ...] | None = None
) -> Iterator[Piece]:
    """Views of `tensor`, each of at most `max_bytes` if rows of blocks are no larger.

    Args:
        name: Of the whole tensor.
        tensor: All of it, or rows of it.
        max_bytes: Of a piece. Those of a matrix begin at multiples of 128 rows; those of a stack of experts are experts.
        first_row: The first row of `tensor` in the whole.
        full_shape: Of the whole, if `tensor` is not all of it.
    """
    full_shape = full_shape if full_shape is not None else tuple(tensor.shape)
    for start, count in row_ranges(TensorMeta.of(tensor), max_bytes):
        rows = tensor.narrow(0, start, count) if tensor.ndim else tensor
        yield Piece(name=name, first_row=first_row + start, tensor=rows, full_shape=full_shape)


def row_ranges(meta: TensorMeta, max_bytes: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece of a tensor.

    A piece has at most `max_bytes`, unless one row of blocks, or one row of what is no matrix, has more.
    """
    if prod(meta.shape) * meta.dtype.itemsize <= max_bytes or not meta.shape:
        yield 0, meta.shape[0] if meta.shape else 1
        return
    row_bytes = prod(meta.shape[1:]) * meta.dtype.itemsize
    step = BLOCK_ROWS if len(meta.shape) == 2 else 1
    rows = max(max_bytes // row_bytes // step, 1) * step
    for first in range(0, meta.shape[0], rows):
        yield first, min(rows, meta.shape[0] - first)
