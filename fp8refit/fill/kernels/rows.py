"""The rows of a table that kernels walk, computed on the host.

A row is one task (`FIELDS`), and rows lie in the order of their sources. A tile is what one program does, and a second array
says which row each tile belongs to. Tiles of one kind of work lie together, in the order of their rows, so that each kind is
one launch, for all sources or for some that follow each other. A pointer that is read from memory has no known alignment,
and loads through it would be scalar: tasks whose addresses and rows are multiples of 16 bytes form kinds of their own, for
which the kernel is told so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fp8refit.fill.kernels.work import ALIGNMENT_BYTES, Task, assert_is_writable, is_empty
from fp8refit.live.slots import Op, ScaleFormat

FIELDS = ("source", "target", "scale", "rows", "cols", "source_row", "source_col", "target_row", "scale_row",
           "first_tile", "tiles_per_row", "task")  # fmt: skip
NUM_FIELDS = len(FIELDS)
SOURCE, ROWS, FIRST_TILE, TILES_PER_ROW, TASK = map(
    FIELDS.index, ("source", "rows", "first_tile", "tiles_per_row", "task")
)

COPY_TILE = 2048
"""Elements that one program copies."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all rows of one launch have in common: the constants its kernel is compiled for."""

    op: Op
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    scale_format: ScaleFormat
    block_size: tuple[int, int]
    round_to_bf16: bool
    is_aligned: bool


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
    num_tasks: int
    num_places: int


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
    fields = np.zeros((len(found), NUM_FIELDS), dtype=np.int64)
    for number, (_, (_, values, _)) in enumerate(found):
        fields[number] = [values.get(name, 0) for name in FIELDS]
    byte_offsets = np.array([offset for _, (_, _, offset) in found], dtype=np.int64)
    return Rows(
        kinds=[kind for _, (kind, _, _) in found],
        fields=fields,
        byte_offsets=byte_offsets,
        places=np.array([place for place, _ in found], dtype=np.int64),
        alignment=(fields[:, SOURCE] - byte_offsets) % ALIGNMENT_BYTES,
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
        num_tasks=int(first_tasks[-1]),
        num_places=int(first_places[-1]),
    )


def source_addresses(rows: Rows) -> np.ndarray:
    """The source address of each place, (places,) int64; 0 if it has no rows."""
    addresses = np.zeros(rows.num_places, dtype=np.int64)
    addresses[rows.places] = rows.fields[:, SOURCE] - rows.byte_offsets
    return addresses


def in_order(kinds: Iterable[Kind]) -> list[Kind]:
    """Kinds in the order of their launches: quantization first."""
    return sorted(kinds, key=lambda kind: (kind.op is not Op.QUANTIZE, repr(kind)))


def number_tiles(rows: Rows) -> np.ndarray:
    """Set the first tile of every row, and return the row of every tile, (tiles,) int32."""
    tile_rows, next_tile = [], 0
    by_kind: dict[Kind, list[int]] = {}
    for number, kind in enumerate(rows.kinds):
        by_kind.setdefault(kind, []).append(number)
    for kind in in_order(by_kind):
        numbers = np.array(by_kind[kind])
        counts = rows.fields[numbers, TILES_PER_ROW] * -(-rows.fields[numbers, ROWS] // kind.block_size[0])
        ends = next_tile + np.cumsum(counts)
        rows.fields[numbers, FIRST_TILE] = ends - counts
        tile_rows.append(np.repeat(numbers, counts))
        next_tile = int(ends[-1])
    return np.concatenate(tile_rows).astype(np.int32) if tile_rows else np.zeros(0, dtype=np.int32)


def first_tiles(rows: Rows, kind: Kind) -> list[int]:
    """For each row and the end: the first tile of this kind that belongs to it or to a later row."""
    is_it = np.array([each == kind for each in rows.kinds])
    counts = np.where(is_it, rows.fields[:, TILES_PER_ROW] * -(-rows.fields[:, ROWS] // kind.block_size[0]), 0)
    first = int(rows.fields[is_it, FIRST_TILE].min())
    firsts: list[int] = (first + np.concatenate([[0], np.cumsum(counts)])).tolist()
    return firsts


def _rows_of(index: int, task: Task) -> list[tuple[Kind, dict[str, int], int]]:
    """The table rows of one task: kind, fields, and the byte offset of the row's box in the source tensor."""
    assert_is_writable(task)
    if is_empty(task):
        return []
    box = task.box(task.source.detach())
    if task.op is Op.QUANTIZE:
        assert task.scale is not None and box.ndim == 2, f"{task=}"
        pieces = [(box, task.target)]
    else:
        pieces = _as_matrices(box, task.target)
    rows = []
    for source, target in pieces:
        is_quantize = task.op is Op.QUANTIZE
        kind = Kind(
            op=task.op,
            source_dtype=source.dtype,
            target_dtype=target.dtype,
            scale_format=task.scale_format if task.op in (Op.QUANTIZE, Op.COPY_SCALES) else ScaleFormat.FP32,
            block_size=task.block_size if is_quantize else (1, COPY_TILE),
            round_to_bf16=is_quantize and source.dtype is torch.float32 and task.round_to_bf16,
            is_aligned=_is_aligned(source) and _is_aligned(target),
        )
        fields = {
            "source": source.data_ptr(),
            "target": target.data_ptr(),
            "scale": task.scale.data_ptr() if task.scale is not None else 0,
            "rows": source.shape[0],
            "cols": source.shape[1],
            "source_row": source.stride(0),
            "source_col": source.stride(1),
            "target_row": target.stride(0),
            "scale_row": task.scale.stride(0) if task.scale is not None else 0,
            "tiles_per_row": -(-source.shape[1] // kind.block_size[1]),
            "task": index,
        }
        rows.append((kind, fields, source.data_ptr() - task.source.data_ptr()))
    return rows


def _as_matrices(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of 2-D views that together cover two tensors of one shape, as few and as wide as their strides allow."""
    if source.is_contiguous() and target.is_contiguous():
        return [(source.reshape(1, -1), target.view(1, -1))]
    if source.ndim == 1:
        return [(source[None], target[None])]
    if source.ndim == 2:
        return [(source, target)]
    return [pair for part, place in zip(source, target, strict=True) for pair in _as_matrices(part, place)]


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows are dense and every row starts and ends on a multiple of 16 bytes and of 16 elements."""
    rows, cols = matrix.shape
    return (
        (matrix.stride(1) == 1 or cols == 1)
        and matrix.data_ptr() % ALIGNMENT_BYTES == 0
        and cols % 16 == 0
        and (rows == 1 or matrix.stride(0) % 16 == 0)
    )
