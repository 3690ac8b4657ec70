"""A refit's work as a table of reads and writes, run in one launch per kind of work.

`compile_table` turns tasks into a `WorkTable`; `refresh` points it at new source tensors of the same layout; `launch`
runs it. On CUDA a table is a matrix of addresses that Triton kernels walk; on the CPU it is the torch reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

    def launch(self, *, check: bool, write: bool = True, begun: torch.cuda.Event | None = None) -> None:
        """Run every task on the current stream.

        `check` flags NaN and Inf; scales that do not fit are always flagged. `begun`, on CUDA, is recorded right before
        the first kernel.
        """
        ...

    def bad_tasks(self) -> list[int]:
        """Wait for the last launch, and return the indexes of flagged tasks."""
        ...

    def release(self) -> None:
        """Release the source tensors. Call `refresh` before the next launch."""
        ...


def compile_table(tasks: Sequence[Task], device: torch.device, places: Sequence[int] | None = None) -> WorkTable:
    """Compile `tasks`. The caller keeps their tensors alive, since the table may hold only addresses.

    Args:
        tasks: The tasks, with all tensors on `device`.
        device: The device.
        places: For each task, the index of its source in the `sources` of `refresh`; experts of one stack share a
            source. By default every task has its own.
    """
    if device.type == "cuda":
        from fp8refit.fill.kernels.triton_table import TritonTable

        return TritonTable(tasks, device, places)
    return ReferenceTable(tasks, places)


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

    def __init__(self, tasks: Sequence[Task], places: Sequence[int] | None = None) -> None:
        self._sources = [task.source for task in tasks]
        self._places = range(len(tasks)) if places is None else places
        self._tasks = [replace(task, source=torch.empty(0, device="cpu")) for task in tasks]
        self._bad: set[int] = set()

    @override
    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        self.bad_tasks()
        self._sources = [sources[place] for place in self._places]
        return True

    @torch.inference_mode()
    @override
    def launch(self, *, check: bool, write: bool = True, begun: torch.cuda.Event | None = None) -> None:
        for index, (task, source) in enumerate(zip(self._tasks, self._sources, strict=True)):
            if not is_empty(task):
                is_bad = _run_reference(task, task.box(source.detach()), write=write)
                if is_bad and (check or task.op is Op.COPY_SCALES):
                    self._bad.add(index)

    @override
    def bad_tasks(self) -> list[int]:
        bad, self._bad = sorted(self._bad), set()
        return bad

    @override
    def release(self) -> None:
        self._sources = []


def _run_reference(task: Task, source: Tensor, *, write: bool) -> bool:
    """Run one task; returns whether its source is bad."""
    if task.op is Op.QUANTIZE:
        assert task.scale is not None, f"{task=}"
        if source.dtype is torch.float32 and task.round_to_bf16:
            source = source.to(torch.bfloat16)
        codes, scale, is_bad = quantize_reference(source, task.block_size, task.scale_format)
        if write:
            task.target.view(torch.uint8).copy_(codes.view(torch.uint8))
            task.scale.copy_(scale)
        return bool(is_bad)
    if task.op is Op.COPY_CODES:
        if write:
            task.target.view(torch.uint8).copy_(source.view(torch.uint8))
        return bool((source.view(torch.uint8) & 0x7F == 0x7F).any())
    values = source.to(task.target.dtype)
    if write:
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
