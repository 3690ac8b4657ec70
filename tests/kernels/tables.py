"""Tasks for a work table, run by the Triton kernels and by the reference."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fp8refit.kernels import triton_table
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.kernels.work import Action, Task
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.slots import FP8_DTYPE, Op


def quantize_task(
    source: Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    scale_format: ScaleFormat = ScaleFormat.FP32,
    round_to_bf16: bool = False,
    offset: tuple[int, int] = (0, 0),
    shape: tuple[int, int] | None = None,
) -> Task:
    """A task that quantizes the box of `shape` at `offset` into new storage full of rubbish."""
    rows, cols = shape if shape is not None else source.shape
    block_format = BlockFormat(scale_format=scale_format, block_size=block_size)
    grid = block_format.scale_shape((rows, cols))
    return Task(
        op=Op.QUANTIZE,
        source=source,
        offset=offset,
        target=torch.full((rows, cols), 0x55, dtype=torch.uint8, device=source.device).view(FP8_DTYPE),
        scale=torch.full(grid, 7, dtype=scale_format.dtype, device=source.device),
        format=block_format,
        round_to_bf16=round_to_bf16,
    )


def copy_task(source: Tensor, dtype: torch.dtype | None = None, op: Op = Op.COPY, **fields: object) -> Task:
    """A task that copies all of `source` into new storage of `dtype`."""
    target = torch.zeros(source.shape, dtype=dtype if dtype is not None else source.dtype, device=source.device)
    usual = {"source": source, "offset": (0,) * source.ndim, "target": target, "format": BlockFormat()}
    return Task(**usual | {"op": op} | fields)


def record_launches(monkeypatch, on_compile: Callable[[], None] = lambda: None) -> list[Op]:
    """Launch no kernel of tables from now on; gives the kinds of work that would have been launched.

    `on_compile` is called when one would have been compiled ahead.
    """
    recorded: list[Op] = []

    class Recorder:
        def __init__(self, kind, *_, **__):
            self.kind = kind

        def compile_for_tiles(self, *_):
            on_compile()

        def launch_tiles(self, *_):
            recorded.append(self.kind.op)

    monkeypatch.setattr(triton_table, "launch_of", Recorder)
    return recorded


def twin(task: Task) -> Task:
    """The same task on copies of its targets, laid out alike."""
    scale, over_all = (None if held is None else clone_view(held) for held in (task.scale, task.global_scale))
    return replace(task, target=clone_view(task.target), scale=scale, global_scale=over_all)


def clone_view(tensor: Tensor) -> Tensor:
    """A view like `tensor` on a copy of all of its storage."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage().clone())
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def storage_bytes(tensor: Tensor) -> bytes:
    """Every byte of the storage under `tensor`, its neighbours too."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return memory.cpu().numpy().tobytes()


def assert_same_as_reference(tasks: list[Task], *, check: bool = True, action: Action = Action.WRITE) -> list[int]:
    """Run `tasks` by Triton and twins of them by the reference; every byte is equal. Gives the flagged tasks."""
    twins = [twin(task) for task in tasks]
    table, reference = TritonTable(tasks, tasks[0].target.device), ReferenceTable(twins)
    table.launch(check=check, action=action)
    reference.launch(check=check, action=action)
    bad = table.bad_tasks()
    assert bad == reference.bad_tasks()
    for index, (task, expected) in enumerate(zip(tasks, twins, strict=True)):
        if index in bad and task.op is Op.QUANTIZE:
            continue  # the codes of a block with NaN mean nothing
        assert storage_bytes(task.target) == storage_bytes(expected.target), f"{index=} {task.op=}"
        if task.scale is not None and expected.scale is not None:
            assert storage_bytes(task.scale) == storage_bytes(expected.scale), f"{index=}"
        if task.global_scale is not None and expected.global_scale is not None:
            assert storage_bytes(task.global_scale) == storage_bytes(expected.global_scale), f"{index=}"
    return bad
