"""The specification of a work table, task by task in torch. It also serves as the table on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import assert_never

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.kernels.merge import add_product
from fp8refit.kernels.placement import put_codes, put_scales
from fp8refit.kernels.products import LowRank
from fp8refit.kernels.reference import (
    block_scales,
    global_scale_of,
    put_two_levels,
    quantize_reference,
    quantize_two_levels,
)
from fp8refit.kernels.work import Action, Task, WorkTable, assert_is_writable, is_empty
from fp8refit.live.formats import BlockFormat, Placement, ScaleFormat
from fp8refit.live.layout_guard import Addresses
from fp8refit.live.slots import Op


class ReferenceTable(WorkTable):
    """The specification, task by task in torch."""

    num_device_bytes = 0

    def __init__(
        self, tasks: Sequence[Task], places: Sequence[int] | None = None, *, num_places: int | None = None
    ) -> None:
        self._places = list(range(len(tasks)) if places is None else places)
        self._num_places = max(self._places, default=-1) + 1 if num_places is None else num_places
        self._sources: list[Tensor | None] = [None] * self._num_places
        self._products: list[LowRank | None] = [None] * self._num_places
        for task, place in zip(tasks, self._places, strict=True):
            assert_is_writable(task)
            self._sources[place] = task.source
            self._products[place] = task.product
        self._tasks = [replace(task, source=torch.empty(0, device="cpu"), product=None) for task in tasks]
        self._bad: set[int] = set()
        self._counts: dict[int, tuple[int, int]] = {}
        self._are_changes = False

    @classmethod
    def joined(cls, tables: Sequence[WorkTable]) -> "ReferenceTable":
        """Join tables of one device into one with the places of all, in order."""
        whole = cls([])
        for table in tables:
            assert isinstance(table, ReferenceTable), "all on one device"
            whole._places += [whole._num_places + place for place in table._places]
            whole._num_places += table._num_places
            whole._tasks += table._tasks
        whole.release()
        return whole

    @override
    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        self.forget_flags()
        self._sources = list(sources)
        return True

    @override
    def compile(self, *, check: bool, action: Action = Action.WRITE) -> None:
        return

    @torch.inference_mode()
    @override
    def launch(self, *, check: bool, action: Action = Action.WRITE, begun: torch.cuda.Event | None = None) -> None:
        for indexes_at in self._rounds:
            for place, indexes in indexes_at.items():
                source = self._sources[place]
                assert source is not None, "refreshed"
                self._run_all(indexes, _merge(source, self._products[place]), check=check, action=action)

    @torch.inference_mode()
    @override
    def run(
        self,
        first: int,
        sources: Sequence[Tensor],
        addresses: Addresses | None = None,
        *,
        products: Sequence[LowRank | None] = (),
        check: bool,
        action: Action = Action.WRITE,
    ) -> bool:
        for indexes_at in self._rounds:
            for number, source in enumerate(sources):
                indexes = indexes_at.get(first + number)
                if indexes:
                    product = products[number] if products else None
                    self._run_all(indexes, _merge(source, product), check=check, action=action)
        return True

    @cached_property
    def _rounds(self) -> tuple[dict[int, list[int]], ...]:
        """The tasks of each place: those that raise maxima, and then all others."""
        maxima: dict[int, list[int]] = {}
        others: dict[int, list[int]] = {}
        for index, place in enumerate(self._places):
            found = maxima if self._tasks[index].op is Op.MAXIMUM else others
            found.setdefault(place, []).append(index)
        return maxima, others

    def _run_all(self, indexes: Sequence[int], source: Tensor, *, check: bool, action: Action) -> None:
        """Run the tasks of one source."""
        self._are_changes = action is Action.COUNT
        for index in indexes:
            task = self._tasks[index]
            if is_empty(task):
                continue
            written = task if action is Action.WRITE or task.op is Op.MAXIMUM else _with_own_targets(task)
            is_bad = _run_reference(written, written.box(source.detach()))
            if is_bad and (check or task.op is Op.COPY_SCALES):
                self._bad.add(index)
            if action.compares and written is not task:
                found = _num_differing(written.target, task.target), _num_differing(written.scale, task.scale)
                found = found[0], found[1] + _num_differing(written.global_scale, task.global_scale)
                elements, scales = self._counts.get(index, (0, 0))
                if any(found):
                    self._counts[index] = elements + found[0], scales + found[1]
            if action is Action.COUNT and written is not task:
                _run_reference(task, task.box(source.detach()))

    @override
    def forget_flags(self) -> None:
        self._bad, self._counts = set(), {}

    @override
    def bad_tasks(self) -> list[int]:
        bad, self._bad = sorted(self._bad), set()
        return bad

    @override
    def differing_tasks(self) -> list[int]:
        return [] if self._are_changes else sorted(self._take_counts())

    @override
    def changes(self) -> dict[int, tuple[int, int]]:
        return self._take_counts() if self._are_changes else {}

    def _take_counts(self) -> dict[int, tuple[int, int]]:
        counts, self._counts = self._counts, {}
        return counts

    @override
    def release(self) -> None:
        self._sources = [None] * self._num_places
        self._products = [None] * self._num_places


def _merge(source: Tensor, product: LowRank | None) -> Tensor:
    """Return a source with its product added."""
    if product is None:
        return source
    return add_product(source.detach(), product.up, product.down, product.scale, out=torch.empty_like(source))


def _with_own_targets(task: Task) -> Task:
    """Return the task with new targets, so that the live ones stay as they are."""
    scale, global_scale = (None if held is None else torch.empty_like(held) for held in (task.scale, task.global_scale))
    return replace(task, target=torch.empty_like(task.target), scale=scale, global_scale=global_scale)


def _num_differing(one: Tensor | None, other: Tensor | None) -> int:
    """How many elements differ in any byte."""
    if one is None or other is None:
        return 0
    left, right = (bytes_of(each).view(-1, each.element_size()) for each in (one, other))
    return int((left != right).any(dim=1).sum())


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any strides, in order, (num_bytes,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _run_reference(task: Task, source: Tensor) -> bool:
    """Run one task; returns whether its source is bad."""
    if task.op in (Op.QUANTIZE, Op.MAXIMUM) and source.dtype is torch.float32 and task.round_to_bf16:
        source = source.to(torch.bfloat16)
    if task.op is Op.MAXIMUM:
        amax = source.abs().amax().to(torch.float32)
        task.target.copy_(torch.maximum(task.target, amax))
        return bool(~torch.isfinite(amax))
    if task.op is Op.QUANTIZE:
        assert task.scale is not None and task.format is not None, f"{task=}"
        if task.format.scale_format.has_two_levels:
            _run_two_levels(task, source, task.scale, task.format)
            return False
        given = block_scales(task.maximum, task.format) if task.maximum is not None else None
        codes, scale, is_bad = quantize_reference(source, task.format, given)
        if task.columns is not None:
            codes = codes.narrow(1, task.columns[1], task.target.shape[1])
        match task.format.placement:
            case Placement.ROW_MAJOR:
                task.target.view(torch.uint8).copy_(codes.view(torch.uint8))
                task.scale.copy_(scale)
            case Placement.MARLIN:
                put_codes(task.target.view(torch.uint8), codes.view(torch.uint8))
                put_scales(task.scale, scale)
            case _:
                assert_never(task.format.placement)
        return bool(is_bad) and given is None
    if task.op is Op.COPY_CODES:
        task.target.view(torch.uint8).copy_(source.view(torch.uint8))
        return bool((source.view(torch.uint8) & 0x7F == 0x7F).any())
    values = source.to(task.target.dtype)
    task.target.copy_(values)
    if task.op is Op.COPY_SCALES and task.format is not None:
        return bool(~fits_scale_format(values, task.format.scale_format).all())
    return bool(~torch.isfinite(values).all())


def _run_two_levels(task: Task, source: Tensor, scale: Tensor, block_format: BlockFormat) -> None:
    """Quantize with scales of two levels. Who found the maximum has flagged NaN and Inf."""
    assert task.maximum is not None and task.global_scale is not None, f"{task=}"
    global_scale = global_scale_of(task.maximum, block_format.scale_format)
    codes, scales = quantize_two_levels(source, block_format, global_scale)
    quantized = codes, scales, global_scale
    put_two_levels(task.target, scale, task.global_scale, quantized, block_format.placement, task.own_maximum)


def fits_scale_format(scale: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Elementwise: whether float32 `scale` is positive, at most 2^120, and for `ue8m0` a power of two.

    2^120 is the largest that quantizing finite values gives; codes times larger ones are Inf.
    """
    bits = scale.contiguous().view(torch.int32)
    fits = (bits > 0) & (bits <= 0x7B800000)
    return fits & (bits & 0x7FFFFF == 0) if scale_format.has_powers_of_two else fits
