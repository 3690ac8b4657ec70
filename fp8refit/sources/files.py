"""Safetensors files, read instead of mapped, so that a truncated, replaced or deleted file raises an error at worst.

A file stays open once its header was read, so what was checked is what is read. Writing to it in place changes its size
or modification time; every read checks both after reading.
"""

import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.live.dtypes import SAFETENSORS_DTYPES
from fp8refit.transport.stamps import FileStamp, boot_id

_MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""
_CHUNK_BYTES = 4 << 20
"""What one thread reads at a time."""
_MAX_THREADS = 8

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(BaseModel, strict=True, extra="forbid"):
    """What a header says about one tensor."""

    dtype: str
    shape: list[_Count]
    data_offsets: list[_Count] = Field(min_length=2, max_length=2)


_ENTRIES = TypeAdapter(dict[str, _Entry])


class StoredTensor:
    """A tensor in a file. Any box of it can be read.

    Attributes:
        meta: A meta tensor whose storage stands for the file, from its first byte. A view of it says what to read.
    """

    def __init__(self, file: "SafetensorsFile", start: int, shape: list[int], dtype: torch.dtype) -> None:
        self._file, self._start = file, start
        self.meta = torch.empty(shape, dtype=dtype, device="meta")

    def read(self) -> Tensor:
        """Read all of it into new memory.

        Raises:
            InvalidSourceError: As in `read_box`.
        """
        tensor = torch.empty(self.meta.shape, dtype=self.meta.dtype, device="cpu")
        self.read_box(self.meta, tensor)
        return tensor

    def read_box(self, box: Tensor, into: Tensor) -> None:
        """Read what `box`, a view of `meta`, covers. A row that it covers in part is read whole.

        Args:
            box: What to read.
            into: A contiguous CPU tensor of its shape and dtype.

        Raises:
            InvalidSourceError: The file cannot be read, or changed since it was opened.
        """
        if not box.numel():
            return
        size = box.itemsize
        where = self._start + int(box.storage_offset()) * size
        if box.is_contiguous():
            box, into = box.view(-1), into.view(-1)
        steps = [step * size for step in box.stride()]
        # Rows are whatever lies furthest apart in the file, in whichever dimension of the box.
        order = sorted(range(box.ndim), key=lambda dim: (box.shape[dim] == 1, -steps[dim]))
        to = into.view(_UNSIGNED[size]).permute(order).numpy()
        self._file.read(where, to, [steps[dim] for dim in order])
        self._file.check_unchanged()


class Threads:
    """Reader threads, started for the first large tensor."""

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The pool; it ends with this object."""
        return ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "fp8refit-files")


class SafetensorsFile:
    """One file, kept open as long as it or one of its tensors is referenced.

    Args:
        path: Path of the file.
        threads: Threads to read it with.
        judged: The state that was checked elsewhere, if any.

    Raises:
        InvalidSourceError: The file is missing, not a safetensors file, or not in the state that was checked.
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
            raise InvalidSourceError([f"{path}: cannot be read as safetensors (it is not a file)"])
        self._state = found.st_size, found.st_mtime_ns
        length, entries, digest = self._read_header()
        self.stamp = FileStamp(
            name=path.name,
            num_bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            header=digest,
            inode=found.st_ino,
            boot=boot_id(),
        )
        if judged is not None and not judged.is_of(self.stamp):
            raise InvalidSourceError([f"{path}: changed, or was replaced, after it was checked; refit again"])
        self.check_unchanged()
        self.tensors = {
            name: StoredTensor(self, length + entry.data_offsets[0], entry.shape, SAFETENSORS_DTYPES[entry.dtype])
            for name, entry in entries.items()
        }

    def check_unchanged(self) -> None:
        """Check that nobody wrote to the file since it was opened.

        Raises:
            InvalidSourceError: Somebody did.
        """
        found = os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != self._state:
            raise InvalidSourceError([self._why_changed()])

    def read(self, where: int, to: npt.NDArray[np.generic], steps: list[int]) -> None:
        """Read elements into an array, using several threads for large ones.

        Args:
            where: Position of the first byte.
            to: Where they go.
            steps: For each dimension of `to`, the bytes from one element to the next in the file, descending.

        Raises:
            InvalidSourceError: The file ends before them, or cannot be read.
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
                raise InvalidSourceError([f"{self.path}: can no longer be read ({error})"]) from error
            if not count:
                raise InvalidSourceError([self._why_changed()])
            to, where = to[count:], where + count

    def _why_changed(self) -> str:
        return (
            f"{self.path}: changed after it was checked; write each checkpoint under a new name, then refit from that"
        )

    def _read_header(self) -> tuple[int, dict[str, _Entry], str]:
        """Return where tensor bytes begin, an entry per tensor in byte order, and the digest of the entries.

        Raises:
            InvalidSourceError: It is not a safetensors file, or holds a dtype unknown to fp8refit.
        """
        num_bytes = self._state[0]
        prefix = np.empty(min(8, num_bytes), dtype=np.uint8)
        self._read_bytes(0, prefix)
        length = int.from_bytes(prefix.tobytes(), "little")
        if num_bytes < 8 or length > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise self._corrupt("its header is cut short")
        header = np.empty(length, dtype=np.uint8)
        self._read_bytes(8, header)
        try:
            parsed = from_json(header.tobytes())
            if isinstance(parsed, dict):
                parsed.pop("__metadata__", None)
            entries = _ENTRIES.validate_python(parsed)
        except (ValidationError, ValueError) as error:
            raise self._corrupt(f"its header is not valid: {str(error)[:300]}") from error
        unknown = [
            f"{name}: is stored as {entry.dtype}, which fp8refit cannot read; store one of {', '.join(SAFETENSORS_DTYPES)}"
            for name, entry in entries.items()
            if entry.dtype not in SAFETENSORS_DTYPES
        ]
        if unknown:
            raise InvalidSourceError(unknown)
        entries = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
        end = 0
        for name, entry in entries.items():
            start, stop = entry.data_offsets
            if prod(filter(None, entry.shape)) * SAFETENSORS_DTYPES[entry.dtype].itemsize >= 1 << 63:
                raise self._corrupt(f"{name} has shape {entry.shape}, which is too large")
            needed = prod(entry.shape) * SAFETENSORS_DTYPES[entry.dtype].itemsize
            if start != end or stop - start != needed:
                raise self._corrupt(f"{name} lies at {start} to {stop}, not in the {needed} bytes from {end}")
            end = stop
        if 8 + length + end != num_bytes:
            raise self._corrupt(f"it has {num_bytes} bytes, but its header describes {8 + length + end}")
        return 8 + length, entries, hashlib.sha256(header.data).hexdigest()

    def _corrupt(self, why: str) -> InvalidSourceError:
        return InvalidSourceError([f"{self.path}: cannot be read as safetensors ({why})"])


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""By element size. NumPy has no BF16 or FP8, and moving bytes needs neither."""


def _is_dense(to: npt.NDArray[np.generic], steps: list[int]) -> bool:
    """Whether elements have the same order in the file and the array, without gaps."""
    packed = [prod(to.shape[dim + 1 :]) * to.itemsize for dim in range(to.ndim)]
    return to.flags.c_contiguous and all(
        step == size or length == 1 for step, size, length in zip(steps, packed, to.shape, strict=True)
    )


def _chunks(
    where: int, to: npt.NDArray[np.generic], steps: list[int]
) -> Iterator[tuple[int, npt.NDArray[np.generic], list[int]]]:
    """Yield ranges of rows to read at a time, of bounded size in the file unless a single row is larger."""
    if to.shape[0] * steps[0] <= _CHUNK_BYTES:
        yield where, to, steps
        return
    rows = max(_CHUNK_BYTES // steps[0], 1)
    for first in range(0, to.shape[0], rows):
        yield where + first * steps[0], to[first : first + rows], steps
