"""Times the quantizer alone: one matrix, by shape, dtype and scale format."""

from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from pydantic import BaseModel, Field

from fp8refit.bench.clock import Count, Percentiles, copy_gb_per_s, device_seconds
from fp8refit.bench.result import BenchResult, gpu_name, stamp, versions_of
from fp8refit.errors import UnsupportedEngineError
from fp8refit.kernels import Task, compile_table
from fp8refit.live.formats import PER_ROW, BlockFormat, ScaleFormat
from fp8refit.live.slots import Op, dtype_name

DEFAULT_SHAPES = ((4096, 4096), (12288, 4096), (4096, 12288), (1536, 2048), (28672, 8192))
_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
_MOST_MATRICES = 1024


class KernelBenchConfig(BaseModel, frozen=True, extra="forbid"):
    """What to measure."""

    shapes: tuple[tuple[Count, Count], ...] = Field(default=DEFAULT_SHAPES, min_length=1)
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = Field(default=("bfloat16", "float32"), min_length=1)
    scale_formats: tuple[ScaleFormat, ...] = Field(
        default=(ScaleFormat.FP32, ScaleFormat.UE8M0, ScaleFormat.FP32_DIVIDING), min_length=1
    )
    """In blocks of 128 x 128; `fp32_dividing`, which is vLLM's for rows, with one scale per row."""
    repeats: Count = Field(default=21, ge=3)
    min_bytes: int = Field(default=1 << 30, ge=1)
    """Matrices of one shape are repeated, up to 1024 times, until a launch moves this much. A single small one would stay
    in a cache."""


class KernelTiming(BaseModel, frozen=True):
    """The timing of one shape, dtype and scale format."""

    shape: tuple[int, int]
    dtype: str
    scale_format: ScaleFormat
    num_matrices: int
    """Matrices quantized by one launch."""
    num_bytes: int
    """Bytes that it reads and writes."""
    device_us: Percentiles
    gb_per_s: float
    fraction_of_copy: float


class KernelBenchResult(BenchResult, frozen=True):
    """The quantizer, compared with the copy roofline."""

    config: KernelBenchConfig
    copy_gb_per_s: float
    timings: tuple[KernelTiming, ...]


def run_kernel_bench(
    config: KernelBenchConfig, *, device: torch.device, on_progress: Callable[[str, int, int], None] = lambda *_: None
) -> KernelBenchResult:
    """Time launches of the quantizer on `device`.

    Raises:
        UnsupportedEngineError: A shape does not fit into the device's memory.
    """
    cases = list(product(config.shapes, config.dtypes, config.scale_formats))
    copy_rate = copy_gb_per_s(device)
    timings = []
    for index, (shape, dtype, scale_format) in enumerate(cases):
        on_progress(f"{shape[0]}x{shape[1]} {dtype} {scale_format}", index, len(cases))
        timings.append(_time(shape, dtype, scale_format, config, device, copy_rate))
    on_progress("done", len(cases), len(cases))
    return KernelBenchResult(
        config=config,
        command=_command_of(config, device),
        gpu=gpu_name(device),
        **stamp(("kernels",)),
        versions=versions_of(),
        copy_gb_per_s=copy_rate,
        timings=tuple(timings),
    )


def _time(
    shape: tuple[int, int],
    dtype: str,
    scale_format: ScaleFormat,
    config: KernelBenchConfig,
    device: torch.device,
    copy_rate: float,
) -> KernelTiming:
    rows, cols = shape
    block_format = PER_ROW if scale_format is PER_ROW.scale_format else BlockFormat(scale_format=scale_format)
    grid = block_format.scale_shape(shape)
    bytes_each = rows * cols * (_DTYPES[dtype].itemsize + 1) + 4 * grid[0] * grid[1]
    num_matrices = min(_MOST_MATRICES, -(-config.min_bytes // bytes_each))
    try:
        tasks = [
            Task(
                op=Op.QUANTIZE,
                source=torch.empty(shape, dtype=_DTYPES[dtype], device=device).normal_(0, 0.02),
                offset=(0, 0),
                target=torch.empty(shape, dtype=block_format.codes.dtype, device=device),
                scale=torch.empty(grid, dtype=torch.float32, device=device),
                format=block_format,
                round_to_bf16=False,
            )
            for _ in range(num_matrices)
        ]
    except (RuntimeError, OverflowError) as error:  # torch.OutOfMemoryError is one
        raise UnsupportedEngineError(
            f"{rows}x{cols}: {num_matrices} x {dtype} does not fit into the memory of {device} ({error})"
        ) from error
    table = compile_table(tasks, device)
    for _ in range(3):
        table.launch(check=True)
    times_us = [1e6 * device_seconds(lambda: table.launch(check=True), device) for _ in range(config.repeats)]
    timing = Percentiles.of(times_us)
    num_bytes = bytes_each * num_matrices
    gb_per_s = num_bytes / timing.median / 1e3
    return KernelTiming(
        shape=shape,
        dtype=dtype,
        scale_format=scale_format,
        num_matrices=num_matrices,
        num_bytes=num_bytes,
        device_us=timing,
        gb_per_s=gb_per_s,
        fraction_of_copy=gb_per_s / copy_rate,
    )


def _command_of(config: KernelBenchConfig, device: torch.device) -> str:
    """The command that repeats the measurement."""
    parts = ["fp8refit bench kernel"]
    if config.shapes != DEFAULT_SHAPES:
        parts.append(f"--shapes {','.join(f'{rows}x{cols}' for rows, cols in config.shapes)}")
    return " ".join([*parts, f"--dtypes {','.join(config.dtypes)} --repeats {config.repeats} --device {device.type}"])
