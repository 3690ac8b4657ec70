"""Benchmark results as pictures."""

from collections.abc import Sequence
from pathlib import Path

from fp8refit.bench.refit import OURS, RefitBenchResult
from fp8refit.errors import UnsupportedEngineError

_DPI = 160


def plot_refits(results: Sequence[RefitBenchResult], folder: Path) -> list[Path]:
    """Draw phases, comparison, and time against bytes with the copy roofline, one picture each.

    Args:
        results: Of one GPU.
        folder: Where the PNG files are written.

    Raises:
        UnsupportedEngineError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedEngineError("plots need matplotlib: pip install 'fp8refit[bench]'") from error
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    return [_plot_phases(results, folder), _plot_comparison(results, folder), _plot_roofline(results, folder)]


def _label(result: RefitBenchResult) -> str:
    ranks = f", {result.config.tp} ranks" if result.config.tp > 1 else ""
    return f"{result.config.model}\n{result.config.engine}{ranks}"


def _plot_phases(results: Sequence[RefitBenchResult], folder: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.6 * len(results)), layout="constrained")
    left = [0.0] * len(results)
    names = dict.fromkeys(name for result in results for name in result.phases_ms)
    for name in names:
        widths = [result.phases_ms[name].median if name in result.phases_ms else 0.0 for result in results]
        if max(widths) < 0.01:
            continue
        axes.barh(range(len(results)), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(results)), [_label(result) for result in results])
    axes.invert_yaxis()
    axes.set_xlabel("ms, medians")
    axes.set_title("Where the time of a refit goes")
    axes.legend(ncols=4, fontsize="small")
    return _save(figure, folder / "phases.png")


def _plot_comparison(results: Sequence[RefitBenchResult], folder: Path) -> Path:
    from matplotlib import pyplot as plt

    rows = [
        (f"{_label(result)}\n{name}", ms, name == OURS)
        for result in results
        for name, ms in ((OURS, result.wall_ms.median), *((o.name, o.wall_ms.median) for o in result.others))
    ]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.55 * len(rows)), layout="constrained")
    bars = axes.barh(range(len(rows)), [ms for _, ms, _ in rows], color=["C0" if own else "C7" for *_, own in rows])
    axes.bar_label(bars, labels=[f" {ms:.1f} ms" for _, ms, _ in rows], fontsize="small")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms from BF16 weights to an engine that serves them, medians")
    axes.set_title("The same weights by other ways")
    axes.margins(x=0.25)
    return _save(figure, folder / "comparison.png")


def _plot_roofline(results: Sequence[RefitBenchResult], folder: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    gigabytes = [(result.bytes_read + result.bytes_written) / 1e9 for result in results]
    for engine in dict.fromkeys(result.config.engine for result in results):
        chosen = [index for index, result in enumerate(results) if result.config.engine == engine]
        fills = [(results[i].fill_device_ms or results[i].phases_ms["fill"]).median for i in chosen]
        axes.plot([gigabytes[i] for i in chosen], fills, "o", label=f"fill, {engine}")
        axes.plot(
            [gigabytes[i] for i in chosen], [results[i].wall_ms.median for i in chosen], "x", label=f"refit, {engine}"
        )
    ends = [min(gigabytes) / 1.5, max(gigabytes) * 1.5]
    rate = results[0].copy_gb_per_s
    axes.plot(ends, [1e3 * end / rate for end in ends], "k--", label=f"copy, {rate:.0f} GB/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("GB read and written")
    axes.set_ylabel("ms, medians")
    axes.set_title("Time against bytes")
    axes.legend(fontsize="small")
    return _save(figure, folder / "roofline.png")


def _save(figure: object, file: Path) -> Path:
    from matplotlib import pyplot as plt

    figure.savefig(file, dpi=_DPI)  # type: ignore[attr-defined]
    plt.close(figure)
    return file
