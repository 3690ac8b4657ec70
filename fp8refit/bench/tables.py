"""Benchmark results as tables for people."""

from collections.abc import Iterator

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from fp8refit.bench.clock import Percentiles
from fp8refit.bench.kernel import KernelBenchResult
from fp8refit.bench.refit import OURS, RefitBenchResult
from fp8refit.bench.rollout_result import RolloutBenchResult


def refit_tables(result: RefitBenchResult) -> Group:
    """Show the phases of a refit, and the ways to give an engine new weights side by side."""
    return Group(
        Text(_title(result)), _phases_table(result), _comparison_table(result), Text(f"again: {result.command}")
    )


def _title(result: RefitBenchResult) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    gigabytes = f"{result.bytes_read / 1e9:.2f} GB read, {result.bytes_written / 1e9:.2f} GB written"
    return (
        f"{result.config.engine}, {result.config.model}, {result.config.tp} rank(s) on {result.gpu} ({versions}): "
        f"{result.num_tensors} tensors, {gigabytes}, copy {result.copy_gb_per_s:.0f} GB/s"
    )


def _phases_table(result: RefitBenchResult) -> Table:
    table = Table("phase", *_numbers("median", "p90", "min", "max"), title="one refit, ms")
    for name, timing in result.phases_ms.items():
        table.add_row(name, *_cells(timing))
    table.add_section()
    table.add_row("plan + fill + verify", *_cells(result.plan_fill_verify_ms))
    table.add_row("call to return", *_cells(result.wall_ms))
    if result.fill_device_ms is not None:
        table.add_row(f"fill on the device, {result.fill_over_copy:.2f} x copy", *_cells(result.fill_device_ms))
        table.add_row("everything else", *_cells(result.host_ms))
    table.add_row("first refit", f"{result.first_ms:.2f}")
    return table


def _numbers(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _cells(timing: Percentiles) -> Iterator[str]:
    yield from (f"{value:.2f}" for value in (timing.median, timing.p90, timing.min, timing.max))


def _comparison_table(result: RefitBenchResult) -> Table:
    columns = _numbers("ms", "against fp8refit", "extra MiB")
    table = Table("", *columns, "bytes", title="from BF16 weights to an engine that serves them")
    ours_ms = result.wall_ms.median
    same = "the same every time" if result.is_repeatable else "NOT the same every time"
    table.add_row(OURS, f"{ours_ms:.1f}", "", f"{result.peak_extra_bytes / 2**20:.0f}", same)
    for other in result.others:
        ratio = f"{other.wall_ms.median / ours_ms:.1f} x"
        extra = f"{other.peak_extra_bytes / 2**20:.0f}"
        table.add_row(other.name, f"{other.wall_ms.median:.1f}", ratio, extra, other.whose_bytes)
    return table


def kernel_table(result: KernelBenchResult) -> Table:
    """Show GB/s and the share of the copy rate, case by case."""
    title = f"quantizer on {result.gpu}, copy {result.copy_gb_per_s:.0f} GB/s"
    table = Table("matrix", "dtype", "scales", *_numbers("us", "GB/s", "of copy"), title=title)
    for timing in result.timings:
        matrix = f"{timing.num_matrices} of {timing.shape[0]} x {timing.shape[1]}"
        measured = (f"{timing.device_us.median:.1f}", f"{timing.gb_per_s:.0f}", f"{timing.fraction_of_copy:.1%}")
        table.add_row(matrix, timing.dtype, timing.scale_format, *measured)
    return table


def rollout_table(result: RolloutBenchResult) -> Group:
    """Show tokens per second, case by case."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    title = f"{result.config.model}, {result.config.tp} rank(s) on {result.gpu} ({versions})"
    columns = ("KV cache tokens", "sequences", "context", "new", "prefill s", "tokens/s", "against BF16")
    table = Table("precision", *_numbers(*columns), title=title)
    for timing in result.timings:
        ratio = "" if timing.against_bf16 is None else f"{timing.against_bf16:.2f} x"
        prefill = "" if timing.prefill_s is None else f"{timing.prefill_s.median:.2f}"
        room = str(result.kv_tokens.get(timing.precision, ""))
        table.add_row(
            timing.precision, room, *map(str, timing.case), prefill, f"{timing.tokens_per_s.median:.0f}", ratio
        )
    return Group(table, Text(f"again: {result.command}"))
