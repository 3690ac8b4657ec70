"""Results of `grpo.py`: one JSON file of all runs, a summary of them, and pictures."""

import json
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = "grpo.json"
CHANGED = ("changed_bf16", "changed_codes_fp32", "changed_scales_fp32", "changed_codes_ue8m0", "changed_scales_ue8m0")
PANELS = {
    "reward.png": {"reward": "reward of rollouts", "expected_reward": "expected reward of the trainer's policy"},
    "mismatch.png": {"k3": "k3, nats a token", "token_mult_prob_error": "token mult. prob. error", "ess": "ESS"},
    "density.png": dict(
        zip(CHANGED, ("BF16 values changed", "FP8 codes changed", "fp32 scales changed"), strict=False)
    ),
}
PARTS = ("rollout_s", "train_s", "refit_s")
"""Parts of a step. Summaries leave out the times of parallel runs."""
LOGARITHMIC = ("k3", "token_mult_prob_error", *CHANGED)


def read_results(out: Path) -> dict[str, Any]:
    """The results so far in the folder `out`."""
    file = out / FILE
    return json.loads(file.read_text()) if file.exists() else {"runs": []}


def add_run(out: Path, run: dict[str, Any], records: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Add a finished run: one list per column of its `records`, and the facts in `about`, common to all runs."""
    results = read_results(out)
    steps = {name: [float(f"{record[name]:.6g}") for record in records] for name in records[0]}
    results["runs"].append(run | {"steps": steps})
    results |= about | {"summary": summarize(results["runs"])}
    part = out / f"{FILE}.part"
    part.write_text(json.dumps(results))
    part.replace(out / FILE)


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize each variant as `[min, mean, max]` over its seeds. Rewards are those of the last fifth of the steps."""
    rows = []
    for (variant, lr), those in by_variant(runs).items():
        columns = [run["steps"] for run in those]
        tail = max(1, len(columns[0]["step"]) // 5)
        row = {"variant": variant, "lr": lr, "seeds": len(columns)}
        row["warm_up_reward"] = spread([run["warm_up_reward"] for run in those])
        for name in ("reward", "expected_reward"):
            row[name] = spread([statistics.mean(c[name][-tail:]) for c in columns])
        for name in ("k3", "token_mult_prob_error", "ess", "masked_fraction", *CHANGED):
            row[name] = spread([statistics.median(c[name]) for c in columns])
        alone = [run["steps"] for run in those if run["is_alone"]]
        for name in PARTS if alone else ():
            row[name.replace("_s", "_ms")] = spread([statistics.median(c[name]) * 1e3 for c in alone])
        if alone:
            row["refit_share"] = spread([sum(c["refit_s"]) / sum_of(c, *PARTS) for c in alone])
        rows.append(row)
    return rows


def by_variant(runs: list[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Runs by variant and learning rate."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["variant"], run["lr"]), []).append(run)
    return found


def sum_of(columns: dict[str, list[float]], *names: str) -> float:
    return sum(map(sum, (columns[name] for name in names)))


def spread(values: list[float]) -> list[float]:
    return [min(values), statistics.mean(values), max(values)]


def describe(summary: list[dict[str, Any]]) -> str:
    """One line per variant."""
    lines = []
    for row in summary:
        low, mean, high = row["reward"]
        lines.append(
            f"{row['variant']:>14}, lr {row['lr']:g}, {row['seeds']} seed(s): reward {row['warm_up_reward'][1]:.3f} -> "
            f"{mean:.3f} ({low:.3f} to {high:.3f}), k3 {row['k3'][1]:.1e}, ESS {row['ess'][1]:.3f}"
        )
        if "refit_share" in row:
            lines[-1] += f", refit {row['refit_ms'][1]:.1f} ms = {row['refit_share'][1]:.1%} of a step"
    return "\n".join(lines)


def draw(results: dict[str, Any], out: Path) -> None:
    """Plot the steps, if matplotlib is installed: means over seeds, with their range."""
    if find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    for file, titles in PANELS.items():
        figure = Figure(figsize=(5.5 * len(titles), 4), layout="constrained")
        for axes, (column, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
            for (variant, lr), runs in by_variant(results["runs"]).items():
                rows = list(zip(*(smooth(run["steps"][column]) for run in runs), strict=False))
                steps = range(1, len(rows) + 1)
                (line,) = axes.plot(steps, [statistics.mean(row) for row in rows], label=f"{variant}, lr {lr:g}")
                axes.fill_between(steps, list(map(min, rows)), list(map(max, rows)), color=line.get_color(), alpha=0.15)
            axes.set(xlabel="step", title=title, yscale="log" if column in LOGARITHMIC else "linear")
            axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(out / file, dpi=130)


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Moving average of each value and those before it."""
    return [statistics.mean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
