"""Splits tensors that are larger than a bucket into runs of rows, without cutting through blocks."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from fp8refit.kernels.products import LowRank
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.pairs import check_readable
from fp8refit.sources.source import Source

BLOCK_ROWS = 128
"""Rows per block of a weight."""


@dataclass(kw_only=True, slots=True)
class _Run:
    """Some or all rows of a tensor. Not frozen: a stream makes one per tensor, which would take three times as long."""

    name: str
    """Checkpoint name of the whole tensor."""
    first_row: int
    tensor: Tensor
    """The rows. Those of a `Recipe` have the right shape, dtype and device, but not yet the right values."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return tuple(self.tensor.shape) == self.full_shape


@dataclass(kw_only=True, slots=True)
class Piece(_Run):
    """Some or all rows of a tensor."""

    @property
    def end_row(self) -> int:
        """The row after its last one."""
        return self.first_row + (self.tensor.shape[0] if self.tensor.ndim else 1)


@dataclass(kw_only=True, slots=True, eq=False)
class Recipe(_Run):
    """Some or all rows of a tensor that its source still has to compute; see `MakesPieces`."""

    def piece(self, out: Tensor) -> Piece:
        """The rows, once they are made in `out`."""
        return Piece(name=self.name, first_row=self.first_row, tensor=out, full_shape=self.full_shape)

    @property
    def product(self) -> LowRank | None:
        """The product to add to `tensor`, for readers that add it themselves; None if more than that has to be done."""
        return None

    def cut(self, max_bytes: int) -> "Iterator[Recipe]":
        """Yield recipes of its rows, split as by `cut`."""
        if self.tensor.nbytes <= max_bytes:
            yield self
            return
        for each in cut(
            self.name, self.tensor.detach(), max_bytes, first_row=self.first_row, full_shape=self.full_shape
        ):
            yield replace(self, first_row=each.first_row, tensor=each.tensor)


AnyRun = TypeVar("AnyRun", Piece, Piece | Recipe)


@runtime_checkable
class MakesPieces(Protocol):
    """A source that can compute pieces in its reader's memory, many at once."""

    def recipes(self, max_bytes: int) -> Iterator[Piece | Recipe]:
        """Yield everything once, split as by `cut`: recipes for what has to be computed, and pieces, which stay valid until the
        source has been read.
        """
        ...

    def make(self, recipes: Sequence[Recipe], outs: Sequence[Tensor]) -> None:
        """Compute recipes into contiguous memory, on the current stream."""
        ...


@runtime_checkable
class InPieces(Protocol):
    """A source that can yield large tensors in runs of rows, without holding them whole."""

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """Yield everything once, split as by `cut`: the pieces of a tensor follow each other in row order."""
        ...


def in_recipes(source: Source, max_bytes: int) -> Generator[Piece | Recipe, None, None]:
    """`in_pieces` for readers with memory of their own: recipes of what has to be computed, if the source gives any.

    Raises:
        InvalidSourceError: A tensor has no readable bytes.
    """
    if isinstance(source, MakesPieces):
        yield from _checked(source.recipes(max_bytes))
    else:
        yield from in_pieces(source, max_bytes)


def in_pieces(source: Source, max_bytes: int) -> Generator[Piece, None, None]:
    """Read a source once, with large tensors in runs of rows, sized as by `cut`.

    Raises:
        InvalidSourceError: A tensor has no readable bytes.
    """
    if isinstance(source, InPieces):
        yield from _checked(source.pieces(max_bytes))
        return
    for name, tensor in source:
        check_readable(name, tensor)
        yield from cut(name, tensor, max_bytes)


def _checked(runs: Iterator[AnyRun]) -> Generator[AnyRun, None, None]:
    for run in runs:
        check_readable(run.name, run.tensor)
        yield run
        del run  # nothing of it is held while the next one is made


def cut(
    name: str, tensor: Tensor, max_bytes: int, *, first_row: int = 0, full_shape: tuple[int, ...] | None = None
) -> Iterator[Piece]:
    """Yield views of `tensor`, each at most `max_bytes` unless one row of blocks is larger.

    Args:
        name: Name of the whole tensor.
        tensor: All of it, or some rows.
        max_bytes: Limit per piece. Pieces of a matrix begin at multiples of 128 rows; pieces of a stack are whole
            experts.
        first_row: Position of the first row of `tensor` in the whole.
        full_shape: Shape of the whole, if `tensor` is only a part.
    """
    full_shape = full_shape if full_shape is not None else tuple(tensor.shape)
    if tensor.nbytes <= max_bytes:
        yield Piece(name=name, first_row=first_row, tensor=tensor, full_shape=full_shape)
        return
    for start, count in row_ranges(TensorMeta.of(tensor), max_bytes):
        rows = tensor.narrow(0, start, count) if tensor.ndim else tensor
        yield Piece(name=name, first_row=first_row + start, tensor=rows, full_shape=full_shape)


def row_ranges(meta: TensorMeta, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first row and row count of each piece of a tensor.

    A piece has at most `max_bytes`, unless one row of blocks, or one row of a tensor that is not a matrix, is larger.
    """
    if meta.num_bytes <= max_bytes or not meta.shape:
        yield 0, meta.shape[0] if meta.shape else 1
        return
    row_bytes = prod(meta.shape[1:]) * meta.dtype.itemsize
    step = BLOCK_ROWS if len(meta.shape) == 2 else 1
    rows = max(max_bytes // row_bytes // step, 1) * step
    for first in range(0, meta.shape[0], rows):
        yield first, min(rows, meta.shape[0] - first)
