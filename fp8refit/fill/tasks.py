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
from fp8refit.live.slots import Op, Slot


class Maxima:
    """The largest magnitudes of which scales follow that several slots share: of each group of slots, and of each slot.

    Whoever starts a refit clears them. Steps that raise them come before those that quantize.

    Args:
        slots: The slots of an inventory.
        device: The slots' device.
    """

    def __init__(self, slots: Iterable[Slot], device: torch.device) -> None:
        self._slots = {_place_of(slot): place for place, slot in enumerate(s for s in slots if s.group is not None)}
        self._groups = {group: place for place, group in enumerate(dict.fromkeys(group for group, _ in self._slots))}
        with torch.inference_mode(False):  # tensors that can be written in any mode
            self._of_slots = torch.zeros(len(self._slots), dtype=torch.float32, device=device)
            self._of_groups = torch.zeros(len(self._groups), dtype=torch.float32, device=device)
            self._others = torch.zeros_like(self._of_groups)

    def of_slot(self, slot: Slot) -> Tensor | None:
        """The maximum (1,) float32 of a slot; None if it shares no scale."""
        return None if slot.group is None else self._of_slots.narrow(0, self._slots[_place_of(slot)], 1)

    def of_group(self, slot: Slot) -> Tensor | None:
        """The maximum (1,) float32 of a slot's group; None if it shares no scale."""
        return None if slot.group is None else self._of_groups.narrow(0, self._groups[slot.group], 1)

    def clear(self) -> None:
        """Forget what has been found, on the current stream."""
        if self._slots:
            self._of_slots.zero_()
            self._of_groups.copy_(self._others)

    def know(self, found: "Maxima") -> None:
        """Have groups count slots that are only in `found`, as an earlier refit found them."""
        for (group, weight), place in found._slots.items():
            if group in self._groups and (group, weight) not in self._slots:
                other = self._others.narrow(0, self._groups[group], 1)
                other.copy_(torch.maximum(other, found._of_slots.narrow(0, place, 1)))


def _place_of(slot: Slot) -> tuple[tuple[int, int], int]:
    """What identifies a slot that shares a scale."""
    assert slot.group is not None, f"{slot.name=}"
    return slot.group, slot.weight.data_ptr()


def bind(
    step: Step, slot: Slot, source: Tensor, config: RefitConfig, maxima: Maxima | None, product: LowRank | None = None
) -> Task:
    """Return the task that carries out `step` on `source`, and adds `product` to it, for all of `slot`."""
    target, block_format = slot.scale if step.op is Op.COPY_SCALES else slot.weight, slot.format
    if block_format is not None and step.op is Op.COPY_SCALES and config.on_scale_mismatch == "copy":
        block_format = replace(block_format, scale_format=ScaleFormat.FP32)
    maximum = None
    if maxima is not None and step.op in (Op.QUANTIZE, Op.MAXIMUM):
        maximum = maxima.of_group(slot)
    if step.op is Op.MAXIMUM and maxima is not None:
        target = maxima.of_slot(slot)
    assert target is not None, f"{step=}"
    if not step.shape:
        target = target.view(())
    return Task(
        op=step.op,
        source=source,
        offset=step.offset,
        target=target,
        scale=slot.scale if step.op is Op.QUANTIZE else None,
        format=block_format,
        round_to_bf16=config.fp32_sources == "round_to_bf16" and not slot.is_optional,
        select=step.select,
        is_transposed=step.is_transposed,
        columns=_columns(step, slot),
        maximum=maximum,
        box_shape=step.shape if step.op is Op.MAXIMUM else None,
        product=product,
    )


def _columns(step: Step, slot: Slot) -> tuple[int, int] | None:
    """See `Task.columns`: a step that quantizes may read whole blocks of which the slot holds a part."""
    if step.op is not Op.QUANTIZE or step.shape == slot.weight.shape:
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
        return f"{name}: holds scales that are not finite and positive"
    return (
        f"{name}: holds scales that are not powers of two, which this layer's kernel needs; quantize with "
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
    is_cut = task.op is Op.QUANTIZE and task.format is not None and not task.format.is_shared
    step = task.format.block_size[0] if is_cut and task.format is not None else 1
    rows = max(num_bytes // row_bytes // step, 1) * step
    for start in range(0, length, rows):
        yield rows_of(task, start, min(rows, length - start))
