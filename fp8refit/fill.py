"""Writes a plan into live slots: tensors that are on the engine's device through one table, the rest through staging.

`ResidentFill` is compiled once and replayed: later sources of the same layout only change its addresses. `StreamFill`
takes tensors one after another, moves them through two buckets of bounded size, and fills from a bucket while the next
is being filled. Neither synchronises with the device until its result is asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.compare import Comparison
from fp8refit.config import RefitConfig
from fp8refit.guard import LayoutGuard
from fp8refit.kernels import Task, WorkTable, compile_table
from fp8refit.kernels.table import fits_scale_format, have_layouts, source_layout
from fp8refit.plan import RefitPlan, Step
from fp8refit.rows import Seams, cut_to_run, rows_of
from fp8refit.slots import Op, ScaleFormat, Slot
from fp8refit.sources import MappingSource

_BUCKET_ALIGNMENT_BYTES = 256

ReadBox: TypeAlias = Callable[[Tensor, Tensor], None]
"""Reads what a view of a tensor without bytes shows, into memory of its shape and dtype."""


def bind(step: Step, slot: Slot, source: Tensor, config: RefitConfig) -> Task:
    """The task that does `step` with `source`, for all of `slot`."""
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
    )


def required_format(slot: Slot, config: RefitConfig) -> ScaleFormat:
    """What the scales of a tensor that is already FP8 have to be, for `slot`."""
    return ScaleFormat.FP32 if config.on_scale_mismatch == "copy" else slot.scale_format


def misfit_scales(
    steps: Sequence[Step], slots: Sequence[Slot], named_tensors: Iterable[tuple[str, Tensor]]
) -> list[str]:
    """One line for each scale tensor of `steps` that its slot cannot hold. Reads the tensors, writes nothing."""
    formats = {step.source: slots[step.slot].scale_format for step in steps if step.op is Op.COPY_SCALES}
    return [
        scale_problem(name, formats[name])
        for name, tensor in named_tensors
        if name in formats and not bool(fits_scale_format(tensor.to(torch.float32), formats[name]).all())
    ]


def scale_problem(name: str, scale_format: ScaleFormat) -> str:
    """Say why a scale tensor does not fit a slot of `scale_format`."""
    if scale_format is ScaleFormat.FP32:
        return f"{name}: holds scales that are not finite and positive"
    return (
        f"{name}: holds scales that are no powers of two, which this layer's kernel needs; quantize with "
        'scale_format="ue8m0", boot the engine with kernels that take any scale, or write them anyway with '
        'on_scale_mismatch="copy"'
    )


class ResidentFill:
    """The steps of a plan whose tensors are on the engine's device, as one table."""

    def __init__(
        self,
        plan: RefitPlan,
        slots: Sequence[Slot],
        source: MappingSource,
        device: torch.device,
        config: RefitConfig,
    ) -> None:
        tensors = source.tensors
        self.plan = plan
        self.config = config
        self._num_names = len(tensors)
        elsewhere = {name for name, tensor in tensors.items() if tensor.device != device}
        self._unbound = {name: _meta(tensors[name]) for name in elsewhere.union(plan.ignored)}
        self.steps = [step for step in plan.steps if step.source not in elsewhere]
        self.staged_steps = [step for step in plan.steps if step.source in elsewhere]
        self._sources = [step.source for step in self.steps]
        self._layouts = {name: source_layout(tensors[name]) for name in dict.fromkeys(self._sources)}
        self._recognise(source)
        tasks = [bind(step, slots[step.slot], tensors[step.source], config) for step in self.steps]
        self.table = compile_table(tasks, device, _places(self._sources))
        strict_scales = [
            index
            for index, task in enumerate(tasks)
            if task.op is Op.COPY_SCALES and config.on_scale_mismatch == "refuse"
        ]
        self._scale_sources = [self._sources[index] for index in strict_scales]
        self._scale_formats = [tasks[index].scale_format for index in strict_scales]
        self._scale_table = None
        if strict_scales:
            places = _places(self._scale_sources)
            self._scale_table = compile_table([tasks[index] for index in strict_scales], device, places)

    def rebind(self, source: MappingSource) -> bool:
        """Point the tables at the tensors of `source`; False, and nothing done, if they are not laid out as those before."""
        if not self._guard.holds(source.sent_names, source.sent):
            if source.problems or not self._fits(source.tensors):
                return False
            self._recognise(source)
        if not self.table.refresh([source.sent[place] for place in self._places], self._guard.addresses[self._places]):
            return False
        if self._scale_table is not None:
            tensors = source.tensors
            self._scale_table.refresh([tensors[name] for name in dict.fromkeys(self._scale_sources)])
        return True

    def _recognise(self, source: MappingSource) -> None:
        """Know the next source that is laid out as this one, in which nothing is wrong."""
        place_of = {name: place for place, name in enumerate(source.tensors)}
        self._places = [place_of[name] for name in self._layouts]
        self._guard = LayoutGuard(source.sent_names, source.sent)

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return (
            len(tensors) == self._num_names
            and have_layouts(tensors, self._layouts)
            and all(name in tensors and _meta(tensors[name]) == meta for name, meta in self._unbound.items())
        )

    def misfit_scales(self) -> list[str]:
        """One line for each prequantized tensor whose scales its slot cannot hold. Writes nothing."""
        if self._scale_table is None:
            return []
        self._scale_table.launch(check=True, write=False)
        bad = self._scale_table.bad_tasks()
        return [scale_problem(self._scale_sources[index], self._scale_formats[index]) for index in bad]

    def bad_sources(self) -> list[str]:
        """Wait for the last launch and name the source tensors that it flagged."""
        return sorted({self._sources[index] for index in self.table.bad_tasks()})

    def release(self) -> None:
        """Let go of the source tensors; `rebind` comes before the next use."""
        for table in (self.table, self._scale_table):
            if table is not None:
                table.release()

    @property
    def num_device_bytes(self) -> int:
        """Device memory held between refits."""
        tables = [table for table in (self.table, self._scale_table) if table is not None]
        return sum(table.num_device_bytes for table in tables)


class StreamFill:
    """Steps filled from tensors that arrive one after another, through two buckets.

    Peak memory: two buckets on the engine's device and, for a GPU, two of pinned host memory. A bucket is
    `config.bucket_bytes`, or one row of blocks of the widest tensor if that is more. A tensor that comes in runs of rows
    which cut its blocks takes one row of blocks more.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        config: RefitConfig,
        *,
        write: bool = True,
        comparison: Comparison | None = None,
    ) -> None:
        self._comparison = comparison
        self._slots = slots
        self._config = config
        self._device = device
        self._write = write
        self._check = config.validate_values != "off"
        self._buckets: list[_Bucket] = []
        self._seams = Seams()
        self._bad: set[str] = set()

    def reserve(self) -> None:
        """Take the buckets' memory now, and not when the first tensor is staged."""
        if not self._buckets:
            num_bytes = max([self._config.bucket_bytes, *(_least_bytes(slot) for slot in self._slots)])
            self._buckets = [_Bucket(num_bytes, self._device) for _ in range(2)]

    @property
    def num_device_bytes(self) -> int:
        """Device memory of the buckets."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def add(self, step: Step, tensor: Tensor, *, is_stable: bool, read_box: ReadBox | None = None) -> None:
        """Stage the box of `step` in `tensor`.

        Args:
            step: What to do with it.
            tensor: The whole source tensor.
            is_stable: Whether it keeps its bytes until `bad_sources` returned.
            read_box: Gives the bytes, if it has none itself.
        """
        task = bind(step, self._slots[step.slot], tensor, self._config)
        self._stage(step.source, task, is_stable=is_stable, read_box=read_box)

    def add_rows(self, step: Step, rows: Tensor, first_row: int) -> None:
        """Stage what `step` reads of some rows of its tensor, `first_row` the first of them. Runs of rows come in order."""
        slot = self._slots[step.slot]
        if step.op is not Op.QUANTIZE or step.select:
            runs: Iterable[tuple[int, Tensor]] = [(first_row, rows)]
        else:
            runs = self._seams.runs_of_blocks(
                step.slot, range(step.offset[0], step.offset[0] + step.shape[0]), slot.block_size[0], first_row, rows
            )
        for first, run in runs:
            task = cut_to_run(bind(step, slot, run, self._config), first, run.shape[0])
            if task is not None:
                self._stage(step.source, task, is_stable=False)

    def _stage(self, name: str, task: Task, *, is_stable: bool, read_box: ReadBox | None = None) -> None:
        self.reserve()
        for piece in split(task, self._buckets[0].num_bytes):
            box = piece.box(task.source.detach())
            if not self._buckets[0].has_room(box):
                self.flush()
            self._buckets[0].put(name, piece, box, is_stable=is_stable, read_box=read_box)

    def bad_sources(self) -> list[str]:
        """Fill what is staged, wait, and name the source tensors that were flagged."""
        for _ in self._buckets:
            self.flush()
        return sorted(self._bad)

    def flush(self) -> None:
        """Fill from what is staged, and stage in the other bucket, once its own fill is done."""
        if not self._buckets:
            return
        self._buckets[0].launch(check=self._check, write=self._write, comparison=self._comparison)
        self._buckets.reverse()
        self._bad |= self._buckets[0].drain()


class _Bucket:
    """One staging buffer, the tasks that read from it, and their table while it runs."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host = (
            torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True) if device.type == "cuda" else None
        )
        self._used = 0
        self._sources: list[str] = []
        self._tasks: list[Task] = []
        self._table: WorkTable | None = None

    def has_room(self, box: Tensor) -> bool:
        return self._used + box.numel() * box.element_size() <= self.num_bytes

    @torch.inference_mode()
    def put(self, name: str, task: Task, box: Tensor, *, is_stable: bool, read_box: ReadBox | None = None) -> None:
        """Copy `box` in, or read it, and remember to do `task` with the copy."""
        num_bytes = box.numel() * box.element_size()
        staged = _view(self._memory, self._used, box)
        if read_box is not None:
            into = staged if self._host is None else _view(self._host, self._used, box)
            read_box(box, into)
            box = into
        elif box.device.type == "cpu" and self._host is not None and not (is_stable and box.is_pinned()):
            box = _view(self._host, self._used, box).copy_(box)
        if box is not staged:
            staged.copy_(box, non_blocking=True)
        self._used += -(-num_bytes // _BUCKET_ALIGNMENT_BYTES) * _BUCKET_ALIGNMENT_BYTES
        self._sources.append(name)
        self._tasks.append(replace(task, source=staged, offset=(0,) * staged.ndim, select=(), is_transposed=False))

    def launch(self, *, check: bool, write: bool, comparison: Comparison | None) -> None:
        if not self._tasks:
            return
        tasks, pairs = comparison.redirect(self._tasks) if comparison is not None else (self._tasks, [])
        self._table = compile_table(tasks, self._device)
        self._table.launch(check=check, write=write)
        if comparison is not None:
            comparison.compare(self._sources, pairs)

    def drain(self) -> set[str]:
        """Wait until the bucket may be filled again, and name the sources that were flagged."""
        bad = {self._sources[index] for index in self._table.bad_tasks()} if self._table is not None else set()
        self._used, self._sources, self._tasks, self._table = 0, [], [], None
        return bad


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A contiguous tensor of `like`'s shape and dtype in `memory`."""
    num_bytes = like.numel() * like.element_size()
    return memory[start : start + num_bytes].view(like.dtype).view(like.shape)


def _least_bytes(slot: Slot) -> int:
    """Bytes of the smallest piece a slot's source can be cut into, in the widest dtype."""
    if slot.weight.ndim < 2:
        return slot.weight.numel() * 4
    rows = slot.block_size[0] if slot.is_quantized else 1
    return rows * prod(slot.weight.shape[1:]) * 4


def split(task: Task, num_bytes: int) -> Iterator[Task]:
    """Cut a task into row ranges whose boxes fit into `num_bytes`."""
    length = task.target.shape[0] if task.target.ndim else 1
    row_bytes = prod(task.target.shape[1:]) * task.source.element_size()
    if length * row_bytes <= num_bytes or task.target.ndim == 0:
        yield task
        return
    step = task.block_size[0] if task.op is Op.QUANTIZE else 1
    rows = max(num_bytes // row_bytes // step, 1) * step
    for start in range(0, length, rows):
        yield rows_of(task, start, min(rows, length - start))


def _places(sources: Sequence[str]) -> list[int]:
    """For each step the place of its source among all sources, each counted once, in order."""
    places = {name: place for place, name in enumerate(dict.fromkeys(sources))}
    return [places[name] for name in sources]


def _meta(tensor: Tensor) -> tuple[torch.Size, torch.dtype, int]:
    return tensor.shape, tensor.dtype, tensor.get_device()
