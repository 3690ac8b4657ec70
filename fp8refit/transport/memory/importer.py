"""A rank's side of memory that a trainer shares: maps each allocation once, and returns views of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8refit.errors import TransportError
from fp8refit.transport.memory.cuda_driver import CudaDriver, CudaDriverError
from fp8refit.transport.memory.memfd import map_memfd
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.segment import DTYPES, Segment, TensorRef, check_refs, why_unopened

_IPC_HANDLE_BYTES = 64
_NO_PEER_ACCESS = frozenset({"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "CUDA_ERROR_TOO_MANY_PEERS"})


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

    def __init__(self, device: torch.device, *, reads_peers: bool = True, driver: CudaDriver | None = None) -> None:
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
