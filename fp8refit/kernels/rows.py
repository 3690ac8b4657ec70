"""Computes, on the host, the rows of a table that kernels walk.

A `Row` is one matrix of one task, and rows are sorted by source. A tile is the work of one program, and a second array says
which row each tile belongs to. The tiles of one kind of work are adjacent, in the order of their rows, so each kind takes
one launch, for all sources or for a range of them. Triton cannot know the alignment of a pointer that it reads from memory,
and would load one element at a time. Tasks whose addresses and rows are multiples of 16 bytes therefore form kinds of their
own, whose kernel is told so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from fp8refit.kernels.products import ALIGNED, ProductKind, fields_of, kind_of
from fp8refit.kernels.work import ALIGNMENT_BYTES, Task, assert_is_writable, is_empty
from fp8refit.live.formats import WHOLE, BlockFormat, Placement
from fp8refit.live.slots import Op

COPY_TILE = 2048
"""Elements that one program copies."""
_ROW_TILE = 1 << 12
"""Elements that a program loads at once: of several rows if they are short, or a part of one."""
_MOST_PARTS = 8
"""Parts of the longest row that a program holds; it reads longer ones twice."""
_TURNED_TILE = 16, 1 << 8
"""Rows and columns that a program loads at once of rows that lie as columns in memory."""
_GROUPS_TILE = 64, 128
"""Rows and columns that a program loads at once of a matrix with several scales per row."""
_GROUPS = 16, 32, 64, 128
"""How many columns such a scale may stand for."""
_SHARED_TILE = 128, 128
"""Rows and columns that a program loads at once of a matrix whose scale is shared."""
_MERGE_BLOCK = 128, 128
"""The only block size of tasks with products: a program computes the product for one block."""


class Row(NamedTuple):
    """The fields of one row: addresses, sizes, and strides of rows and columns."""

    source: int
    target: int
    scale: int
    rows: int
    cols: int
    source_row: int
    source_col: int
    target_row: int
    scale_row: int
    first_tile: int
    tiles_per_row: int
    task: int
    first_col: int
    """Where the target's columns begin in the box, which may be wider."""
    target_cols: int
    maximum: int = 0
    """The address of the largest magnitude from which a shared scale follows."""
    global_scale: int = 0
    """The address of the scale of the whole weight, if scales have two levels."""
    own_maximum: int = 0
    """The address of the largest magnitude of the rank's own slice."""


FIELDS = Row._fields
NUM_FIELDS = len(FIELDS)
SOURCE, ROWS, FIRST_TILE, TILES_PER_ROW, TASK = map(
    FIELDS.index, ("source", "rows", "first_tile", "tiles_per_row", "task")
)


class RowTile(NamedTuple):
    """What a program loads at once, if it quantizes rows with one scale each."""

    rows: int
    cols: int
    parts: int
    """In how many parts of `cols` columns it holds whole rows. 0 if it reads them twice: for the maxima, and for the codes."""


class Kind(NamedTuple):
    """What all rows of one launch have in common: the constants its kernel is compiled for."""

    op: Op
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    format: BlockFormat | None
    """That of codes or scales; None for copies that any format takes."""
    round_to_bf16: bool
    is_aligned: bool
    product: ProductKind | None = None
    """The kind of product that is added to the source first."""
    row_tile: RowTile | None = None
    """Set if it quantizes rows with one scale each."""

    @property
    def has_shared_scale(self) -> bool:
        """Whether it finds a maximum from which a shared scale follows, or quantizes with such a scale."""
        if self.format is None:
            return False
        return self.op is Op.MAXIMUM or (self.op is Op.QUANTIZE and self.format.is_shared)

    @property
    def has_groups(self) -> bool:
        """Whether it quantizes with several scales per row."""
        if self.op is not Op.QUANTIZE or self.format is None or self.product is not None:
            return False
        return self.format.has_groups and self.format.block_size[1] in _GROUPS

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one tile."""
        if self.has_shared_scale:
            return _SHARED_TILE
        if self.has_groups:
            return _GROUPS_TILE
        if self.op is not Op.QUANTIZE or self.format is None:
            return 1, COPY_TILE
        return (self.row_tile.rows, WHOLE) if self.row_tile is not None else self.format.block_size


@dataclass(kw_only=True, slots=True)
class Rows:
    """Rows of a matrix, before their tiles are numbered."""

    kinds: list[Kind]
    fields: np.ndarray
    """(rows, fields) int64."""
    byte_offsets: np.ndarray
    """Where the box of each row starts in its source."""
    places: np.ndarray
    """The place of each row's source, ascending."""
    alignment: np.ndarray
    """The address of each row's source, modulo the alignment of loads."""
    products: np.ndarray
    """The product added to each row's whole source; see `fields_of`."""
    starts: np.ndarray
    """Where each row's box starts in its source; see `of_boxes`."""
    num_tasks: int
    num_places: int


@torch.no_grad()
def can_merge(task: Task) -> bool:
    """Whether tables take a task with its product: it quantizes in blocks of 128 x 128, and everything is aligned."""
    product, source, target = task.product, task.source, task.target
    if product is None or task.format is None or task.op is not Op.QUANTIZE or task.select or task.is_transposed:
        return False
    if (
        task.format.block_size != _MERGE_BLOCK
        or kind_of(source, product.up, product.down) is None
        or task.offset[1] % ALIGNED
    ):
        return False
    boxes = () if is_empty(task) else (task.box(source), target)
    return all(_is_aligned(box.data_ptr(), *box.shape, *box.stride()) for box in boxes)


def rows_of_all(tasks: Sequence[Task], places: Sequence[int], num_places: int | None) -> Rows:
    """The rows of all tasks, in the order of their places."""
    found = sorted(
        (
            (place, row)
            for index, (task, place) in enumerate(zip(tasks, places, strict=True))
            for row in _rows_of(index, task)
        ),
        key=lambda each: each[0],
    )
    fields = np.array([row for _, (_, row, _) in found], dtype=np.int64).reshape(-1, NUM_FIELDS)
    byte_offsets = np.array([offset for _, (_, _, offset) in found], dtype=np.int64)
    products = [tasks[row.task].product for _, (_, row, _) in found]
    starts = np.zeros((len(found), 2), dtype=np.int64)
    for number, (_, (_, row, _)) in enumerate(found) if any(products) else ():
        starts[number] = _start_of(tasks[row.task])
    return Rows(
        kinds=[kind for _, (kind, _, _) in found],
        fields=fields,
        byte_offsets=byte_offsets,
        places=np.array([place for place, _ in found], dtype=np.int64),
        alignment=(fields[:, SOURCE] - byte_offsets) % ALIGNMENT_BYTES,
        products=fields_of(products),
        starts=starts,
        num_tasks=len(tasks),
        num_places=max(places, default=-1) + 1 if num_places is None else num_places,
    )


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of several tables, with their tasks and places one after another."""
    first_tasks = np.cumsum([0, *(part.num_tasks for part in parts)])
    first_places = np.cumsum([0, *(part.num_places for part in parts)])
    fields = [part.fields.copy() for part in parts]
    for own, first_task in zip(fields, first_tasks, strict=False):
        own[:, TASK] += first_task
    places = [part.places + first for part, first in zip(parts, first_places, strict=False)]
    return Rows(
        kinds=[kind for part in parts for kind in part.kinds],
        fields=np.concatenate(fields),
        byte_offsets=np.concatenate([part.byte_offsets for part in parts]),
        places=np.concatenate(places),
        alignment=np.concatenate([part.alignment for part in parts]),
        products=np.concatenate([part.products for part in parts]),
        starts=np.concatenate([part.starts for part in parts]),
        num_tasks=int(first_tasks[-1]),
        num_places=int(first_places[-1]),
    )


def by_place(rows: Rows, values: np.ndarray) -> np.ndarray:
    """What the source of each place has, (places, ...) int64, from what its rows have; zeros if it has no rows."""
    found = np.zeros((rows.num_places, *values.shape[1:]), dtype=np.int64)
    found[rows.places] = values
    return found


def number_tiles(rows: Rows) -> tuple[np.ndarray, list[tuple[Kind, list[int]]]]:
    """Set the first tile of every row.

    Returns:
        The row of every tile, (tiles,) int32; and every kind, in the order of the launches, with its first tiles: for each row
        and the end, the first tile of this kind that belongs to it or to a later row.
    """
    by_kind: dict[Kind, list[int]] = {}
    for number, kind in enumerate(rows.kinds):
        by_kind.setdefault(kind, []).append(number)
    tile_rows, kinds, next_tile = [np.zeros(0, dtype=np.int64)], [], 0
    # Maxima before what needs them; then long launches, so that the short ones are queued while they run.
    for kind in sorted(by_kind, key=lambda kind: (kind.op is not Op.MAXIMUM, kind.op is not Op.QUANTIZE, repr(kind))):
        numbers, counts = np.array(by_kind[kind]), np.zeros(len(rows.kinds), dtype=np.int64)
        counts[numbers] = rows.fields[numbers, TILES_PER_ROW] * -(-rows.fields[numbers, ROWS] // kind.tile[0])
        firsts = next_tile + np.concatenate([[0], np.cumsum(counts)])
        rows.fields[numbers, FIRST_TILE] = firsts[numbers]
        tile_rows.append(np.repeat(np.arange(len(counts)), counts))
        kinds.append((kind, firsts.tolist()))
        next_tile = int(firsts[-1])
    return np.concatenate(tile_rows).astype(np.int32), kinds


def _rows_of(index: int, task: Task) -> list[tuple[Kind, Row, int]]:
    """The table rows of one task: kind, row, and the byte offset of the row's box in the source tensor."""
    assert_is_writable(task)
    for tensor in (task.target, task.scale):
        if tensor is not None and tensor.ndim and tensor.stride(-1) != 1:
            assert tensor.shape[-1] <= 1, f"{task.op=} {tensor.shape=} {tensor.stride()=}"
    if is_empty(task):
        return []
    box, has_rows = task.box(task.source), False
    if task.op is Op.QUANTIZE:
        assert task.scale is not None and task.format is not None and box.ndim == 2, f"{task=}"
        has_rows = task.format.has_rows
        has_kernel = (
            has_rows
            or (task.format.is_shared and task.maximum is not None)
            or (WHOLE not in task.format.block_size and task.columns is None)
        )
        needs_groups = task.format.scale_format.dtype is not torch.float32 or task.format.is_tiled
        has_kernel = has_kernel and (task.format.block_size[1] in _GROUPS or not needs_groups)
        assert has_kernel, f"{task.format}: no kernel takes one maximum of so many values"
        pieces = [(box, _as_matrix(task.target, task.format))]
    elif task.op is Op.MAXIMUM:
        pieces = [(box, task.target.view(1, 1))]
    else:
        pieces = _as_matrices(box, task.target)
    rows, is_quantize = [], task.op in (Op.QUANTIZE, Op.MAXIMUM)
    first_col = 0 if task.columns is None else task.columns[1]
    scale_at, scale_row = (0, 0) if task.scale is None else (task.scale.data_ptr(), task.scale.stride(0))
    for source, target in pieces:
        (num_rows, num_cols), strides, target_strides = source.shape, source.stride(), target.stride()
        source_at, target_at = source.data_ptr(), target.data_ptr()
        kind = Kind(
            op=task.op,
            source_dtype=source.dtype,
            target_dtype=target.dtype,
            format=task.format if task.op in (Op.QUANTIZE, Op.MAXIMUM, Op.COPY_SCALES) else None,
            round_to_bf16=is_quantize and source.dtype is torch.float32 and task.round_to_bf16,
            is_aligned=first_col % 16 == 0
            and _is_aligned(source_at, num_rows, num_cols, *strides)
            and (task.op is Op.MAXIMUM or _is_aligned(target_at, *target.shape, *target_strides)),
            product=_product_kind(task),
            row_tile=_row_tile(num_cols, strides) if has_rows else None,
        )
        row = Row(
            source=source_at,
            target=target_at,
            scale=scale_at,
            rows=num_rows,
            cols=num_cols,
            source_row=strides[0],
            source_col=strides[1],
            target_row=target_strides[0],
            scale_row=scale_row,
            first_tile=0,
            tiles_per_row=-(-num_cols // kind.tile[1]),
            task=index,
            first_col=first_col,
            target_cols=target.shape[1],
            maximum=0 if task.maximum is None else task.maximum.data_ptr(),
            global_scale=0 if task.global_scale is None else task.global_scale.data_ptr(),
            own_maximum=0 if task.own_maximum is None else task.own_maximum.data_ptr(),
        )
        rows.append((kind, row, source_at - task.source.data_ptr()))
    return rows


def _as_matrix(target: Tensor, block_format: BlockFormat) -> Tensor:
    """The codes of a matrix as two dimensions: rows, or rows of tiles, lie a stride of the first apart."""
    match block_format.placement:
        case Placement.ROW_MAJOR:
            return target
        case Placement.MARLIN:
            return target.flatten(1)
        case _:
            assert_never(block_format.placement)


def _row_tile(cols: int, strides: Sequence[int]) -> RowTile:
    """How a program loads rows of `cols` columns."""
    if strides[1] != 1 and strides[0] == 1:
        rows, width = _TURNED_TILE
    else:
        width = min(max(16, 1 << (cols - 1).bit_length()), _ROW_TILE)
        rows = _ROW_TILE // width
    parts = -(-cols // width)
    return RowTile(rows=rows, cols=width, parts=parts if parts <= _MOST_PARTS else 0)


def _product_kind(task: Task) -> ProductKind | None:
    if task.product is None:
        return None
    kind = kind_of(task.source, task.product.up, task.product.down)
    assert kind is not None, "it was asked whether it can be merged"
    return kind


def _start_of(task: Task) -> tuple[int, int]:
    """First row and first column of a task's box, times the size of an element of `up` and of `down`; see `of_boxes`."""
    if task.product is None:
        return 0, 0
    row, col = task.offset
    return row * task.product.up.itemsize, col * task.product.down.itemsize


def _as_matrices(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of 2-D views that together cover two tensors of one shape, as few and as wide as their strides allow."""
    if source.is_contiguous() and target.is_contiguous():
        return [(source.reshape(1, -1), target.view(1, -1))]
    if source.ndim == 1:
        return [(source[None], target[None])]
    if source.ndim == 2:
        return [(source, target)]
    return [pair for part, place in zip(source, target, strict=True) for pair in _as_matrices(part, place)]


def _is_aligned(address: int, rows: int, cols: int, row_stride: int, col_stride: int) -> bool:
    """Whether rows are dense and every row starts and ends on a multiple of 16 bytes and of 16 elements."""
    return (
        (col_stride == 1 or cols == 1)
        and address % ALIGNMENT_BYTES == 0
        and cols % 16 == 0
        and (rows == 1 or row_stride % 16 == 0)
    )
