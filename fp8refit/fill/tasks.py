"""Turns steps of a plan into tasks for the kernels, and finds scales that do not fit their slots."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.fill.kernels import Task
from fp8refit.fill.kernels.products import LowRank
from fp8refit.fill.kernels.reference_table import fits_scale_format
from fp8refit.fill.plan import Step
from fp8refit.fill.row_tasks import rows_of
from fp8refit.live.slots import Op, ScaleFormat, Slot


def bind(step: Step, slot: Slot, source: Tensor, config: RefitConfig, product: LowRank | None = None) -> Task:
    """Return the task that carries out `step` on `source`, and adds `product` to it, for all of `slot`."""
    target = slot.scale if step.op is Op.COPY_SCALES else slot.weight
    assert target is not None, f"{step=}"
    if not step.shape:
        target = target.view(())
    return Task(
        op=step.op,
        source=source,
        offset=step.offset,
        target=target,
        scale=slot.scale if step.op is Op.QUANTIZE else None,
        block_size=slot.block_size,
        scale_format=required_format(slot, config) if step.op is Op.COPY_SCALES else slot.scale_format,
        round_to_bf16=config.fp32_sources == "round_to_bf16" and not slot.is_optional,
        select=step.select,
        is_transposed=step.is_transposed,
        product=product,
    )


def required_format(slot: Slot, config: RefitConfig) -> ScaleFormat:
    """The scale format that `slot` needs of a tensor that is already FP8."""
    return ScaleFormat.FP32 if config.on_scale_mismatch == "copy" else slot.scale_format


def misfit_scales(
    steps: Sequence[Step], slots: Sequence[Slot], named_tensors: Iterable[tuple[str, Tensor]]
) -> list[str]:
    """Return one line per scale tensor that does not fit its slot. Reads the tensors, writes nothing."""
    formats = {step.source: slots[step.slot].scale_format for step in steps if step.op is Op.COPY_SCALES}
    return [
        scale_problem(name, formats[name])
        for name, tensor in named_tensors
        if name in formats and not bool(fits_scale_format(tensor.to(torch.float32), formats[name]).all())
    ]


def scale_problem(name: str, scale_format: ScaleFormat) -> str:
    """Say why a scale tensor does not fit a slot of `scale_format`."""
    if not scale_format.has_powers_of_two:
        return f"{name}: holds scales that are not finite and positive"
    return (
        f"{name}: holds scales that are not powers of two, which this layer's kernel needs; quantize with "
        'scale_format="ue8m0", boot the engine with kernels that take any scale, or write them anyway with '
        'on_scale_mismatch="copy"'
    )


def split(task: Task, num_bytes: int) -> Iterator[Task]:
    """Cut a task into ranges of rows that fit into `num_bytes`."""
    length = task.target.shape[0] if task.target.ndim else 1
    row_bytes = prod(task.target.shape[1:]) * task.source.element_size()
    if length * row_bytes <= num_bytes or task.target.ndim == 0:
        yield task
        return
    step = task.block_size[0] if task.op is Op.QUANTIZE else 1
    rows = max(num_bytes // row_bytes // step, 1) * step
    for start in range(0, length, rows):
        yield rows_of(task, start, min(rows, length - start))
