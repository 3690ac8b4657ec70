"""Host memory that another process can map: anonymous, not a file in `/dev/shm`, freed with the last process that maps
it.
"""

import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from fp8refit.errors import TransportError
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.segment import Segment, why_unopened


def make_memfd(num_bytes: int) -> tuple[Segment, Tensor, Callable[[], None]]:
    """Allocate memory of a fixed size, so that no mapping of it can become invalid.

    Returns:
        The segment, its bytes, and a function that closes its handle. The last tensor that views it unmaps it.
    """
    process = Process.current()
    id = f"memfd-{process.pid}-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(id, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = _bytes_of(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    handle = f"/proc/{process.pid}/fd/{descriptor}"
    segment = Segment(id=id, kind="memfd", num_bytes=num_bytes, handle=handle, process=process)
    return segment, memory, lambda: os.close(descriptor)


def map_memfd(segment: Segment) -> Tensor:
    """Map memory from `make_memfd`, perhaps of another process. The last tensor that views it unmaps it.

    Raises:
        TransportError: It does not exist, cannot be read by this process, or differs from what the segment says.
    """
    if re.fullmatch(rf"/proc/{segment.pid}/fd/\d+", segment.handle) is None:
        raise TransportError(
            f"segment {segment.id} has the handle {segment.handle!r}, which is not memory of its process"
        )
    try:
        descriptor = os.open(segment.handle, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(f"{why_unopened(segment, error)} ({error})") from error
    try:
        # Another file may be there by now, and in another container the PID may be another process's.
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{segment.id} (deleted)":
            raise TransportError(why_unopened(segment))
        size = os.fstat(descriptor).st_size
        if size < segment.num_bytes:
            raise TransportError(f"segment {segment.id} has {size} bytes, but should have {segment.num_bytes}")
        return _bytes_of(descriptor, segment.num_bytes)
    finally:
        os.close(descriptor)


def _bytes_of(descriptor: int, num_bytes: int) -> Tensor:
    """Map a file for reading and writing: torch warns about read-only memory."""
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
