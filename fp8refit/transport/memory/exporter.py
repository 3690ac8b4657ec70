"""The trainer's side of memory that it shares in place: describes tensors by the handles of their allocations.

`Segment` and `TensorRef` are sent as JSON. Nothing here waits for the device. The driver sends references once the streams
that wrote the tensors are done, and does not change the tensors until every rank has read them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import dtype_name
from fp8refit.transport.memory.cuda_driver import CudaDriver
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.segment import DTYPES, Segment, TensorRef, extent_bytes

_RECORDS = TypeAdapter(tuple[tuple[TensorRef, ...], tuple[Segment, ...]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A state dict as other processes can reach it."""

    refs: tuple[TensorRef, ...]
    segments: tuple[Segment, ...]
    leftover: tuple[str, ...]
    """Names of tensors without a handle, including empty ones: they go through a `Bucket`."""
    digest: str
    """SHA-256 of `refs` and `segments`: a rank that has opened this digest has these tensors."""
    gpus: tuple[torch.device, ...]
    """GPUs of the tensors, including those without a handle."""


_SegmentKey: TypeAlias = tuple[str, int, int | None]
"""GPU, first address and buffer id of an allocation."""


class Exporter:
    """Describes a trainer's CUDA tensors by the handles of their segments.

    It holds no tensor. A mapped segment is not returned to the GPU. So a trainer that frees and reallocates its weights
    must first tell the ranks to unmap them (`Importer.keep_only`).
    """

    def __init__(self, *, driver: CudaDriver | None = None) -> None:
        self._driver = CudaDriver() if driver is None else driver
        self._process = Process.current()
        self._segments: dict[_SegmentKey, Segment | None] = {}
        self._guard = LayoutGuard((), ())
        self._addresses = self._guard.addresses
        self._export: Export | None = None

    def export(self, tensors: Mapping[str, Tensor], known_as: Sequence[str] | None = None) -> Export:
        """Return references to `tensors`: the previous ones if the tensors are recognized by `again`.

        Args:
            tensors: Tensors by the names that the ranks will use.
            known_as: Names to recognize them by, in the same order; by default those of `tensors`.
        """
        names, values = list(tensors) if known_as is None else known_as, list(tensors.values())
        export = self.again(names, values)
        if export is None:
            export = self._export = self._describe(tensors)
            if not self._guard.holds(names, values):  # making one takes eight times as long as asking it
                self._guard = LayoutGuard(names, values)
            self._addresses = self._guard.addresses
        return export

    def again(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Export | None:
        """Return the previous references if every tensor lies where it did, with the same layout and allocation;
        otherwise None. Takes one driver call per segment and less than 1 us per tensor.
        """
        is_current = (
            self._export is not None
            and self._guard.holds(names, tensors)
            and bool(np.array_equal(self._guard.addresses, self._addresses))
            and all(self._driver.buffer_id(base) == buffer_id for _, base, buffer_id in self._segments)
        )
        return self._export if is_current else None

    @property
    def last(self) -> Export | None:
        """The last references; None after `close`."""
        return self._export

    def is_allocated(self, export: Export) -> bool:
        """Whether all memory of an export still exists. Takes one driver call per segment."""
        return all(self._driver.buffer_id(segment.address) == segment.buffer_id for segment in export.segments)

    def close(self) -> None:
        """Forget every handle. Ranks keep their mappings until they unmap them."""
        self._segments, self._guard, self._export = {}, LayoutGuard((), ()), None

    def _describe(self, tensors: Mapping[str, Tensor]) -> Export:
        segments: dict[_SegmentKey, Segment | None] = {}
        found: dict[int, Segment | None] = {}
        refs: list[TensorRef] = []
        leftover: list[str] = []
        base, num_bytes = 0, 0
        for name, tensor in tensors.items():
            uuid = self._driver.device_uuid(tensor.device)
            if uuid is None or tensor.numel() == 0 or dtype_name(tensor.dtype) not in DTYPES:
                leftover.append(name)
                continue
            address = tensor.data_ptr()
            if not base <= address < base + num_bytes:
                base, num_bytes = self._driver.allocation_of(address)
            if base not in found:
                key = (uuid, base, self._driver.buffer_id(base))
                known = key in self._segments
                segments[key] = (
                    self._segments[key] if known else share_allocation(self._driver, key, num_bytes, self._process)
                )
                found[base] = segments[key]
            segment = found[base]
            offset = address - base
            if segment is None or offset + extent_bytes(tensor.shape, tensor.stride(), tensor.dtype) > num_bytes:
                leftover.append(name)
            else:
                refs.append(TensorRef.of(name, tensor, segment, offset_bytes=offset))
        self._segments = segments
        shared = tuple(segment for segment in found.values() if segment is not None)
        digest = hashlib.sha256(_RECORDS.dump_json((tuple(refs), shared))).hexdigest()
        gpus = tuple({tensor.device for tensor in tensors.values() if tensor.is_cuda})
        return Export(refs=tuple(refs), segments=shared, leftover=tuple(leftover), digest=digest, gpus=gpus)


def share_allocation(driver: CudaDriver, key: _SegmentKey, num_bytes: int, process: Process) -> Segment | None:
    """Describe an allocation so that other processes can map it; None if they cannot."""
    uuid, base, buffer_id = key
    handle = driver.ipc_handle(base)
    if buffer_id is None or handle is None:
        return None
    return Segment(
        id=f"cuda-{process.pid}-{process.started}-{uuid}-{buffer_id}",
        kind="cuda_ipc",
        num_bytes=num_bytes,
        handle=handle.hex(),
        device=uuid,
        process=process,
        address=base,
        buffer_id=buffer_id,
    )
