"""Makes a trainer's tensors available to engine ranks in other processes of the same host.

On the driver's side, an `Exporter` describes tensors by the handles of their allocations. Tensors without a handle go
through a `Bucket`, a bounded piece of shared memory. `Segment` and `TensorRef` are sent as JSON. On the rank's side, an
`Importer` maps each allocation once and returns views of it.

Nothing here waits for the device. The driver sends references once the streams that wrote the tensors are done, and does
not change the tensors until every rank has read them.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fp8refit.errors import StagingMemoryError, TransportError
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import dtype_name
from fp8refit.transport.memory.cuda_driver import CudaDriver, CudaDriverError
from fp8refit.transport.memory.memfd import make_memfd, map_memfd
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.segment import DTYPES, Segment, TensorRef, check_refs, extent_bytes, why_unopened

__all__ = ["Bucket", "Driver", "Export", "Exporter", "Importer", "Segment", "TensorRef"]

_ALIGNMENT_BYTES = 256
"""Alignment of tensors in a bucket: kernels use wide loads on aligned rows."""

_RECORDS = TypeAdapter(tuple[tuple[TensorRef, ...], tuple[Segment, ...]])
_MOST_PLACED = 1 << 16
"""So many are remembered of one bucket."""
_IPC_HANDLE_BYTES = 64
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_NO_PEER_ACCESS = frozenset({"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "CUDA_ERROR_TOO_MANY_PEERS"})


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


class Driver(Protocol):
    """What is needed from the GPU driver. `CudaDriver` implements it and documents the methods."""

    def device_uuid(self, device: torch.device) -> str | None:
        """Return a GPU's name for other processes."""
        ...

    def find_device(self, uuid: str) -> torch.device | None:
        """Return the GPU with a name from another process."""
        ...

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return first address and size of the allocation around an address."""
        ...

    def buffer_id(self, address: int) -> int | None:
        """Return what distinguishes an allocation from a later one at the same address."""
        ...

    def ipc_handle(self, base: int) -> bytes | None:
        """Return the handle with which other processes can map an allocation, if any."""
        ...

    def open_ipc(self, handle: bytes, device: torch.device) -> int:
        """Map an allocation of another process."""
        ...

    def close_ipc(self, address: int, device: torch.device) -> None:
        """Unmap it."""
        ...

    def device_malloc(self, num_bytes: int, device: torch.device) -> int:
        """Allocate memory that other processes can map."""
        ...

    def device_free(self, address: int, device: torch.device) -> None:
        """Free it."""
        ...

    def tensor_at(self, address: int, num_bytes: int, device: torch.device) -> Tensor:
        """View memory as bytes."""
        ...


_SegmentKey: TypeAlias = tuple[str, int, int | None]
"""GPU, first address and buffer id of an allocation."""


class Exporter:
    """Describes a trainer's CUDA tensors by the handles of their segments.

    It holds no tensor. A mapped segment is not returned to the GPU. So a trainer that frees and reallocates its weights
    must first tell the ranks to unmap them (`Importer.keep_only`).
    """

    def __init__(self, *, driver: Driver | None = None) -> None:
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
                segments[key] = self._segments[key] if known else _share(self._driver, key, num_bytes, self._process)
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


class Bucket:
    """A bounded piece of memory that other processes can map, for tensors without a handle.

    Args:
        num_bytes: Its size, and so the size of the largest tensor.
        device: A GPU, for memory outside torch's allocator, which can be shared whatever torch's settings. None for host
            memory, which is not a file in `/dev/shm` and is freed with the last process that maps it.

    Raises:
        StagingMemoryError: The GPU has no room for it.
        TransportError: The GPU cannot share memory between processes.
    """

    def __init__(self, num_bytes: int, device: torch.device | None = None, *, driver: Driver | None = None) -> None:
        if num_bytes <= 0:
            raise ValueError(f"a bucket needs at least one byte, not {num_bytes}")
        self.num_bytes = num_bytes
        self._used = 0
        self._placed: dict[tuple[str, int], tuple[Tensor, TensorRef]] = {}
        """Where tensors were put before, by name and place: a stream puts the same ones there every time."""
        self._close: Callable[[], None] | None = None
        if device is None:
            self.segment, self._memory, self._close = make_memfd(num_bytes)
        else:
            self.segment, self._memory, self._close = _gpu_memory(
                num_bytes, device, CudaDriver() if driver is None else driver
            )

    def has_room(self, tensor: Tensor) -> bool:
        """Whether `tensor` fits beside what is already there."""
        return self._used + tensor.nbytes <= self.num_bytes

    def put(self, name: str, tensor: Tensor) -> TensorRef:
        """Copy `tensor` in, contiguous and aligned to 256 bytes. Takes 5 us; a model of experts has 18,000.

        On a GPU, the copy is queued on the current stream. Do not change the tensor or send the reference before the
        stream is done.

        Raises:
            ValueError: The tensor is larger than the bucket or the remaining room, or its dtype cannot occur in
                checkpoints.
        """
        with torch.inference_mode():
            staged, ref = self.place(name, tensor)
            staged.copy_(tensor, non_blocking=True)
        return ref

    def place(self, name: str, like: Tensor) -> tuple[Tensor, TensorRef]:
        """Make room for a tensor like `like` as `put` does, and return its memory and its reference. Write to it in
        `torch.inference_mode()`.

        Raises:
            ValueError: See `put`.
        """
        placed = self._placed.get((name, self._used))
        if placed is None or placed[0].shape != like.shape or placed[0].dtype is not like.dtype:
            placed = self._place(name, like)
        self._used += -(-placed[0].nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return placed

    def _place(self, name: str, tensor: Tensor) -> tuple[Tensor, TensorRef]:
        if dtype_name(tensor.dtype) not in DTYPES:
            raise ValueError(f"{name}: is {dtype_name(tensor.dtype)}, which cannot be sent to another process")
        if tensor.nbytes > self.num_bytes:
            raise ValueError(f"{name}: has {tensor.nbytes} bytes, but the bucket {self.num_bytes}; make a larger one")
        if not self.has_room(tensor):
            raise ValueError(f"{name}: the bucket is full; clear() it once every rank has read what is there")
        staged = self._memory[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if len(self._placed) >= _MOST_PLACED:
            self._placed.clear()
        placed = staged, TensorRef.of(name, staged, self.segment, offset_bytes=self._used)
        self._placed[name, self._used] = placed
        return placed

    def clear(self) -> None:
        """Start over. Every rank must have read the contents."""
        self._used = 0

    def close(self) -> None:
        """Free the memory; may be called repeatedly. Every rank must have unmapped it (`Importer.keep_only`)."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._placed.clear()
        close, self._close = self._close, None
        if close is not None:
            close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mapping:
    """A segment that is mapped here."""

    segment: Segment
    memory: Tensor
    close: Callable[[], None]


class Importer:
    """Maps segments of other processes, each once, and keeps them mapped between refits.

    A mapped segment is not returned to the GPU, even after the trainer freed it. Tensors in CUDA memory are views that do
    not keep it mapped: using one after `keep_only` or `close` unmapped its segment is a fatal CUDA fault. Tensors in host
    memory do keep it mapped.

    Args:
        device: The engine rank's device.
        reads_peers: How to map another GPU's memory. True: as tensors of `device`, whose kernels read it through peer
            access, whether or not that GPU is visible here; without peer access, as with False. False: as tensors of that
            GPU, which must be visible here, to copy from.
    """

    def __init__(self, device: torch.device, *, reads_peers: bool = True, driver: Driver | None = None) -> None:
        self._device = device
        self._reads_peers = reads_peers
        self._driver = CudaDriver() if driver is None else driver
        self._process = Process.current()
        self._mappings: dict[str, _Mapping] = {}

    def open(self, segments: Iterable[Segment], refs: Iterable[TensorRef]) -> dict[str, Tensor]:
        """Return each reference's tensor by name, and map the `segments` that they lie in.

        Everything is checked before anything is mapped. After an error, segments that are already mapped stay mapped.

        Raises:
            TransportError: A reference does not fit its segment, or a segment cannot be mapped: its process is gone, or
                belongs to another user or container; its GPU is not visible here; or its memory was freed.
        """
        by_id = {segment.id: segment for segment in segments}
        refs = list(refs)
        check_refs(refs, by_id)
        memories = {id: self._map(by_id[id]) for id in dict.fromkeys(ref.segment for ref in refs)}
        typed: dict[tuple[str, str], Tensor] = {}
        tensors = {}
        for ref in refs:
            key = (ref.segment, ref.dtype)
            if key not in typed:
                typed[key] = _typed(memories[ref.segment], DTYPES[ref.dtype])
            elements = typed[key]
            tensors[ref.name] = elements.as_strided(ref.shape, ref.stride, ref.offset_bytes // elements.itemsize)
        return tensors

    @property
    def mapped(self) -> frozenset[str]:
        """The ids of the mapped segments."""
        return frozenset(self._mappings)

    def keep_only(self, ids: Iterable[str]) -> None:
        """Unmap all other segments. Nothing may be reading them."""
        kept = set(ids)
        for id in [id for id in self._mappings if id not in kept]:
            self._mappings.pop(id).close()

    def close(self) -> None:
        """Unmap every segment. Nothing may be reading them."""
        self.keep_only(())

    def _map(self, segment: Segment) -> Tensor:
        mapping = self._mappings.get(segment.id)
        if mapping is None:
            if segment.kind == "memfd":
                mapping = _Mapping(segment=segment, memory=map_memfd(segment), close=_nothing)
            elif segment.process == self._process:
                mapping = _Mapping(segment=segment, memory=self._own_memory(segment), close=_nothing)
            else:
                mapping = self._open_ipc(segment)
            self._mappings[segment.id] = mapping
        elif mapping.segment != segment:
            raise TransportError(f"segment {segment.id} has changed since it was mapped; close() the importer first")
        return mapping.memory

    def _own_memory(self, segment: Segment) -> Tensor:
        if segment.buffer_id is None or self._driver.buffer_id(segment.address) != segment.buffer_id:
            raise TransportError(f"the memory of segment {segment.id} was freed; export its tensors again")
        return self._driver.tensor_at(segment.address, segment.num_bytes, self._home_of(segment))

    def _open_ipc(self, segment: Segment) -> _Mapping:
        device = self._device if self._reads_peers else self._home_of(segment)
        try:
            address = self._driver.open_ipc(_ipc_handle(segment), device)
        except CudaDriverError as error:
            if error.name not in _NO_PEER_ACCESS:
                raise TransportError(f"{why_unopened(segment)} ({error})") from error
            device = self._home_of(segment)
            address = self._driver.open_ipc(_ipc_handle(segment), device)
        try:
            memory = self._driver.tensor_at(address, segment.num_bytes, device)
        except TransportError:
            self._driver.close_ipc(address, device)
            raise
        return _Mapping(segment=segment, memory=memory, close=lambda: self._driver.close_ipc(address, device))

    def _home_of(self, segment: Segment) -> torch.device:
        device = self._driver.find_device(segment.device or "")
        if device is None:
            raise TransportError(
                f"GPU {segment.device} of process {segment.pid} is not visible here: start the engine with a "
                "CUDA_VISIBLE_DEVICES that has it, or send tensors that are on the CPU"
            )
        return device


def _share(driver: Driver, key: _SegmentKey, num_bytes: int, process: Process) -> Segment | None:
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


def _gpu_memory(num_bytes: int, device: torch.device, driver: Driver) -> tuple[Segment, Tensor, Callable[[], None]]:
    uuid = driver.device_uuid(device)
    if uuid is None:
        raise ValueError(f"a bucket lies on a GPU or, with device=None, in host memory; not on {device}")
    try:
        address = driver.device_malloc(num_bytes, device)
    except CudaDriverError as error:
        if error.name != _OUT_OF_MEMORY:
            raise
        raise StagingMemoryError(
            f"{device} has no room for a bucket of {num_bytes >> 20} MiB to send tensors to other processes; free memory "
            "(torch.cuda.empty_cache() returns what torch holds) or use a smaller bucket_bytes"
        ) from error
    try:
        segment = _share(driver, (uuid, address, driver.buffer_id(address)), num_bytes, Process.current())
        if segment is None:
            raise TransportError(
                f"{device} cannot share memory between processes (CUDA IPC); keep the tensors on the CPU"
            )
        memory = driver.tensor_at(address, num_bytes, device)
    except BaseException:
        driver.device_free(address, device)
        raise
    return segment, memory, lambda: driver.device_free(address, device)


def _ipc_handle(segment: Segment) -> bytes:
    try:
        handle = bytes.fromhex(segment.handle)
    except ValueError:
        handle = b""
    if len(handle) != _IPC_HANDLE_BYTES:
        raise TransportError(f"segment {segment.id} has the handle {segment.handle!r}, which is not a CUDA IPC handle")
    return handle


def _typed(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """View the whole elements of `dtype` in `memory`."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _nothing() -> None:
    """Do nothing: the last tensor that views the memory unmaps it."""
