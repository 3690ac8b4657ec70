"""The demo's picture: three held-out losses by optimizer step."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fp8refit.cli.demo.rounds import Round


def draw_chart(rounds: Sequence[Round], path: Path) -> Path:
    """Draw the losses of `rounds` and save them as PNG at `path`."""
    with matplotlib.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(
            xlabel="optimizer step",
            ylabel="held-out loss (nats per byte)",
            title="An FP8 engine follows its trainer only if it is refitted",
        )
    steps = [row.step for row in rounds]
    axes.plot(steps, [row.stale_loss for row in rounds], color="#b0413e", label="FP8 engine, never refitted")
    axes.plot(steps, [row.trainer_loss for row in rounds], color="#999999", linewidth=5, label="trainer (fp32)")
    axes.plot(
        steps, [row.refitted_loss for row in rounds], color="#1b4f72", marker="o", label="FP8 engine, refitted in place"
    )
    axes.grid(alpha=0.25)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)
    return path
