"""Turns steps of a plan into tasks for the kernels, and finds scales that do not fit their slots."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.fill.plan import Step
from fp8refit.fill.row_tasks import rows_of
from fp8refit.kernels import Task
from fp8refit.kernels.products import LowRank
from fp8refit.kernels.reference_table import fits_scale_format
from fp8refit.live.formats import ScaleFormat
from fp8refit.live.slots import Op, Slot, alone, cut_groups


class Maxima:
    """The largest magnitudes of which scales follow that several slots share, one for each group of slots.

    Whoever starts a refit clears them. Steps that raise them come before those that quantize.

    Args:
        slots: The slots of an inventory.
        device: The slots' device.
    """

    def __init__(self, slots: Iterable[Slot], device: torch.device) -> None:
        slots = tuple(slots)
        groups = dict.fromkeys(slot.group for slot in slots if slot.group is not None)
        self._alone = alone(groups)
        self._cut = cut_groups(slots) if groups else frozenset[tuple[int, int]]()
        self._places = {group: place for place, group in enumerate(groups)}
        with torch.inference_mode(False):  # a tensor that can be written in any mode
            self._values = torch.zeros(2, len(groups), dtype=torch.float32, device=device)

    def of(self, slot: Slot) -> Tensor | None:
        """The maximum (1,) float32 of a slot's group; None if it has none."""
        return self._at(0, slot.group)

    def own_of(self, slot: Slot) -> Tensor | None:
        """That of what the rank holds of it. None for experts, which are whole: the scales of at least one reach 448."""
        group = slot.group
        return self._at(int(group in self._cut), group) if group in self._alone else None

    def _at(self, row: int, group: tuple[int, int] | None) -> Tensor | None:
        if group is None:
            return None
        place = self._places[group]
        return self._values[row, place : place + 1]

    def __bool__(self) -> bool:
        """Whether any slots share a scale."""
        return bool(self._places)

    def clear(self) -> None:
        """Forget what has been found, on the current stream."""
        if self._places:
            self._values.zero_()


def bind(
    step: Step,
    slot: Slot,
    source: Tensor,
    config: RefitConfig,
    maxima: Maxima | None = None,
    product: LowRank | None = None,
) -> Task:
    """Return the task that carries out `step` on `source`, and adds `product` to it, for all of `slot`."""
    target, block_format = slot.scale if step.op is Op.COPY_SCALES else slot.weight, slot.format
    if block_format is not None and step.op is Op.COPY_SCALES and config.on_scale_mismatch == "copy":
        block_format = replace(block_format, scale_format=ScaleFormat.FP32)
    maximum, own_maximum = (maxima.of(slot), maxima.own_of(slot)) if maxima else (None, None)
    if step.op.finds_maximum:
        target = maximum if step.op is Op.MAXIMUM else own_maximum
    assert target is not None, f"{step=}"
    if not step.shape:
        target = target.view(())
    return Task(
        op=Op.MAXIMUM if step.op.finds_maximum else step.op,
        source=source,
        offset=step.offset,
        target=target,
        scale=slot.scale if step.op is Op.QUANTIZE else None,
        global_scale=slot.global_scale if step.op is Op.QUANTIZE else None,
        format=block_format,
        round_to_bf16=config.fp32_sources == "round_to_bf16" and not slot.is_optional,
        select=step.select,
        is_transposed=step.is_transposed,
        columns=_columns(step, slot),
        maximum=maximum if step.op is Op.QUANTIZE else None,
        own_maximum=own_maximum if step.op is Op.QUANTIZE else None,
        box_shape=step.shape if step.op.finds_maximum else None,
        product=product,
    )


def _columns(step: Step, slot: Slot) -> tuple[int, int] | None:
    """See `Task.columns`: a step that quantizes may read whole blocks of which the slot holds a part."""
    if step.op is not Op.QUANTIZE or step.shape == slot.shape:
        return None
    return step.shape[-1], slot.origin[-1] - step.offset[-1]


def scale_formats(steps: Iterable[Step], slots: Sequence[Slot]) -> dict[str, ScaleFormat]:
    """The format of each tensor of scales that is copied to a slot, by name."""
    held = ((step.source, slots[step.slot].format) for step in steps if step.op is Op.COPY_SCALES)
    return {name: block_format.scale_format for name, block_format in held if block_format is not None}


def misfit_scales(
    steps: Sequence[Step], slots: Sequence[Slot], named_tensors: Iterable[tuple[str, Tensor]]
) -> list[str]:
    """Return one line per scale tensor that does not fit its slot. Reads the tensors, writes nothing."""
    formats = scale_formats(steps, slots)
    return [
        scale_problem(name, formats[name])
        for name, tensor in named_tensors
        if name in formats and not bool(fits_scale_format(tensor.to(torch.float32), formats[name]).all())
    ]


def scale_problem(name: str, scale_format: ScaleFormat) -> str:
    """Say why a scale tensor does not fit a slot of `scale_format`."""
    if not scale_format.has_powers_of_two:
        return f"{name}: holds scales that are not finite and positive, or above 2^120, where products overflow; quantize again"
    return (
        f"{name}: holds scales that are not powers of two, at most 2^120, which this layer's kernel needs; quantize with "
        'scale_format="ue8m0", boot the engine with kernels that take any scale, or write them anyway with '
        'on_scale_mismatch="copy"'
    )


def split(task: Task, num_bytes: int) -> Iterator[Task]:
    """Cut a task into ranges of rows that fit into `num_bytes`."""
    length = task.shape[0] if task.target.ndim else 1
    row_bytes = prod(task.shape[1:]) * task.source.element_size()
    if length * row_bytes <= num_bytes or task.target.ndim == 0:
        yield task
        return
    step = task.format.row_step if task.op is Op.QUANTIZE and task.format is not None else 1
    rows = max(num_bytes // row_bytes // step, 1) * step
    for start in range(0, length, rows):
        yield rows_of(task, start, min(rows, length - start))
