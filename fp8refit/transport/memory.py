"""Tensors of a trainer in the memory of engine ranks that run in other processes of the same host.

The driver's side is an `Exporter`, which names tensors by the handle of the allocation they lie in, and a `Bucket`, a
bounded piece of memory through which the tensors go that have no handle. `Segment` and `TensorRef` cross the processes
as JSON. The rank's side is an `Importer`, which maps each allocation once and gives tensors that are views of it.

Nothing here waits for the device: the driver sends references once the streams that wrote the tensors are done, and
leaves the tensors as they are until every rank has said that it has read them.
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
from fp8refit.guard import LayoutGuard
from fp8refit.slots import dtype_name
from fp8refit.transport.cuda_driver import CudaDriver, CudaDriverError
from fp8refit.transport.memfd import make_memfd, map_memfd
from fp8refit.transport.process import Process
from fp8refit.transport.segment import DTYPES, Segment, TensorRef, check_refs, extent_bytes, why_unopened

__all__ = ["Bucket", "Driver", "Export", "Exporter", "Importer", "Segment", "TensorRef"]

_ALIGNMENT_BYTES = 256
"""Where tensors begin in a bucket: the kernels read aligned rows with wide loads."""

_RECORDS = TypeAdapter(tuple[tuple[TensorRef, ...], tuple[Segment, ...]])
_IPC_HANDLE_BYTES = 64
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_NO_PEER_ACCESS = frozenset({"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "CUDA_ERROR_TOO_MANY_PEERS"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A state dict as other processes can reach it."""

    refs: tuple[TensorRef, ...]
    segments: tuple[Segment, ...]
    leftover: tuple[str, ...]
    """Names of tensors without a handle, empty ones among them: they go through a `Bucket`."""
    digest: str
    """sha256 over `refs` and `segments`: a rank that has opened the same digest has these tensors."""
    gpus: tuple[torch.device, ...]
    """On which tensors are, those without a handle too."""


class Driver(Protocol):
    """What is asked of the GPUs' driver. `CudaDriver` is the real one and says what its methods promise."""

    def device_uuid(self, device: torch.device) -> str | None:
        """Name a GPU for other processes."""
        ...

    def find_device(self, uuid: str) -> torch.device | None:
        """Find a GPU that another process named."""
        ...

    def allocation_of(self, address: int) -> tuple[int, int]:
        """First address and size of the allocation around an address."""
        ...

    def buffer_id(self, address: int) -> int | None:
        """What tells an allocation from a later one in its place."""
        ...

    def ipc_handle(self, base: int) -> bytes | None:
        """How other processes map an allocation, if they can."""
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
    """Names a trainer's CUDA tensors by the handles of the segments they lie in.

    It holds no tensor. A rank that has mapped a segment keeps the segment's memory from being given back to the GPU, so a
    trainer that frees and reallocates its weights tells the ranks to let go (`Importer.keep_only`) first.
    """

    def __init__(self, *, driver: Driver | None = None) -> None:
        self._driver = CudaDriver() if driver is None else driver
        self._process = Process.current()
        self._segments: dict[_SegmentKey, Segment | None] = {}
        self._guard = LayoutGuard((), ())
        self._addresses = self._guard.addresses
        self._export: Export | None = None

    def export(self, tensors: Mapping[str, Tensor], known_as: Sequence[str] | None = None) -> Export:
        """Give references to `tensors`; those given last, if these are recognised `again`.

        Args:
            tensors: By the names that the ranks will know them by.
            known_as: Names that they are recognised by, in the same order; those of `tensors` by default.
        """
        names, values = list(tensors) if known_as is None else known_as, list(tensors.values())
        export = self.again(names, values)
        if export is None:
            export = self._export = self._describe(tensors)
            if not self._guard.holds(names, values):  # to make one takes eight times as long as to ask it
                self._guard = LayoutGuard(names, values)
            self._addresses = self._guard.addresses
        return export

    def again(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Export | None:
        """What was given last, with one driver call a segment and under 1 us a tensor; None unless every tensor lies where and
        as it did, in the allocation in which it did.
        """
        is_current = (
            self._export is not None
            and self._guard.holds(names, tensors)
            and bool(np.array_equal(self._guard.addresses, self._addresses))
            and all(self._driver.buffer_id(base) == buffer_id for _, base, buffer_id in self._segments)
        )
        return self._export if is_current else None

    def close(self) -> None:
        """Forget every handle. What ranks have mapped stays mapped until they let go."""
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
    """Memory of bounded size that other processes can map, through which tensors go that have no handle of their own.

    Args:
        num_bytes: Its size, and the largest tensor that it takes.
        device: A GPU, for memory that is allocated beside torch's allocator and so can be shared whatever its settings; None
            for host memory that is no file in `/dev/shm` and is gone with the last process that maps it.

    Raises:
        StagingMemoryError: The GPU has no room for it.
        TransportError: The GPU cannot share memory between processes.
    """

    def __init__(self, num_bytes: int, device: torch.device | None = None, *, driver: Driver | None = None) -> None:
        if num_bytes <= 0:
            raise ValueError(f"a bucket needs at least one byte, not {num_bytes}")
        self.num_bytes = num_bytes
        self._used = 0
        self._close: Callable[[], None] | None = None
        if device is None:
            self.segment, self._memory, self._close = make_memfd(num_bytes)
        else:
            self.segment, self._memory, self._close = _gpu_memory(
                num_bytes, device, CudaDriver() if driver is None else driver
            )

    def has_room(self, tensor: Tensor) -> bool:
        """Whether `tensor` can be put beside what is there."""
        return self._used + tensor.nbytes <= self.num_bytes

    @torch.inference_mode()
    def put(self, name: str, tensor: Tensor) -> TensorRef:
        """Copy `tensor` in, contiguous and aligned to 256 bytes.

        The copy into a bucket on a GPU is queued on that GPU's current stream: the tensor stays as it is, and the reference
        is not sent, before the stream is done.

        Raises:
            ValueError: It is larger than the bucket, there is no room beside what is there, or its dtype is none that
                checkpoints hold.
        """
        if dtype_name(tensor.dtype) not in DTYPES:
            raise ValueError(f"{name}: is {dtype_name(tensor.dtype)}, which cannot be sent to another process")
        if tensor.nbytes > self.num_bytes:
            raise ValueError(f"{name}: has {tensor.nbytes} bytes, the bucket {self.num_bytes}; make a larger one")
        if not self.has_room(tensor):
            raise ValueError(f"{name}: the bucket is full; clear() it once every rank has read what is there")
        staged = self._memory[self._used : self._used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor, non_blocking=True)
        ref = TensorRef.of(name, staged, self.segment, offset_bytes=self._used)
        self._used += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return ref

    def clear(self) -> None:
        """Begin anew. Every rank has read what is there."""
        self._used = 0

    def close(self) -> None:
        """Give the memory back; to be called again is harmless. Every rank has let go of it (`Importer.keep_only`)."""
        self._memory = torch.empty(0, dtype=torch.uint8)
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
    """Maps segments of other processes, each once, and keeps them mapped from one refit to the next.

    While a segment is mapped its memory is not given back to the GPU, even after the trainer freed it. The tensors of CUDA
    memory are views that do not keep it mapped: using one after `keep_only` or `close` unmapped its segment is a fatal CUDA
    fault. Tensors of host memory keep it mapped.

    Args:
        device: The engine rank's own device.
        reads_peers: How memory of another GPU is mapped. True: into the address space of `device`, as tensors of `device`,
            which its kernels read through peer access, whether or not that GPU is visible here; without peer access as with
            False. False: as tensors of that GPU, which must be visible here, to be copied from.
    """

    def __init__(self, device: torch.device, *, reads_peers: bool = True, driver: Driver | None = None) -> None:
        self._device = device
        self._reads_peers = reads_peers
        self._driver = CudaDriver() if driver is None else driver
        self._process = Process.current()
        self._mappings: dict[str, _Mapping] = {}

    def open(self, segments: Iterable[Segment], refs: Iterable[TensorRef]) -> dict[str, Tensor]:
        """Give the tensor of each reference, by name, and map those of `segments` that they lie in.

        Everything is checked before anything is mapped. What was mapped before an error stays mapped.

        Raises:
            TransportError: A reference does not fit its segment, or a segment cannot be mapped: its process is gone, is
                another user's or another container's, its GPU is not visible here, or its memory was freed.
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

    def keep_only(self, ids: Iterable[str]) -> None:
        """Unmap every segment but these. Whatever read the others is done."""
        kept = set(ids)
        for id in [id for id in self._mappings if id not in kept]:
            self._mappings.pop(id).close()

    def close(self) -> None:
        """Unmap every segment. Whatever read them is done."""
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
            raise TransportError(
                f"segment {segment.id} is not what it was when it was mapped; close() the importer first"
            )
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
    """The allocation as other processes can map it; None if they cannot."""
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
            f"{device} has no room for a bucket of {num_bytes >> 20} MiB through which tensors go to other processes; "
            "free memory (torch.cuda.empty_cache() gives back what torch holds) or take a smaller bucket_bytes"
        ) from error
    try:
        segment = _share(driver, (uuid, address, driver.buffer_id(address)), num_bytes, Process.current())
        if segment is None:
            raise TransportError(
                f"{device} does not share memory between processes (CUDA IPC); keep the tensors on the CPU"
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
        raise TransportError(f"segment {segment.id} has the handle {segment.handle!r}, which is no CUDA IPC handle")
    return handle


def _typed(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """All whole elements of `dtype` in `memory`."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _nothing() -> None:
    """Close what is closed with the last tensor that views it."""
