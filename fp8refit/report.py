"""What a refit did and how long each phase took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, computed_field


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What the ranks wrote; summed over ranks, the slowest where it is a time."""

    num_tensors: int
    ignored: tuple[str, ...]
    num_bytes_read: int
    num_bytes_written: int
    fill_s: float
    verify_s: float
    device_s: float | None
    extra_bytes: int
    is_first: bool


class RefitReport(BaseModel):
    """The result of one refit. `str(report)` is one table, `report.model_dump_json()` is JSON."""

    model_config = ConfigDict(frozen=True)

    version: int
    """The policy version that the engine serves now; the first refit makes it 1."""
    engine: str
    num_tensors: int
    """Source tensors that were written."""
    ignored: tuple[str, ...] = ()
    """Source tensors that this engine has no slot for and does not need, such as the LM head of a tied model."""
    bytes_read: int
    bytes_written: int
    phases_s: dict[str, float]
    """Seconds of host time in each phase, in order. `fill` ends when everything is launched, `verify` when the device has
    finished and its status word is read."""
    fill_device_s: float | None = None
    """Seconds between the first and the last byte written, on the device's own clock; None on a CPU."""
    extra_bytes: int = 0
    """Device memory that the refit held of its own: the work table, and staging buffers for tensors from elsewhere."""
    is_first: bool = False
    """Whether this refit compiled the plan."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def total_s(self) -> float:
        """Seconds from call to return."""
        return sum(self.phases_s.values())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gb_per_s(self) -> float:
        """Bytes read and written over fill time, in units of 1e9 bytes a second."""
        seconds = self.fill_device_s if self.fill_device_s is not None else self.phases_s.get("fill", 0.0)
        return (self.bytes_read + self.bytes_written) / seconds / 1e9 if seconds > 0 else 0.0

    def summary(self) -> str:
        """One line."""
        phases = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in self.phases_s.items())
        return (
            f"refit {self.engine} to version {self.version}: {self.num_tensors} tensors, "
            f"{self.bytes_read / 1e9:.3f} GB read, {self.bytes_written / 1e9:.3f} GB written, "
            f"{self.gb_per_s:.0f} GB/s ({phases})"
        )

    def __str__(self) -> str:
        rows = [
            ("engine", self.engine),
            ("version", str(self.version)),
            ("tensors", str(self.num_tensors)),
            ("read", f"{self.bytes_read / 1e9:.3f} GB"),
            ("written", f"{self.bytes_written / 1e9:.3f} GB"),
            ("rate", f"{self.gb_per_s:.1f} GB/s"),
            *((name, f"{seconds * 1e3:.3f} ms") for name, seconds in self.phases_s.items()),
            ("total", f"{self.total_s * 1e3:.3f} ms"),
        ]
        return "\n".join(f"{name:<8} {value:>14}" for name, value in rows)


class PhaseClock:
    """Collects the seconds spent in named phases."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - start
