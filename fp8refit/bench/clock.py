"""Timing: percentiles of interleaved repeats, and the copy rate to compare fills with."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import torch
from pydantic import BaseModel, Field

Result = TypeVar("Result")
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


def time_call(run: Callable[[], Result], device: torch.device) -> tuple[float, int, Result]:
    """Time a call on an idle device.

    Returns:
        Host seconds from call to return, the peak of additional GPU memory in bytes, as torch counts it in this process (0
        on a CPU), and the call's result.
    """
    has_gpu, held_bytes, extra_bytes = device.type == "cuda", 0, 0
    if has_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held_bytes = torch.cuda.memory_allocated(device)
    start_s = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start_s
    if has_gpu:
        torch.cuda.synchronize(device)
        extra_bytes = torch.cuda.max_memory_allocated(device) - held_bytes
    return seconds, extra_bytes, result


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds on the device's clock, or on the host's if the device has none."""
    if device.type != "cuda":
        return time_call(run, device)[0]
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copy_gb_per_s(device: torch.device, repeats: int = 5) -> float:
    """The copy roofline of a device: the median rate of one large copy, in 1e9 bytes read and written per second."""
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    source = source.random_(0, 255) if device.type == "cuda" else source.fill_(85)  # random values take a CPU seconds
    target = torch.empty_like(source)
    times_s = [device_seconds(lambda: target.copy_(source), device) for _ in range(repeats + 1)][1:]
    return 2 * source.numel() / statistics.median(times_s) / 1e9
