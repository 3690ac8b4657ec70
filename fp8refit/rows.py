"""What of a task can be done with some rows of its source: a tensor may come in runs of rows."""

from dataclasses import replace

from fp8refit.kernels import Task


def rows_of(task: Task, start: int, count: int) -> Task:
    """The part of a task that writes `count` rows of its target from `start` on, where a row of blocks begins."""
    scale = task.scale
    if scale is not None:
        block = task.block_size[0]
        assert start % block == 0, f"{start=} {block=}"
        scale = scale.narrow(0, start // block, -(-count // block))
    offset = (task.offset[0] + start, *task.offset[1:])
    return replace(task, offset=offset, target=task.target.narrow(0, start, count), scale=scale)


def cut_to_run(task: Task, first_row: int, num_rows: int) -> Task | None:
    """What of a task can be done with a run of rows of its source; None if nothing.

    Args:
        task: Its source is the run already; `offset` and `select` are those in the whole tensor.
        first_row: Of the run. It cuts no block of the task's.
        num_rows: Of the run.
    """
    if task.select:
        index = task.select[0] - first_row
        return replace(task, select=(index, *task.select[1:])) if 0 <= index < num_rows else None
    start, end = task.offset[0], task.offset[0] + task.target.shape[0]
    low, high = max(start, first_row), min(end, first_row + num_rows)
    if low >= high:
        return None
    part = rows_of(task, low - start, high - low)
    return replace(part, offset=(low - first_row, *task.offset[1:]))
