"""Writes docs/learning.md and its pictures from what `examples/grpo.py` found, so that neither drifts.

python benchmarks/render_learning.py

Reads every `grpo_*.json` in benchmarks/results. Without one there is no page.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"

HEAD = """# Learning with FP8 rollouts

GRPO on sorting numbers, from a policy that was shown answers until it got some right; `examples/grpo.py` is the whole loop, and
its help says what variants are. Figures are means of all seeds, with the least and the greatest of them in brackets. Rewards
are those of the last fifth of the steps, the others medians over the steps. This page is written by
`python benchmarks/render_learning.py`.
"""


def load_example() -> ModuleType:
    """`grpo_results.py`, which knows what its files hold."""
    spec = importlib.util.spec_from_file_location("grpo_results", ROOT / "examples" / "grpo_results.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: Path) -> dict[str, dict]:
    """Results by the names of their files."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("grpo_*.json"))}


def render(results: dict[str, dict]) -> str:
    """The page, as Markdown."""
    return "\n".join([HEAD, *(render_file(name, found) for name, found in results.items())])


def render_file(name: str, found: dict) -> str:
    """What one command found: rewards and mismatch, then how much of the policy changed in a step."""
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    kernels = ", ".join(dict.fromkeys(kernel for run in found["runs"] for kernel in run["kernels"]))
    columns = [
        "variant",
        "lr",
        "seeds",
        "warm-up",
        "reward",
        "trainer's",
        "k3",
        "token error",
        "ESS",
        "refit",
        "of a step",
    ]
    learned = table(columns, [learning_cells(row) for row in found["summary"]])
    columns = ["variant", "lr", "BF16 values", "FP8 codes", "scales", "FP8 codes, UE8M0", "scales, UE8M0"]
    changed = table(columns, [density_cells(row) for row in found["summary"]])
    pictures = "\n\n".join(f"![{kind}]({picture(name, kind)})" for kind in ("reward", "mismatch", "density"))
    return (
        f"## {found['gpu']}, {versions}\n\n```bash\n{found['command']}\n```\n\nKernels and formats: {kernels}.\n\n{learned}\n"
        f"Changed in a step:\n\n{changed}\n{pictures}\n"
    )


def picture(name: str, kind: str) -> str:
    """Name of a picture of a file."""
    return f"{name}_{kind}.png"


def learning_cells(row: dict) -> list[str]:
    """Of one variant: rewards, mismatch, and what refits cost."""
    rewards = (spread(row[column], "{:.3f}") for column in ("warm_up_reward", "reward", "expected_reward"))
    mismatch = (f"{row['k3'][1]:.1e}", f"{row['token_mult_prob_error'][1]:.4f}", f"{row['ess'][1]:.4f}")
    refit = (f"{row['refit_ms'][1]:.1f} ms", f"{row['refit_share'][1]:.1%}")
    return [row["variant"], f"{row['lr']:g}", str(row["seeds"]), *rewards, *mismatch, *refit]


def density_cells(row: dict) -> list[str]:
    """Of one variant: which shares change in a step."""
    shares = ("bf16", "codes_fp32", "scales_fp32", "codes_ue8m0", "scales_ue8m0")
    return [row["variant"], f"{row['lr']:g}", *(f"{row[f'changed_{share}'][1]:.3%}" for share in shares)]


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and between which values it lies."""
    least, mean, greatest = map(form.format, values)
    return mean if least == greatest else f"{mean} ({least} to {greatest})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first hold numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(results: dict[str, dict], docs: Path) -> None:
    """The page and its pictures."""
    example = load_example()
    for name, found in results.items():
        example.draw(found, docs)
        for kind in ("reward", "mismatch", "density"):
            (docs / f"{kind}.png").replace(docs / picture(name, kind))
    (docs / "learning.md").write_text(render(results))


if __name__ == "__main__":
    if found := read(RESULTS):
        write(found, DOCS)
