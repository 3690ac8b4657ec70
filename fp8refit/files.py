"""Safetensors files, read and not mapped: one that is cut short, replaced or deleted meanwhile is an error at worst.

What was judged is what is read: a file stays open from the reading of its header on. If it is written to in place, its size
or the time of its last change tells, and every read looks at them once it has its bytes.
"""

import hashlib
import os
import stat
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from torch import Tensor

from fp8refit.errors import InvalidSourceError

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Every dtype that a file can hold whose elements are whole bytes."""

_MAX_HEADER_BYTES = 100_000_000
"""As the format says."""
_CHUNK_BYTES = 4 << 20
"""What one thread reads at a time."""
_MAX_THREADS = 8

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(BaseModel):
    """What a header says of one tensor."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: list[_Count]
    data_offsets: list[_Count] = Field(min_length=2, max_length=2)


_ENTRIES = TypeAdapter(dict[str, _Entry])


class FileStamp(BaseModel):
    """Which file, and which state of it, somebody judged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_bytes: int
    mtime_ns: int
    header: str
    """sha256 of the names, dtypes, shapes and places of its tensors."""
    inode: int
    boot: str
    """Of which host: file systems may number files differently on every one."""

    def is_of(self, other: "FileStamp") -> bool:
        """Whether both are of one state of one file."""
        told_apart = {"inode", "boot"} if self.boot != other.boot else set()
        return self.model_dump(exclude=told_apart) == other.model_dump(exclude=told_apart)


class FilesRead(BaseModel):
    """Which files one reader opened. Readers that opened one place in two states read two checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Absolute; links in it are not followed."""
    host: str
    """Where the path leads to one thing: a host's boot and its mount namespace."""
    state: str
    """sha256 over the stamps of the files."""

    @classmethod
    def of(cls, path: Path, stamps: Iterable[FileStamp]) -> "FilesRead":
        """The files with these stamps, found under `path`."""
        state = hashlib.sha256("\n".join(stamp.model_dump_json() for stamp in stamps).encode()).hexdigest()
        return cls(path=str(path.absolute()), host=f"{_boot_id()}/{_mount_namespace()}", state=state)

    def clashes_with(self, other: "FilesRead") -> bool:
        """Whether another reader found something else in the same place. A copy in another place has a state of its own."""
        return (self.host, self.path) == (other.host, other.path) and self.state != other.state


class StoredTensor:
    """A tensor in a file, of which any box can be read.

    Attributes:
        meta: As if the file were its storage from its first byte on, on the meta device. A view of it says what to read.
    """

    def __init__(self, file: "SafetensorsFile", start: int, shape: list[int], dtype: torch.dtype) -> None:
        self._file, self._start = file, start
        self.meta = torch.empty(shape, dtype=dtype, device="meta")

    def read(self) -> Tensor:
        """All of it, in memory of its own.

        Raises:
            InvalidSourceError: See `read_box`.
        """
        tensor = torch.empty(self.meta.shape, dtype=self.meta.dtype, device="cpu")
        self.read_box(self.meta, tensor)
        return tensor

    def read_box(self, box: Tensor, into: Tensor) -> None:
        """Read what `box`, a view of `meta`, shows; of a row of which it shows a part, all of it.

        Args:
            box: What to read.
            into: Of its shape and dtype, contiguous, on the CPU.

        Raises:
            InvalidSourceError: The file cannot be read, or is not any more what it was when it was opened.
        """
        if not box.numel():
            return
        size = box.itemsize
        where = self._start + int(box.storage_offset()) * size
        if box.is_contiguous():
            box, into = box.view(-1), into.view(-1)
        steps = [step * size for step in box.stride()]
        # Rows are what lies far apart in the file, whatever the box calls them.
        order = sorted(range(box.ndim), key=lambda dim: (box.shape[dim] == 1, -steps[dim]))
        to = into.view(_UNSIGNED[size]).permute(order).numpy()
        self._file.read(where, to, [steps[dim] for dim in order])
        self._file.check_unchanged()


class Threads:
    """Those that read; none before the first large tensor."""

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Ends with this."""
        return ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "fp8refit-files")


class SafetensorsFile:
    """One file, open until nobody knows of it or its tensors any more.

    Args:
        path: Of the file.
        threads: To read it with.
        judged: What it has to be, if somebody else judged it.

    Raises:
        InvalidSourceError: It is missing, or no safetensors file; or it is not the one that was judged.
    """

    def __init__(self, path: Path, threads: Threads, *, judged: FileStamp | None = None) -> None:
        self.path, self._threads = path, threads
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            weakref.finalize(self, os.close, self._descriptor)
            found = os.fstat(self._descriptor)
        except (OSError, ValueError) as error:
            raise InvalidSourceError([f"{path}: cannot be read as safetensors ({error})"]) from error
        if not stat.S_ISREG(found.st_mode):
            raise InvalidSourceError([f"{path}: cannot be read as safetensors (it is no file)"])
        self._state = found.st_size, found.st_mtime_ns
        length, entries, digest = self._read_header()
        self.stamp = FileStamp(
            name=path.name,
            num_bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            header=digest,
            inode=found.st_ino,
            boot=_boot_id(),
        )
        if judged is not None and not judged.is_of(self.stamp):
            raise InvalidSourceError(
                [f"{path}: is another file than the one that was judged, or was changed since; refit again"]
            )
        self.check_unchanged()
        self.tensors = {
            name: StoredTensor(self, length + entry.data_offsets[0], entry.shape, SAFETENSORS_DTYPES[entry.dtype])
            for name, entry in entries.items()
        }

    def check_unchanged(self) -> None:
        """Hold that nobody wrote to it since it was opened.

        Raises:
            InvalidSourceError: Somebody did.
        """
        found = os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != self._state:
            raise InvalidSourceError([self._why_changed()])

    def read(self, where: int, to: npt.NDArray[np.generic], steps: list[int]) -> None:
        """Read elements into an array, large ones in several threads.

        Args:
            where: The first byte.
            to: Where they go.
            steps: In the file, from one element to the next in each dimension of `to`, in bytes, falling.

        Raises:
            InvalidSourceError: It ends before them, or cannot be read.
        """
        chunks = list(_chunks(where, to, steps))
        if len(chunks) == 1:
            self._read_chunk(*chunks[0])
            return
        for _ in self._threads.pool.map(lambda chunk: self._read_chunk(*chunk), chunks):
            pass

    def _read_chunk(self, where: int, to: npt.NDArray[np.generic], steps: list[int]) -> None:
        if _is_dense(to, steps):
            self._read_bytes(where, to.reshape(-1).view(np.uint8))
            return
        extent = sum((length - 1) * step for length, step in zip(to.shape, steps, strict=True)) + to.itemsize
        scratch = np.empty(extent, dtype=np.uint8)
        self._read_bytes(where, scratch)
        np.copyto(to, np.ndarray(to.shape, to.dtype, scratch, strides=steps))

    def _read_bytes(self, where: int, to: npt.NDArray[np.uint8]) -> None:
        while to.size:
            try:
                count = os.preadv(self._descriptor, [to.data], where)
            except OSError as error:
                raise InvalidSourceError([f"{self.path}: cannot be read any more ({error})"]) from error
            if not count:
                raise InvalidSourceError([self._why_changed()])
            to, where = to[count:], where + count

    def _why_changed(self) -> str:
        return (
            f"{self.path}: was changed after it was judged; write a checkpoint under a new name, then refit from that"
        )

    def _read_header(self) -> tuple[int, dict[str, _Entry], str]:
        """Where the bytes of its tensors begin, what it says of each, in order of their bytes, and the digest of that.

        Raises:
            InvalidSourceError: It is no safetensors file, or holds a dtype that fp8refit does not know.
        """
        num_bytes = self._state[0]
        prefix = np.empty(min(8, num_bytes), dtype=np.uint8)
        self._read_bytes(0, prefix)
        length = int.from_bytes(prefix.tobytes(), "little")
        if num_bytes < 8 or length > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise self._corrupt("its header is not whole")
        header = np.empty(length, dtype=np.uint8)
        self._read_bytes(8, header)
        try:
            parsed = from_json(header.tobytes())
            if isinstance(parsed, dict):
                parsed.pop("__metadata__", None)
            entries = _ENTRIES.validate_python(parsed)
        except (ValidationError, ValueError) as error:
            raise self._corrupt(f"its header is none: {str(error)[:300]}") from error
        unknown = [
            f"{name}: is stored as {entry.dtype}, which fp8refit does not read; store one of {', '.join(SAFETENSORS_DTYPES)}"
            for name, entry in entries.items()
            if entry.dtype not in SAFETENSORS_DTYPES
        ]
        if unknown:
            raise InvalidSourceError(unknown)
        entries = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
        end = 0
        for name, entry in entries.items():
            start, stop = entry.data_offsets
            needed = prod(entry.shape) * SAFETENSORS_DTYPES[entry.dtype].itemsize
            if start != end or stop - start != needed:
                raise self._corrupt(f"{name} lies at {start} to {stop}, where {needed} bytes from {end} on belong")
            end = stop
        if 8 + length + end != num_bytes:
            raise self._corrupt(f"it has {num_bytes} bytes, its header speaks of {8 + length + end}")
        return 8 + length, entries, hashlib.sha256(header.data).hexdigest()

    def _corrupt(self, why: str) -> InvalidSourceError:
        return InvalidSourceError([f"{self.path}: cannot be read as safetensors ({why})"])


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""By bytes of an element: NumPy has no BF16 nor FP8, and what moves bytes needs none."""


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def _mount_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def _is_dense(to: npt.NDArray[np.generic], steps: list[int]) -> bool:
    """Whether elements follow each other in the file as they do in the array, without gaps."""
    packed = [prod(to.shape[dim + 1 :]) * to.itemsize for dim in range(to.ndim)]
    return to.flags.c_contiguous and all(
        step == size or length == 1 for step, size, length in zip(steps, packed, to.shape, strict=True)
    )


def _chunks(
    where: int, to: npt.NDArray[np.generic], steps: list[int]
) -> Iterator[tuple[int, npt.NDArray[np.generic], list[int]]]:
    """What to read at a time: ranges of rows, of bounded size in the file unless one row has more."""
    if to.shape[0] * steps[0] <= _CHUNK_BYTES:
        yield where, to, steps
        return
    rows = max(_CHUNK_BYTES // steps[0], 1)
    for first in range(0, to.shape[0], rows):
        yield where + first * steps[0], to[first : first + rows], steps
