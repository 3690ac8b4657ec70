"""The layout of a policy in the buckets of a broadcast. Pure, and the same for sender and receivers.

Tensors follow each other in order, aligned, each weight's scales after its codes. A tensor too large for a bucket is
split into runs of rows that contain whole blocks. A bucket has one portion for all ranks, and one per section of ranks.
For a tensor that is split between sections, each portion holds that section's part of the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Annotated, Self, TypeAlias

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from fp8refit.errors import StagingMemoryError
from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import SCALE_SUFFIX, TensorMeta
from fp8refit.transport.memory.segment import DTYPES

HEADER_BYTES = 256
"""Size of the header before the first tensor of a bucket."""
MAX_SECTIONS = 1 << 16
NUM_BUFFERS = 3
"""Buckets used in turn on each side: one is packed or written while the others are sent or queued. With two, the wire
would be idle whenever a host is late by more than one bucket's transfer."""
_ALIGNMENT_BYTES = 256
_MAX_BYTES = 1 << 44
_MAX_NAME = 1024

_Length = Annotated[int, Field(ge=0, lt=1 << 40)]
_Shape: TypeAlias = tuple[int, ...]


class Cut(BaseModel, frozen=True, extra="forbid"):
    """Which rows or columns of a tensor each section of ranks gets."""

    dim: int = Field(ge=0, lt=8)
    """0 for rows."""
    spans: tuple[tuple[_Length, _Length], ...] = Field(min_length=2, max_length=MAX_SECTIONS)
    """Start and length for each section; they may overlap."""


class WireTensor(BaseModel, frozen=True, extra="forbid"):
    """One tensor of a policy as it is sent."""

    name: str = Field(max_length=_MAX_NAME)
    """Checkpoint name."""
    shape: tuple[_Length, ...] = Field(max_length=8)
    dtype: str
    """dtype on the wire: `float8_e4m3fn` for codes, whatever the trainer holds."""
    format: BlockFormat | None = None
    """Format of a matrix that the trainer quantizes. Its scales are sent too, as `name` + `_scale_inv`."""
    row_step: int = Field(default=1, ge=0)
    """A tensor larger than a bucket is split at multiples of this many rows (entries of its first dimension); 0 for
    never."""
    travels: bool = True
    """False for a tensor that is only announced, since no engine reads it."""
    part_of: str = Field(default="", max_length=_MAX_NAME)
    """Name of the trainer's stack of experts that this is a part of, if any."""
    cut: Cut | None = None
    """What each section gets; None if all get everything."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: {self.dtype!r} is a dtype that no weight has")
        if prod(self.shape) * DTYPES[self.dtype].itemsize > _MAX_BYTES:
            raise ValueError(f"{self.name}: {list(self.shape)} is larger than any weight")
        if self.format is not None:
            if len(self.shape) != 2 or DTYPES[self.dtype] is not self.format.codes.dtype:
                raise ValueError(f"{self.name}: has a format, but is not a matrix of its codes")
            if self.row_step % self.format.block_size[0]:
                raise ValueError(f"{self.name}: is split at {self.row_step} rows, inside its blocks")
        if self.cut is not None:
            self._check_cut(self.cut)
        return self

    def _check_cut(self, cut: Cut) -> None:
        if cut.dim >= len(self.shape):
            raise ValueError(f"{self.name}: {list(self.shape)} has no dimension {cut.dim} to be split in")
        length = self.shape[cut.dim]
        for first, count in cut.spans:
            start, shape = [0] * len(self.shape), list(self.shape)
            start[cut.dim], shape[cut.dim] = first, count
            is_whole = self.format is None or self.format.holds_whole_blocks(start, shape, self.shape)
            if first + count > length or not is_whole:
                raise ValueError(
                    f"{self.name}: {first} to {first + count} of {length} lies outside the tensor, or cuts its blocks"
                )

    @property
    def num_rows(self) -> int:
        """Entries of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def metas(self) -> dict[str, TensorMeta]:
        """What the ranks are told to expect: the tensor, and the scales sent with it."""
        metas = {self.name: TensorMeta(shape=self.shape, dtype=DTYPES[self.dtype])}
        if self.format is not None:
            metas[self.name + SCALE_SUFFIX] = TensorMeta(
                shape=self.format.scale_shape(self.shape), dtype=self.format.scale_format.dtype
            )
        return metas

    def boxes(self, first_row: int, num_rows: int) -> Iterator[tuple[int, _Shape, _Shape]]:
        """Yield, for a run of rows, each portion's box: portion, start and shape."""
        if not self.shape:
            yield 0, (), ()
            return
        start, shape = (first_row, *(0 for _ in self.shape[1:])), (num_rows, *self.shape[1:])
        if self.cut is None:
            yield 0, start, shape
            return
        dim = self.cut.dim
        for section, (first, count) in enumerate(self.cut.spans):
            low, high = max(first, start[dim]), min(first + count, start[dim] + shape[dim])
            if low < high:
                yield 1 + section, (*start[:dim], low, *start[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :])

    def parts(self, start: _Shape, shape: _Shape, offset_bytes: int) -> tuple["Part", ...]:
        """Return where a box and its scales lie in a portion, from `offset_bytes`."""
        values = Part(name=self.name, dtype=DTYPES[self.dtype], start=start, shape=shape, offset_bytes=offset_bytes)
        if self.format is None:
            return (values,)
        first_block = self.format.block_at(start)
        assert first_block is not None, f"{self.name=} {start=}"
        scales = Part(
            name=self.name + SCALE_SUFFIX,
            dtype=self.format.scale_format.dtype,
            start=first_block,
            shape=self.format.scale_shape(shape),
            offset_bytes=offset_bytes + _aligned(values.num_bytes),
        )
        return values, scales

    def num_bytes(self, first_row: int, num_rows: int) -> int:
        """Bytes of a run of rows in a bucket, over all portions."""
        return sum(self.box_bytes(shape) for _, _, shape in self.boxes(first_row, num_rows))

    @property
    def least_bytes(self) -> int:
        """Bytes of the first run of rows that cannot be split. Others may be slightly larger, due to alignment."""
        return self.num_bytes(0, min(self.row_step or self.num_rows, self.num_rows))

    def box_bytes(self, shape: _Shape) -> int:
        """Bytes of a box and its scales in a bucket."""
        num_bytes = _aligned(prod(shape) * DTYPES[self.dtype].itemsize)
        if self.format is not None:
            num_bytes += _aligned(prod(self.format.scale_shape(shape)) * self.format.scale_format.dtype.itemsize)
        return num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A box of one tensor in one portion of a bucket."""

    name: str
    dtype: torch.dtype
    start: tuple[int, ...]
    """Where the box begins in the tensor."""
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size without alignment of the next part."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, portion: Tensor) -> Tensor:
        """View the part in the bytes of its portion, contiguous."""
        memory = portion[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return memory.view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A box of one tensor, and its scales, in one portion of a bucket."""

    portion: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Some rows of one tensor in one bucket."""

    tensor: int
    """Index of the `WireTensor`."""
    first_row: int
    num_rows: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """What lies in one bucket."""

    runs: tuple[Run, ...]
    portion_bytes: tuple[int, ...]
    """Size of the portion for all, including the header, and of each section's. They are contiguous."""

    @property
    def num_bytes(self) -> int:
        """Size of all portions."""
        return sum(self.portion_bytes)

    def portions(self, buffer: Tensor) -> list[Tensor]:
        """Split the bucket's bytes into portions."""
        ends = accumulate(self.portion_bytes)
        return [buffer[end - size : end] for end, size in zip(ends, self.portion_bytes, strict=True)]

    def of_section(self, section: int) -> "BucketLayout":
        """Return what a rank of one section gets: the portion for all, then its section's."""
        kept = {0: 0, 1 + section: 1}
        runs = []
        for run in self.runs:
            own = tuple(
                Placement(portion=kept[each.portion], start=each.start, shape=each.shape, parts=each.parts)
                for each in run.placements
                if each.portion in kept
            )
            if own:
                runs.append(Run(tensor=run.tensor, first_row=run.first_row, num_rows=run.num_rows, placements=own))
        return BucketLayout(runs=tuple(runs), portion_bytes=tuple(self.portion_bytes[place] for place in kept))


def lay_out(tensors: Sequence[WireTensor], bucket_bytes: int, num_sections: int = 0) -> tuple[BucketLayout, ...]:
    """Distribute tensors over buckets, in order.

    Args:
        tensors: All announced tensors. Those that are not sent, or are empty, take no room.
        bucket_bytes: Size of a bucket, unless a run of rows that cannot be split is larger.
        num_sections: Number of sections that tensors are split between.
    """
    sent = [
        (index, tensor, tensor.num_bytes(0, tensor.num_rows))
        for index, tensor in enumerate(tensors)
        if tensor.travels and 0 not in tensor.shape
    ]
    larger = (tensor for _, tensor, num_bytes in sent if HEADER_BYTES + num_bytes > bucket_bytes)
    capacity = max([bucket_bytes, *(HEADER_BYTES + tensor.least_bytes for tensor in larger)])
    buckets: list[BucketLayout] = []
    runs: list[Run] = []
    used = [HEADER_BYTES] + [0] * num_sections

    def close() -> None:
        if runs:
            buckets.append(BucketLayout(runs=tuple(runs), portion_bytes=tuple(used)))
        runs.clear()
        used[:] = [HEADER_BYTES] + [0] * num_sections

    def put(index: int, tensor: WireTensor, first: int, count: int) -> None:
        placements = []
        for portion, start, shape in tensor.boxes(first, count):
            parts = tensor.parts(start, shape, used[portion])
            placements.append(Placement(portion=portion, start=start, shape=shape, parts=parts))
            used[portion] += tensor.box_bytes(shape)
        if placements:
            runs.append(Run(tensor=index, first_row=first, num_rows=count, placements=tuple(placements)))

    for index, tensor, num_bytes in sent:
        first = 0
        if sum(used) + num_bytes > capacity >= HEADER_BYTES + num_bytes:
            close()
        if sum(used) + num_bytes <= capacity:
            put(index, tensor, 0, tensor.num_rows)
            continue
        while first < tensor.num_rows:
            count = _rows_that_fit(tensor, first, capacity - sum(used))
            if not count and runs:
                close()
                continue
            count = count or min(tensor.row_step or tensor.num_rows, tensor.num_rows - first)
            put(index, tensor, first, count)
            first += count
    close()
    return tuple(buckets)


def take_buffers(
    buckets: Sequence[BucketLayout], device: torch.device, *, remedy: str, count: int = NUM_BUFFERS
) -> tuple[Tensor, ...]:
    """Allocate `count` buffers, or one per bucket if there are fewer, each large enough for every bucket.

    Raises:
        StagingMemoryError: There is not enough memory. The message gives the remedy.
    """
    num_bytes, count = largest_bytes(buckets), min(len(buckets), count)
    try:
        return tuple(torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count))
    except torch.OutOfMemoryError as error:
        raise StagingMemoryError(
            f"no room for {count} buffers of {num_bytes >> 20} MiB on {device}; {remedy}. Nothing was written"
        ) from error


def largest_bytes(buckets: Sequence[BucketLayout]) -> int:
    """Size of the largest bucket."""
    return max((bucket.num_bytes for bucket in buckets), default=0)


def _rows_that_fit(tensor: WireTensor, first: int, num_bytes: int) -> int:
    """Return how many rows from `first` may be split off and fit into `num_bytes`; 0 if none do."""
    num_rows = tensor.num_rows - first
    if tensor.num_bytes(first, num_rows) <= num_bytes:
        return num_rows
    if not tensor.row_step:
        return 0
    low, high = 0, -(-num_rows // tensor.row_step)
    while high - low > 1:
        middle = (low + high) // 2
        fits = tensor.num_bytes(first, middle * tensor.row_step) <= num_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low * tensor.row_step


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
