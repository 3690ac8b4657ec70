"""Records that tell whether two readers read the same state of the same files."""

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pydantic import BaseModel


class FileStamp(BaseModel, frozen=True, extra="forbid"):
    """Identifies a file and the state of it that was checked."""

    name: str
    num_bytes: int
    mtime_ns: int
    header: str
    """SHA-256 of the names, dtypes, shapes and positions of its tensors."""
    inode: int
    boot: str
    """Identifies the host, since each may number files of a shared file system differently."""

    def is_of(self, other: "FileStamp") -> bool:
        """Whether both describe the same state of the same file."""
        told_apart = {"inode", "boot"} if self.boot != other.boot else set()
        return self.model_dump(exclude=told_apart) == other.model_dump(exclude=told_apart)


class FilesRead(BaseModel, frozen=True, extra="forbid"):
    """The files that one reader opened. Two readers that find different states in one place read different
    checkpoints.
    """

    path: str
    """Absolute; links in it are not resolved."""
    host: str
    """A host's boot and mount namespace, within which a path has one meaning."""
    state: str
    """SHA-256 over the stamps of the files."""

    @classmethod
    def of(cls, path: Path, stamps: Iterable[FileStamp]) -> "FilesRead":
        """Describe the files with these stamps, found under `path`."""
        state = hashlib.sha256("\n".join(stamp.model_dump_json() for stamp in stamps).encode()).hexdigest()
        return cls(path=str(path.absolute()), host=f"{boot_id()}/{_mount_namespace()}", state=state)

    def clashes_with(self, other: "FilesRead") -> bool:
        """Whether another reader found something else in the same place. Copies elsewhere may differ."""
        return (self.host, self.path) == (other.host, other.path) and self.state != other.state


@cache
def boot_id() -> str:
    """Identifies this host since it was started; empty if unknown."""
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
