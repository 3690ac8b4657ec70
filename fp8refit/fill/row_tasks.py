"""Splits tasks by rows, for tensors that arrive in runs of rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from fp8refit.kernels import Task
from fp8refit.live.formats import MARLIN_TILE, BlockFormat, Placement
from fp8refit.live.slots import Op


def rows_of(task: Task, start: int, count: int) -> Task:
    """The part of a task that writes `count` rows of its target from `start`, which begins a row of blocks."""
    scale, offset = task.scale, (task.offset[0] + start, *task.offset[1:])
    if task.box_shape is not None:
        return replace(task, offset=offset, box_shape=(count, *task.box_shape[1:]))
    rows_dim, scale_dim, target_step, scale_step = _how_cut(task.format if task.op is Op.QUANTIZE else None)
    if scale is not None and task.format is not None and not task.format.is_shared:
        assert start % scale_step == 0, f"{start=} {scale_step=}"
        scale = scale.narrow(scale_dim, start // scale_step, -(-count // scale_step))
    target = task.target.narrow(rows_dim, start // target_step, -(-count // target_step))
    return replace(task, offset=offset, target=target, scale=scale)


def _how_cut(block_format: BlockFormat | None) -> tuple[int, int, int, int]:
    """Return the dimensions along which rows lie in a target and in its scales, and how many rows a step there is."""
    if block_format is None:
        return 0, 0, 1, 1
    match block_format.placement:
        case Placement.ROW_MAJOR:
            return 0, 0, 1, block_format.block_size[0]
        case Placement.MARLIN:
            return 1, 1, MARLIN_TILE[0], MARLIN_TILE[0]
        case _:
            assert_never(block_format.placement)


def cut_to_run(task: Task, first_row: int, num_rows: int) -> Task | None:
    """Cut a task to what a run of rows of its source can fill; None if that is nothing.

    Args:
        task: Its source is the run; `offset` and `select` refer to the whole tensor.
        first_row: First row of the run, which does not cut a block of the task.
        num_rows: Number of rows of the run.
    """
    if task.select:
        index = task.select[0] - first_row
        return replace(task, select=(index, *task.select[1:])) if 0 <= index < num_rows else None
    start, end = task.offset[0], task.offset[0] + task.shape[0]
    low, high = max(start, first_row), min(end, first_row + num_rows)
    if low >= high:
        return None
    part = rows_of(task, low - start, high - low)
    return replace(part, offset=(low - first_row, *task.offset[1:]))


class Seams:
    """Reassembles rows of blocks that runs of rows cut through, for slots whose blocks are not aligned to the tensor's.

    Holds less than one row of blocks per slot, while its tensor arrives.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def runs_of_blocks(
        self, slot: int, wanted: range, block_rows: int, first_row: int, rows: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield complete rows of blocks: first row, and rows.

        Args:
            slot: Index of the slot.
            wanted: Rows of the tensor that the slot holds; its first block begins at the first of them.
            block_rows: Height of a block.
            first_row: First row of the run.
            rows: The run, which must follow the last one.
        """
        low, high = max(first_row, wanted.start), min(first_row + rows.shape[0], wanted.stop)
        if low >= high:
            return
        kept = self._kept.pop(slot, None)
        if kept is not None:
            num_lacking = min(block_rows - kept.shape[0], high - low)
            kept = torch.cat([kept, rows[low - first_row : low - first_row + num_lacking]])
            low += num_lacking
            if kept.shape[0] < block_rows and low < wanted.stop:
                self._kept[slot] = kept
                return
            yield low - kept.shape[0], kept
        end = high if high == wanted.stop else high - (high - wanted.start) % block_rows
        if low < end:
            yield low, rows[low - first_row : end - first_row]
        if end < high:
            self._kept[slot] = rows[end - first_row : high - first_row].clone()
