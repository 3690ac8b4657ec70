"""Benchmark results as pictures. Drawing raises UnsupportedEngineError if matplotlib is not installed."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fp8refit.bench.refit import OURS, RefitBenchResult
from fp8refit.bench.result import BenchResult
from fp8refit.errors import UnsupportedEngineError, install

_DPI = 160
_INVISIBLE_MS = 0.01


def plot_refits(results: Sequence[RefitBenchResult], folder: Path) -> list[Path]:
    """Draw phases, comparison, and time against bytes with the copy roofline, one picture each.

    Args:
        results: Results from one GPU.
        folder: Where the PNG files are written.
    """
    return [
        plot_phases(results, folder / "phases.png"),
        plot_comparison(results, folder / "comparison.png"),
        plot_roofline(results, folder / "roofline.png"),
    ]


def plot_phases(results: Sequence[RefitBenchResult], file: Path) -> Path:
    """Draw where the time of each refit goes."""
    axes = _axes(8, 1.6 + 0.5 * len(results))
    left = [0.0] * len(results)
    for name in dict.fromkeys(name for result in results for name in result.phases_ms):
        widths = [result.phases_ms[name].median if name in result.phases_ms else 0.0 for result in results]
        if max(widths) < _INVISIBLE_MS:
            continue
        axes.barh(range(len(results)), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(results)), _labels(results), fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("ms, medians")
    axes.set_title(f"Where the time of a refit goes{_of_one_boot(results)}")
    axes.figure.legend(loc="outside lower center", ncols=8, fontsize="small", frameon=False)
    return _save(axes, file, results)


def plot_comparison(results: Sequence[RefitBenchResult], file: Path) -> Path:
    """Draw how long each method takes to give the engine the same weights."""
    axes = _axes(8, 1.2 + 0.32 * sum(1.6 + len(result.others) for result in results))
    place, ticks = 0.0, []
    for label, result in zip(_labels(results), results, strict=True):
        ways = [(OURS, result.wall_ms.median), *((other.name, other.wall_ms.median) for other in result.others)]
        for name, ms in ways:
            bar = axes.barh(place, ms, color="C0" if name == OURS else "C7", height=0.8)
            axes.bar_label(bar, labels=[f" {ms:.1f} ms"], fontsize="small")
            ticks.append((place, f"{label}: {name}" if name == OURS else name))
            place += 1
        place += 0.6
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize="small")
    axes.invert_yaxis()
    _make_logarithmic(axes.xaxis)
    times_ms = [timing.median for result in results for timing in (result.wall_ms, *(o.wall_ms for o in result.others))]
    least_ms = 10 ** math.floor(math.log10(min(times_ms)))
    axes.set_xlim(least_ms, least_ms * (max(times_ms) / least_ms) ** 1.25)  # room for labels behind the bars
    axes.set_xlabel("ms from BF16 weights to an engine that serves them, medians")
    axes.set_title(f"The same weights by other methods{_of_one_boot(results)}")
    return _save(axes, file, results)


def plot_roofline(results: Sequence[RefitBenchResult], file: Path) -> Path:
    """Draw time against bytes, with the copy roofline."""
    axes = _axes(7, 4.5)
    for index, boot in enumerate(dict.fromkeys(result.config.boot for result in results)):
        chosen = sorted((result for result in results if result.config.boot == boot), key=lambda found: found.num_bytes)
        gigabytes = [result.num_bytes / 1e9 for result in chosen]
        fills_ms = [result.fill_ms.median for result in chosen]
        walls_ms = [result.wall_ms.median for result in chosen]
        axes.plot(gigabytes, fills_ms, "o", color=f"C{index}", label=f"{boot}: fill")
        axes.plot(gigabytes, walls_ms, "x--", color=f"C{index}", linewidth=0.8, label=f"{boot}: call to return")
    ends = [factor * end(result.num_bytes / 1e9 for result in results) for factor, end in ((1 / 1.5, min), (1.5, max))]
    rate = mean(result.copy_gb_per_s for result in results)
    axes.plot(ends, [1e3 * gigabytes / rate for gigabytes in ends], "k-", linewidth=1, label=f"copy, {rate:.0f} GB/s")
    _make_logarithmic(axes.xaxis)
    _make_logarithmic(axes.yaxis)
    axes.set_xlabel("GB read and written")
    axes.set_ylabel("ms, medians")
    axes.set_title("Time against bytes")
    axes.legend(fontsize="small")
    return _save(axes, file, results)


def digest_of(results: Sequence[RefitBenchResult]) -> str:
    """A digest of the results, kept in the picture's metadata."""
    figures = (result.model_dump_json(exclude=set(BenchResult.model_fields)) for result in results)
    return hashlib.sha256("\n".join(figures).encode()).hexdigest()


def _labels(results: Sequence[RefitBenchResult]) -> list[str]:
    """The models, with their differences in other settings."""
    engines = ("" if _of_one_boot(results) else f", {result.config.boot}" for result in results)
    ranks = (f", {result.config.tp} ranks" if result.config.tp > 1 else "" for result in results)
    return [f"{result.config.model}{parts}{of}" for result, parts, of in zip(results, engines, ranks, strict=True)]


def _of_one_boot(results: Sequence[RefitBenchResult]) -> str:
    """For a title: what all of them have in common."""
    boots = {result.config.boot for result in results}
    return f": {boots.pop()}" if len(boots) == 1 else ""


def _make_logarithmic(axis: Any) -> None:
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _axes(width: float, height: float) -> Any:
    """Create a picture of this size, in inches.

    Raises:
        UnsupportedEngineError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedEngineError(f"plots need matplotlib: {install('bench')}") from error
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def _save(axes: Any, file: Path, results: Sequence[RefitBenchResult]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(file, dpi=_DPI, metadata={"Source": digest_of(results)})
    return file
