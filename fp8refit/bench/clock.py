"""Timing: percentiles of interleaved repeats, and the copy rate to compare fills with."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from pydantic import BaseModel, Field

Count = Annotated[int, Field(ge=1, le=1 << 24)]
"""A number of measurements, limited so that they end and fit into memory."""
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
"""Far more than any cache holds."""


class Percentiles(BaseModel, frozen=True):
    """Percentiles of repeated measurements, in their unit."""

    median: float
    p90: float
    min: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles":
        """Summarize `values`. p90 is the smallest value that nine of ten do not exceed."""
        ordered = sorted(values)
        p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return cls(median=statistics.median(ordered), p90=p90, min=ordered[0], max=ordered[-1], count=len(ordered))


def wait(device: torch.device) -> None:
    """Wait until everything launched on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Host seconds of a run, from an idle device to an idle device."""
    wait(device)
    start_s = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start_s


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device's clock, or on the host's if the device has none."""
    if device.type != "cuda":
        return seconds(run, device)
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copy_gb_per_s(device: torch.device, repeats: int = 5) -> float:
    """The copy roofline of a device: the median rate of one large copy, in 1e9 bytes read and written per second."""
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    times_s = [device_seconds(lambda: target.copy_(source), device) for _ in range(repeats + 1)][1:]
    return 2 * source.numel() / statistics.median(times_s) / 1e9


class PeakMemory:
    """The peak of additional GPU memory in a block, as torch counts it in this process; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = 0

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            wait(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.extra_bytes = 0
        if self._device.type == "cuda":
            wait(self._device)
            self.extra_bytes = torch.cuda.max_memory_allocated(self._device) - self._held
