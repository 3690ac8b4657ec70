"""What is sent between processes instead of tensors: the allocations, and where each tensor lies in them.

Everything from another process is checked here before a tensor is made from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from fp8refit.errors import TransportError
from fp8refit.live.dtypes import SAFETENSORS_DTYPES
from fp8refit.live.slots import TensorMeta, dtype_name
from fp8refit.transport.memory.process import Process

_INDEX_LIMIT = 1 << 63

DTYPES = {dtype_name(dtype): dtype for dtype in (*SAFETENSORS_DTYPES.values(), torch.complex128)}
"""The dtypes that can be sent, by name."""


def unsendable(metadata: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Say, by name, why some tensors cannot be sent."""
    return {
        name: f"{name}: has dtype {dtype_name(meta.dtype)}, which no weight has"
        for name, meta in metadata.items()
        if dtype_name(meta.dtype) not in DTYPES
    }


class Segment(BaseModel, frozen=True, extra="forbid"):
    """One allocation that another process can map."""

    id: str
    """Unique name of this allocation, never reused, even after it was freed."""
    kind: Literal["cuda_ipc", "memfd"]
    num_bytes: int = Field(gt=0)
    handle: str
    """The CUDA IPC handle in hexadecimal, or `/proc/PID/fd/N`."""
    device: str | None = None
    """UUID of its GPU."""
    process: Process
    """The process that allocated it."""
    address: int = 0
    """Its address in that process, for that process itself: it cannot open its own CUDA IPC handle."""
    buffer_id: int | None = None
    """The CUDA driver's number for it in that process."""

    @property
    def pid(self) -> int:
        """PID of the process that allocated it, as seen by that process."""
        return self.process.pid


class TensorRef(BaseModel, frozen=True, extra="forbid"):
    """Where a tensor lies in a segment. Opening it checks it against the segment."""

    name: str
    segment: str
    """The segment's `id`."""
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    dtype: str
    """Spelled as in checkpoints, such as `bfloat16`."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, segment: Segment, *, offset_bytes: int) -> "TensorRef":
        """Describe `tensor`, which begins `offset_bytes` into `segment`."""
        return cls(
            name=name,
            segment=segment.id,
            offset_bytes=offset_bytes,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=dtype_name(tensor.dtype),
        )


def extent_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from a tensor's first to its last, including gaps."""
    if 0 in shape:
        return 0
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


def check_refs(refs: Iterable[TensorRef], segments: Mapping[str, Segment]) -> None:
    """Check references from another process.

    Raises:
        TransportError: References do not fit; lists all of them.
    """
    names: set[str] = set()
    problems = []
    for ref in refs:
        problem = "is given twice" if ref.name in names else _what_is_wrong(ref, segments.get(ref.segment))
        names.add(ref.name)
        if problem is not None:
            problems.append(f"{ref.name}: {problem}")
    if problems:
        listing = "".join(f"\n  - {problem}" for problem in problems)
        raise TransportError(f"{len(problems)} reference(s) of the trainer cannot be used:{listing}")


def _what_is_wrong(ref: TensorRef, segment: Segment | None) -> str | None:
    if segment is None:
        return f"lies in segment {ref.segment}, which was not sent"
    if ref.dtype not in DTYPES:
        return f"is {ref.dtype}, which no checkpoint holds"
    if len(ref.shape) != len(ref.stride):
        return f"has {len(ref.shape)} dimensions and {len(ref.stride)} strides"
    numbers = (ref.offset_bytes, *ref.shape, *ref.stride, prod(ref.shape))
    if not all(0 <= number < _INDEX_LIMIT for number in numbers):
        return f"has offset {ref.offset_bytes}, shape {list(ref.shape)}, strides {list(ref.stride)}, not all in range"
    dtype = DTYPES[ref.dtype]
    if ref.offset_bytes % dtype.itemsize != 0:
        return (
            f"begins at byte {ref.offset_bytes}, which is not a multiple of the {dtype.itemsize} bytes of {ref.dtype}"
        )
    end = ref.offset_bytes + extent_bytes(ref.shape, ref.stride, dtype)
    if end > segment.num_bytes:
        return f"ends at byte {end} of a segment of {segment.num_bytes}"
    return None


def why_unopened(segment: Segment, error: OSError | None = None) -> str:
    """Say why a segment could not be mapped, and what to do."""
    owner = f"process {segment.pid}, whose memory holds the tensors,"
    if not segment.process.is_reachable:
        return (
            f"{owner} runs in another container or on another host: run trainer and engine in one PID namespace, or send "
            "the tensors over the network"
        )
    if not segment.process.is_alive:
        return f"{owner} is gone: start the trainer again and refit from it"
    if isinstance(error, PermissionError):
        return f"{owner} does not let other users read its memory: run trainer and engine as the same user"
    return f"{owner} has freed segment {segment.id}, or does not share it: export the tensors again"
