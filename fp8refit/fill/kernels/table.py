"""A refit's work as a table of reads and writes, run in one launch per kind of work.

`compile_table` turns tasks into a `WorkTable`; `refresh` points it at new source tensors of the same layout; `launch`
runs it, and `run` a part of it. On CUDA a table is a matrix of addresses that Triton kernels walk; on the CPU it is the
torch reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.fill.kernels.reference import quantize_reference
from fp8refit.live.layout_guard import Addresses
from fp8refit.live.slots import FP8_DTYPE, Op, ScaleFormat

ALIGNMENT_BYTES = 16
"""Width of the widest load and store of one thread."""


class Action(Enum):
    """What to do with the values that tasks compute."""

    WRITE = "write"
    COMPARE = "compare"
    """Compare them with the targets, which stay as they are."""
    CHECK = "check"
    """Flag NaN and Inf only."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """One box of one source tensor and the live views it is written to."""

    op: Op
    source: Tensor
    """The whole source tensor, on the table's device, any strides."""
    offset: tuple[int, ...]
    """Where the box starts in `source`, after `select` and `is_transposed`; the box has the target's shape."""
    target: Tensor
    """Live weight, or live scale for `COPY_SCALES`. Its last dimension is contiguous."""
    scale: Tensor | None = None
    """Live scale for `QUANTIZE`."""
    block_size: tuple[int, int] = (128, 128)
    scale_format: ScaleFormat = ScaleFormat.FP32
    round_to_bf16: bool = True
    """Whether a float32 source is rounded to BF16 before it is quantized."""
    select: tuple[int, ...] = ()
    """Indexes into the leading dimensions of `source`: one expert of a stack."""
    is_transposed: bool = False
    """Whether to transpose `source`."""

    def box(self, source: Tensor) -> Tensor:
        """The box of this task in `source`, which has the layout of the task's own source."""
        for index in self.select:
            source = source[index]
        if self.is_transposed:
            source = source.mT
        for dim, (start, length) in enumerate(zip(self.offset, self.target.shape, strict=True)):
            if (start, length) != (0, source.shape[dim]):
                source = source.narrow(dim, start, length)
        return source


class WorkTable(Protocol):
    """Compiled tasks on one device."""

    num_device_bytes: int
    """Device memory of the table itself."""

    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        """Point the tasks at new `sources` with the same `source_layout`.

        Waits for a launch whose `bad_tasks` was never called, and drops its flags.

        Args:
            sources: Readable tensors, one per distinct source.
            addresses: Their addresses, if known.

        Returns:
            False, with nothing changed, if the alignment of one differs from what the table was compiled for.
        """
        ...

    def launch(self, *, check: bool, action: Action = Action.WRITE, begun: torch.cuda.Event | None = None) -> None:
        """Run every task on the current stream.

        `check` flags NaN and Inf; scales that do not fit are always flagged. `begun`, on CUDA, is recorded right before
        the first kernel.
        """
        ...

    def run(
        self,
        first: int,
        sources: Sequence[Tensor],
        addresses: Addresses | None = None,
        *,
        check: bool,
        action: Action = Action.WRITE,
    ) -> bool:
        """Point the tasks of some sources at new ones, and run them on the current stream.

        A source may be run once between two calls of `bad_tasks`.

        Args:
            first: The place of the first source.
            sources: The sources from that place on.
            addresses: Their addresses, if known.
            check: See `launch`.
            action: What to do.

        Returns:
            False, with nothing done, as in `refresh`.
        """
        ...

    def bad_tasks(self) -> list[int]:
        """Wait for everything that was launched, and return the indexes of flagged tasks."""
        ...

    def differing_tasks(self) -> list[int]:
        """Wait like `bad_tasks`, and return the indexes of tasks whose targets hold other bytes than they compute."""
        ...

    def release(self) -> None:
        """Release the source tensors. Call `refresh` before the next launch."""
        ...


def compile_table(
    tasks: Sequence[Task], device: torch.device, places: Sequence[int] | None = None, *, num_places: int | None = None
) -> WorkTable:
    """Compile `tasks`. The caller keeps their tensors alive, since the table may hold only addresses.

    Args:
        tasks: The tasks, with all tensors on `device`.
        device: The device.
        places: For each task, the index of its source in the `sources` of `refresh`; experts of one stack share a
            source. By default every task has its own.
        num_places: Number of sources, if the last of them have no task.
    """
    if device.type == "cuda":
        from fp8refit.fill.kernels.triton_table import TritonTable

        return TritonTable(tasks, device, places, num_places=num_places)
    return ReferenceTable(tasks, places, num_places=num_places)


def join_tables(tables: Sequence[WorkTable]) -> WorkTable:
    """One table with the tasks and places of several, one after another."""
    first = tables[0]
    if isinstance(first, ReferenceTable):
        return ReferenceTable.joined(tables)
    from fp8refit.fill.kernels.triton_table import TritonTable

    return TritonTable.joined(tables)


SourceLayout: TypeAlias = tuple[torch.Size, tuple[int, ...] | None, torch.dtype, int]


def source_layout(source: Tensor) -> SourceLayout:
    """What must be equal for a table to be pointed at another tensor, except alignment, which `refresh` checks."""
    stride = None if source.is_contiguous() else source.stride()
    return source.shape, stride, source.dtype, source.get_device()


def have_layouts(sources: Mapping[str, Tensor], layouts: Mapping[str, SourceLayout]) -> bool:
    """Whether every named tensor exists with the given `source_layout`.

    Takes half the time of computing the layouts; a model of experts has 18,000 tensors.
    """
    for name, (shape, stride, dtype, device) in layouts.items():
        source = sources.get(name)
        if (
            source is None
            or source.dtype is not dtype
            or source.shape != shape
            or source.get_device() != device
            or not (source.is_contiguous() if stride is None else source.stride() == stride)
        ):
            return False
    return True


def is_empty(task: Task) -> bool:
    """Whether the task moves nothing."""
    return prod(task.target.shape) == 0


class ReferenceTable(WorkTable):
    """The specification, task by task in torch."""

    num_device_bytes = 0

    def __init__(
        self, tasks: Sequence[Task], places: Sequence[int] | None = None, *, num_places: int | None = None
    ) -> None:
        self._places = list(range(len(tasks)) if places is None else places)
        self._num_places = max(self._places, default=-1) + 1 if num_places is None else num_places
        self._sources: list[Tensor | None] = [None] * self._num_places
        for task, place in zip(tasks, self._places, strict=True):
            self._sources[place] = task.source
        self._tasks = [replace(task, source=torch.empty(0, device="cpu")) for task in tasks]
        self._bad: set[int] = set()
        self._differing: set[int] = set()

    @classmethod
    def joined(cls, tables: Sequence[WorkTable]) -> "ReferenceTable":
        """See `join_tables`."""
        whole = cls([])
        for table in tables:
            assert isinstance(table, ReferenceTable), "all on one device"
            whole._places += [whole._num_places + place for place in table._places]
            whole._num_places += table._num_places
            whole._tasks += table._tasks
        whole._sources = [None] * whole._num_places
        return whole

    @override
    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        self.bad_tasks()
        self._sources = list(sources)
        return True

    @torch.inference_mode()
    @override
    def launch(self, *, check: bool, action: Action = Action.WRITE, begun: torch.cuda.Event | None = None) -> None:
        for index, place in enumerate(self._places):
            source = self._sources[place]
            assert source is not None, "refreshed"
            self._run_one(index, source, check=check, action=action)

    @torch.inference_mode()
    @override
    def run(
        self,
        first: int,
        sources: Sequence[Tensor],
        addresses: Addresses | None = None,
        *,
        check: bool,
        action: Action = Action.WRITE,
    ) -> bool:
        for place, source in enumerate(sources, start=first):
            for index in self._tasks_at.get(place, ()):
                self._run_one(index, source, check=check, action=action)
        return True

    @cached_property
    def _tasks_at(self) -> dict[int, list[int]]:
        """The tasks of each place."""
        found: dict[int, list[int]] = {}
        for index, place in enumerate(self._places):
            found.setdefault(place, []).append(index)
        return found

    def _run_one(self, index: int, source: Tensor, *, check: bool, action: Action) -> None:
        task = self._tasks[index]
        if is_empty(task):
            return
        written = task if action is Action.WRITE else _with_own_targets(task)
        is_bad = _run_reference(written, written.box(source.detach()))
        if is_bad and (check or task.op is Op.COPY_SCALES):
            self._bad.add(index)
        if action is Action.COMPARE and not _have_same_bytes(written, task):
            self._differing.add(index)

    @override
    def bad_tasks(self) -> list[int]:
        bad, self._bad = sorted(self._bad), set()
        return bad

    @override
    def differing_tasks(self) -> list[int]:
        differing, self._differing = sorted(self._differing), set()
        return differing

    @override
    def release(self) -> None:
        self._sources = [None] * self._num_places


def _with_own_targets(task: Task) -> Task:
    """The task with targets of its own."""
    scale = torch.empty_like(task.scale) if task.scale is not None else None
    return replace(task, target=torch.empty_like(task.target), scale=scale)


def _have_same_bytes(one: Task, other: Task) -> bool:
    pairs = [(one.target, other.target)]
    if one.scale is not None and other.scale is not None:
        pairs.append((one.scale, other.scale))
    return all(torch.equal(bytes_of(left), bytes_of(right)) for left, right in pairs)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any strides, in order, (num_bytes,) uint8."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _run_reference(task: Task, source: Tensor) -> bool:
    """Run one task; returns whether its source is bad."""
    if task.op is Op.QUANTIZE:
        assert task.scale is not None, f"{task=}"
        if source.dtype is torch.float32 and task.round_to_bf16:
            source = source.to(torch.bfloat16)
        codes, scale, is_bad = quantize_reference(source, task.block_size, task.scale_format)
        task.target.view(torch.uint8).copy_(codes.view(torch.uint8))
        task.scale.copy_(scale)
        return bool(is_bad)
    if task.op is Op.COPY_CODES:
        task.target.view(torch.uint8).copy_(source.view(torch.uint8))
        return bool((source.view(torch.uint8) & 0x7F == 0x7F).any())
    values = source.to(task.target.dtype)
    task.target.copy_(values)
    if task.op is Op.COPY_SCALES:
        return bool(~fits_scale_format(values, task.scale_format).all())
    return bool(~torch.isfinite(values).all())


def fits_scale_format(scale: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Elementwise: whether float32 `scale` is finite, positive and, for `ue8m0`, a power of two."""
    bits = scale.contiguous().view(torch.int32)
    fits = (bits > 0) & (bits < 0x7F800000)
    return fits & (bits & 0x7FFFFF == 0) if scale_format is ScaleFormat.UE8M0 else fits


def assert_is_writable(task: Task) -> None:
    """Check what the kernels rely on: dense rows in every target."""
    for tensor in (task.target, task.scale):
        if tensor is not None and tensor.ndim and tensor.shape[-1] > 1:
            assert tensor.stride(-1) == 1, f"{task.op=} {tensor.shape=} {tensor.stride()=}"
    if task.op in (Op.QUANTIZE, Op.COPY_CODES):
        assert task.target.dtype is FP8_DTYPE, f"{task.target.dtype=}"
