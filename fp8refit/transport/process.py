"""Which process a handle came from, and whether it is still there. Linux only."""

import os
from pathlib import Path

from pydantic import BaseModel


class Process(BaseModel, frozen=True, extra="forbid"):
    """One process of this boot: unlike a bare PID, never another one later, nor one of another container."""

    pid: int
    started: int
    """When it started, in clock ticks since boot."""
    pid_namespace: str
    """In which namespace `pid` counts, as `/proc/PID/ns/pid` says it."""

    @classmethod
    def current(cls) -> "Process":
        """The calling process."""
        started = _start_time("self")
        assert started is not None
        return cls(pid=os.getpid(), started=started, pid_namespace=_own_namespace())

    @property
    def is_reachable(self) -> bool:
        """Whether its PID means the same process here as there."""
        return self.pid_namespace == _own_namespace()

    @property
    def is_alive(self) -> bool:
        """Whether it runs. Only for one that `is_reachable`."""
        return _start_time(str(self.pid)) == self.started


def _own_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_time(pid: str) -> int | None:
    """When a process started; None if it is gone, or dead and not yet waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
