"""How a policy is laid out in the buckets of a broadcast: pure, the same for whoever sends and whoever receives.

Tensors lie in buckets in their order, aligned, a weight's scales behind its codes. One that no bucket takes whole is cut into
runs of rows, of which each holds whole blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fp8refit.slots import FP8_DTYPE, SCALE_SUFFIX, ScaleFormat, TensorMeta
from fp8refit.transport.segment import DTYPES

HEADER_BYTES = 256
"""What comes before the first tensor of a bucket."""
_ALIGNMENT_BYTES = 256
_MAX_BYTES = 1 << 44
_MAX_NAME = 1024

_Length = Annotated[int, Field(ge=0, lt=1 << 40)]


class WireTensor(BaseModel):
    """One tensor of a policy as it travels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=_MAX_NAME)
    """Checkpoint name."""
    shape: tuple[_Length, ...] = Field(max_length=8)
    dtype: str
    """As it travels: `float8_e4m3fn` for codes, whatever the trainer holds."""
    block_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None
    """Of a matrix that the trainer quantizes; its scales travel with it, float32, as `name` + `_scale_inv`."""
    scale_format: ScaleFormat = ScaleFormat.FP32
    """Of those scales."""
    row_step: int = Field(default=1, ge=0)
    """A tensor larger than a bucket is cut at multiples of this many rows (entries of its first dimension); 0 for never."""
    travels: bool = True
    """False for what is only announced: a name that no engine reads."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name}: {self.dtype!r} is a dtype that no weight has")
        if prod(self.shape) * DTYPES[self.dtype].itemsize > _MAX_BYTES:
            raise ValueError(f"{self.name}: {list(self.shape)} is larger than any weight")
        if self.block_size is not None:
            if len(self.shape) != 2 or DTYPES[self.dtype] is not FP8_DTYPE:
                raise ValueError(f"{self.name}: blocks are those of an FP8 matrix")
            if self.row_step % self.block_size[0]:
                raise ValueError(f"{self.name}: is cut at {self.row_step} rows, off its blocks")
        return self

    @property
    def num_rows(self) -> int:
        """Entries of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def metas(self) -> dict[str, TensorMeta]:
        """What the ranks are told will come: the tensor, and the scales that travel with it."""
        metas = {self.name: TensorMeta(shape=self.shape, dtype=DTYPES[self.dtype])}
        if self.block_size is not None:
            shape = tuple(-(-n // size) for n, size in zip(self.shape, self.block_size, strict=True))
            metas[self.name + SCALE_SUFFIX] = TensorMeta(shape=shape, dtype=torch.float32)
        return metas

    def parts(self, first_row: int, num_rows: int, offset_bytes: int) -> tuple["Part", ...]:
        """Where the parts of a run of rows lie that begins `offset_bytes` into a bucket."""
        parts = []
        for name, meta in self.metas.items():
            step = self.block_size[0] if name != self.name and self.block_size is not None else 1
            shape = (-(-num_rows // step), *meta.shape[1:]) if meta.shape else ()
            part = Part(
                name=name, dtype=meta.dtype, shape=shape, first_row=first_row // step, offset_bytes=offset_bytes
            )
            parts.append(part)
            offset_bytes += _aligned(part.num_bytes)
        return tuple(parts)

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of so many rows in a bucket."""
        return sum(_aligned(part.num_bytes) for part in self.parts(0, num_rows, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows of one tensor in one bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int
    """Row of the tensor that is the first here."""
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Without what aligns the next."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """The part in the bytes of its bucket, contiguous."""
        memory = bucket[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return memory.view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A run of rows of one tensor, and of their scales, in one bucket."""

    tensor: int
    """Index of the `WireTensor`."""
    first_row: int
    num_rows: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """What lies in one bucket."""

    placements: tuple[Placement, ...]
    num_bytes: int
    """That travel, header included."""


def lay_out(tensors: Sequence[WireTensor], bucket_bytes: int) -> tuple[BucketLayout, ...]:
    """Distribute tensors over buckets, in order.

    Args:
        tensors: All that is announced; what does not travel, or has no elements, takes no room.
        bucket_bytes: Size of a bucket, or that of the largest run of rows that cannot be cut if this is more.
    """
    sent = [(index, tensor) for index, tensor in enumerate(tensors) if tensor.travels and 0 not in tensor.shape]
    least = max(
        (tensor.num_bytes(min(tensor.row_step or tensor.num_rows, tensor.num_rows)) for _, tensor in sent), default=0
    )
    capacity = max(bucket_bytes, HEADER_BYTES + least)
    buckets: list[BucketLayout] = []
    placements: list[Placement] = []
    used = HEADER_BYTES

    def close() -> None:
        nonlocal used
        if placements:
            buckets.append(BucketLayout(placements=tuple(placements), num_bytes=used))
        placements.clear()
        used = HEADER_BYTES

    for index, tensor in sent:
        first = 0
        if used + tensor.num_bytes(tensor.num_rows) > capacity >= HEADER_BYTES + tensor.num_bytes(tensor.num_rows):
            close()
        while first < tensor.num_rows:
            count = _rows_that_fit(tensor, tensor.num_rows - first, capacity - used)
            if not count:
                close()
                continue
            parts = tensor.parts(first, count, used)
            placements.append(Placement(tensor=index, first_row=first, num_rows=count, parts=parts))
            used += tensor.num_bytes(count)
            first += count
    close()
    return tuple(buckets)


def _rows_that_fit(tensor: WireTensor, num_rows: int, num_bytes: int) -> int:
    """The most rows of `num_rows` that may be cut off and fit into `num_bytes`; 0 if none do."""
    if tensor.num_bytes(num_rows) <= num_bytes:
        return num_rows
    if not tensor.row_step:
        return 0
    low, high = 0, -(-num_rows // tensor.row_step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tensor.num_bytes(middle * tensor.row_step) <= num_bytes else (low, middle)
    return low * tensor.row_step


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
