"""Identifies the process that a handle came from, and whether it still exists. Linux only."""

import os
from pathlib import Path

from pydantic import BaseModel


class Process(BaseModel, frozen=True, extra="forbid"):
    """One process of this boot. Unlike a bare PID, it is never a later process, or one in another container."""

    pid: int
    started: int
    """Start time, in clock ticks since boot."""
    pid_namespace: str
    """The namespace of `pid`, as in `/proc/PID/ns/pid`."""

    @classmethod
    def current(cls) -> "Process":
        """Describe the calling process."""
        started = _start_time("self")
        assert started is not None
        return cls(pid=os.getpid(), started=started, pid_namespace=_own_namespace())

    @property
    def is_reachable(self) -> bool:
        """Whether its PID means the same process here."""
        return self.pid_namespace == _own_namespace()

    @property
    def is_alive(self) -> bool:
        """Whether it is running. Valid only if it `is_reachable`."""
        return _start_time(str(self.pid)) == self.started


def _own_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_time(pid: str) -> int | None:
    """Start time of a process; None if it is gone, or dead and not yet waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may contain anything
    return None if fields[0] in "ZX" else int(fields[19])
