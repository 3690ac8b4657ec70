"""The trainer's side of memory that it shares for tensors without a handle of their own, which are copied into it."""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8refit.errors import StagingMemoryError, TransportError
from fp8refit.live.slots import dtype_name
from fp8refit.transport.memory.cuda_driver import CudaDriver, CudaDriverError
from fp8refit.transport.memory.exporter import share_allocation
from fp8refit.transport.memory.memfd import make_memfd
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.segment import DTYPES, Segment, TensorRef

_ALIGNMENT_BYTES = 256
"""Alignment of tensors in a bucket: kernels use wide loads on aligned rows."""
_MOST_PLACED = 1 << 16
"""How many placements of one bucket are remembered."""
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


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

    def __init__(self, num_bytes: int, device: torch.device | None = None, *, driver: CudaDriver | None = None) -> None:
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
        """Copy `tensor` in, contiguous and aligned to 256 bytes. Takes 5 us; a mixture-of-experts model has 18,000.

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


def _gpu_memory(num_bytes: int, device: torch.device, driver: CudaDriver) -> tuple[Segment, Tensor, Callable[[], None]]:
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
        segment = share_allocation(driver, (uuid, address, driver.buffer_id(address)), num_bytes, Process.current())
        if segment is None:
            raise TransportError(
                f"{device} cannot share memory between processes (CUDA IPC); keep the tensors on the CPU"
            )
        memory = driver.tensor_at(address, num_bytes, device)
    except BaseException:
        driver.device_free(address, device)
        raise
    return segment, memory, lambda: driver.device_free(address, device)
