"""A refit's work as tasks that read and write boxes of tensors, and the interface of the tables that run them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol, TypeAlias, assert_never

import torch
from torch import Tensor

from fp8refit.kernels.products import LowRank
from fp8refit.live.formats import BlockFormat, Placement
from fp8refit.live.layout_guard import Addresses
from fp8refit.live.slots import Op

ALIGNMENT_BYTES = 16
"""Width of the widest load and store of one thread."""


class Action(Enum):
    """What to do with the values that tasks compute."""

    WRITE = "write"
    COMPARE = "compare"
    """Compare them with the targets, which stay as they are."""
    COUNT = "count"
    """Write them, and count the elements of the targets that were others."""
    CHECK = "check"
    """Flag NaN and Inf only."""

    @property
    def writes(self) -> bool:
        """Whether targets are written."""
        return self in (Action.WRITE, Action.COUNT)

    @property
    def compares(self) -> bool:
        """Whether what the targets hold is read first."""
        return self in (Action.COMPARE, Action.COUNT)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """One box of one source tensor and the live views it is written to."""

    op: Op
    source: Tensor
    """The whole source tensor, on the table's device, any strides."""
    offset: tuple[int, ...]
    """Where the box starts in `source`, after `select` and `is_transposed`; the box has `shape`."""
    target: Tensor
    """Live weight, or live scale for `COPY_SCALES`. Its last dimension is contiguous."""
    scale: Tensor | None = None
    """Live scale for `QUANTIZE`."""
    global_scale: Tensor | None = None
    """Live scale of the whole weight, if scales have two levels."""
    format: BlockFormat | None = None
    """How the live tensors hold it quantized; None for `COPY`."""
    round_to_bf16: bool = True
    """Whether a float32 source is rounded to BF16 before it is quantized."""
    select: tuple[int, ...] = ()
    """Indexes into the leading dimensions of `source`: one expert of a stack."""
    is_transposed: bool = False
    """Whether to transpose `source`."""
    columns: tuple[int, int] | None = None
    """Number of columns of the box, and which of them the target's first one is, if a scale covers more than the target holds.
    Without it, the box has the target's shape."""
    maximum: Tensor | None = None
    """The largest magnitude (1,) float32 from which the scale follows, for `QUANTIZE` in a format that needs it. Tasks of
    `MAXIMUM`, whose target it is, have raised it."""
    own_maximum: Tensor | None = None
    """That of what the rank holds, see `BlockFormat.needs_own_maximum`; None if nothing follows from it."""
    box_shape: tuple[int, ...] | None = None
    """Shape of the box of `MAXIMUM`."""
    product: LowRank | None = None
    """Added to all of `source` before the box is taken; the sum is rounded to the source's dtype. See `rows.can_merge`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        if self.box_shape is not None:
            return self.box_shape
        shape = tuple(self.target.shape)
        if self.format is not None and self.op in (Op.QUANTIZE, Op.COPY_CODES):
            shape = self.format.shape_of(shape)
        return shape if self.columns is None else (*shape[:-1], self.columns[0])

    def box(self, source: Tensor) -> Tensor:
        """The box of this task in `source`, which has the layout of the task's own source."""
        for index in self.select:
            source = source[index]
        if self.is_transposed:
            source = source.mT
        shape = self.shape
        if source.shape == shape:
            return source
        for dim, (start, length) in enumerate(zip(self.offset, shape, strict=True)):
            if (start, length) != (0, source.shape[dim]):
                source = source.narrow(dim, start, length)
        return source


class WorkTable(Protocol):
    """Compiled tasks on one device."""

    num_device_bytes: int
    """Device memory of the table itself."""

    def refresh(self, sources: Sequence[Tensor], addresses: Addresses | None = None) -> bool:
        """Point the tasks at new `sources` with the same `source_layout`. They must have no products; see `run`.

        Waits for a launch whose `bad_tasks` was never called, and drops its flags, as `forget_flags` does.

        Args:
            sources: Readable tensors, one per distinct source.
            addresses: Their addresses, if known.

        Returns:
            False, with nothing changed, if the alignment of one differs from what the table was compiled for.
        """
        ...

    def compile(self, *, check: bool, action: Action = Action.WRITE) -> None:
        """Compile the kernels that `launch` runs. A compiler may fail, or have no room on its disk; then nothing is written."""
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
        products: Sequence[LowRank | None] = (),
        check: bool,
        action: Action = Action.WRITE,
    ) -> bool:
        """Point the tasks of some sources at new ones, and run them on the current stream.

        Run each source at most once between two calls of `bad_tasks`.

        Args:
            first: The place of the first source.
            sources: The sources from that place on.
            addresses: Their addresses, if known.
            products: What is added to each source, of the same kind as in its tasks, or None. Omit it if all are None.
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

    def changes(self) -> dict[int, tuple[int, int]]:
        """Wait like `bad_tasks`; for each task that changed anything since the last call, how many elements of its target, and
        how many scales. Of what ran with `Action.COUNT`.
        """
        ...

    def forget_flags(self) -> None:
        """Wait for everything that was launched, even in part, and drop its flags: those of a write are never another's."""
        ...

    def release(self) -> None:
        """Release the source tensors. Call `refresh` before the next launch."""
        ...


SourceLayout: TypeAlias = tuple[torch.Size, tuple[int, ...] | None, torch.dtype, int]


def source_layout(source: Tensor) -> SourceLayout:
    """What must be equal for a table to be pointed at another tensor, except alignment, which `refresh` checks."""
    stride = None if source.is_contiguous() else source.stride()
    return source.shape, stride, source.dtype, source.get_device()


def have_layouts(sources: Mapping[str, Tensor], layouts: Mapping[str, SourceLayout]) -> bool:
    """Whether every named tensor exists with the given `source_layout`.

    Takes half the time of computing the layouts; a mixture-of-experts model has 18,000 tensors.
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
    return not prod(task.shape)


def assert_is_writable(task: Task) -> None:
    """Check that the live tensors are as the format says: dtype and placement."""
    if task.op is Op.COPY:
        return
    if task.op is Op.MAXIMUM:
        assert task.target.dtype is torch.float32 and task.target.numel() == 1, f"{task.target=}"
        return
    assert task.format is not None, f"{task.op=}"
    dtype = task.format.scale_format.dtype if task.op is Op.COPY_SCALES else task.format.codes.dtype
    assert task.target.dtype is dtype, f"{task.target.dtype=} {task.format=}"
    if task.format.scale_format.has_two_levels:
        assert task.op is Op.QUANTIZE and task.maximum is not None, f"{task.op=} {task.format=}"
        assert task.global_scale is not None and task.global_scale.dtype is torch.float32, f"{task.format=}"
    match task.format.placement:
        case Placement.ROW_MAJOR:
            pass
        case Placement.MARLIN:
            assert task.op is Op.QUANTIZE and task.format.has_groups, f"{task.op=} {task.format=}"
            assert task.target.ndim == 3 and task.target.shape[-1] == task.format.tile_elements, f"{task.target.shape=}"
        case _:
            assert_never(task.format.placement)
