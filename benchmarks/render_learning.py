"""Writes docs/learning.md and its pictures from what `examples/grpo.py` found, so that neither drifts.

`python -m benchmarks.render` runs it.

Reads every `grpo_*.json` in benchmarks/results. Without one there is no page.
"""

import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"

TITLE = "# Learning with FP8 rollouts\n"

LEAD = "grpo_vllm_h200", "reward"
"""The picture that the page begins with."""

SUMMARY = """
With vLLM on an H200, FP8 rollouts learn as BF16 rollouts do: the share of right answers rises from {bf16.warm_up_reward:.2f} to
{bf16.reward:.2f} in BF16 and to {fp8.reward:.2f} in FP8. An engine that is never refitted (`fp8-stale`) stays at
{fp8-stale.reward:.2f}, and the policy that learns from it falls back to {fp8-stale.expected_reward:.2f}. Importance weights
(`fp8+token`) and an FP8 KV cache (`fp8kv`) make no difference that can be seen, and the higher curve of `unified` started from
other warm-ups, so it shows no better learning.
"""

TASK = """## The task

The task is sorting numbers, learned with GRPO. [`examples/grpo.py`](../examples/grpo.py) is the whole loop, and its `--help`
explains the variants. A warm-up trains the policy on example answers until it gets some right. Three in five of them are in
falling order, so that rewards have something to choose between.

Figures are means over all seeds, with the minimum and maximum in brackets. Rewards are from the last fifth of the steps; all
other figures are medians over the steps. This page is written by `python -m benchmarks.render`.
"""

PICTURES = ("reward", "mismatch", "density")


@dataclass(frozen=True, kw_only=True)
class Section:
    """What is said of one file."""

    title: str = ""
    says: str = ""
    """Figures of variants are filled in, see `Figures`: `{fp8.k3:.1e}`."""
    has_rewards: bool = True
    has_density: bool = False
    pictures: tuple[str, ...] = PICTURES


LEARNING = """
**FP8 rollouts learn as well as BF16 rollouts.** In 40 steps BF16 rises from {bf16.warm_up_reward:.2f} to {bf16.reward:.2f}, FP8
to {fp8.reward:.2f}, and FP8 over an FP8 KV cache that is calibrated at every step to {fp8kv.reward:.2f}. The variants differ by
about as much as the seeds do.

**Without refits, learning does not last.** The rollouts of an engine that is never refitted stay at {fp8-stale.reward:.2f}. The
trainer's own policy first improves: by seed, it peaks at {fp8-stale.peak:.2f} after {fp8-stale.peak_step:.0f} steps. Then it
falls back to {fp8-stale.expected_reward:.2f}: it is pushed towards and away from tokens that it would no longer sample.

**FP8 costs some mismatch.** k3 is {bf16.k3:.1e} nats per token with a BF16 engine, whose kernels are not the trainer's,
{fp8.k3:.1e} in FP8, and {fp8kv.k3:.1e} over an FP8 KV cache. It does not grow over the steps. The token multiplicative
probability error is {fp8.token_mult_prob_error:.3f} and {fp8kv.token_mult_prob_error:.3f}; NeMo RL wants less than 1.03.

**Importance weights change nothing here**: at an ESS of {fp8.ess:.4f} there is hardly anything to correct. Answers here have 17
tokens, and a mismatch adds up over longer ones. These runs do not show what the weights cost in time: each shared the GPU.

**Training in the engine's precision lowers the mismatch about a hundred times.** A trainer that
[computes with the engine's bytes](precision.md) has a k3 of {unified.k3:.1e}, less than a BF16 engine has. What is left comes
from kernels that round differently, not from the weights.

Rollouts of `unified` end at {unified.reward:.2f}, but these runs do not show that it learns better. They started from other
warm-ups than the rest: {unified.warm_up:.3f} by seed, against {fp8.warm_up:.3f}. One run of plain FP8, in the next
section, started from the same warm-up as `unified` with seed 0. After its 12 steps the trainer's policy is at
{grpo_alone_vllm_h200/fp8.after_12:.2f}; with `unified` it is at {unified.after_12@0:.2f} by then.

**Settings are not vLLM's defaults.** FP8 layers ran on the CUTLASS kernel with fp32 scales, without DeepGEMM. All runs were
without torch.compile, and with CUDA graphs for decoding only. The test in the command below sets this, because it starts fast.

**These runs do not show what refits cost**: they shared the GPU. The next section has a small model alone. For Qwen3-8B on an
H200, a refit takes 7.6 ms and a rollout 2.4 s (16 sequences) to 9.3 s (256 sequences, 512 + 512 tokens), so a refit is 0.3 to
0.1 % of it. Calibrating an FP8
KV cache takes 0.21 s more, 9 to 2 % ([benchmarks](benchmarks.md)).
"""

ALONE = """
One seed and 12 steps, in FP8 and with an FP8 KV cache; nothing else ran on the GPU. Kernels and settings are those of the runs
above.
"""

FP32 = """
DeepGEMM, without torch.compile. Over the same 25 steps and three seeds, k3 is {fp8.k3:.1e} with fp32 scales and
{grpo_scales_ue8m0_vllm_h200/fp8.k3:.1e} with UE8M0:

- Medians over the steps, by seed: {fp8.median_k3:.1e}, against {grpo_scales_ue8m0_vllm_h200/fp8.median_k3:.1e}. UE8M0 is higher
  with {grpo_scales_ue8m0_vllm_h200>fp8.median_k3} of 3 seeds.
- Means over the steps, by seed: {fp8.mean_k3:.1e}, against {grpo_scales_ue8m0_vllm_h200/fp8.mean_k3:.1e}. UE8M0 is higher with
  {grpo_scales_ue8m0_vllm_h200>fp8.mean_k3} of 3 seeds.

So UE8M0 seems to cost a little mismatch, but three seeds are few. These runs hardly learn: rollouts rise from
{fp8.warm_up_reward:.3f} to {fp8.reward:.3f} with fp32 scales, and to {grpo_scales_ue8m0_vllm_h200/fp8.reward:.3f} with UE8M0.
Their warm-up was an earlier one, as the note below says, so do not compare them with the runs above. The speed is the same
([benchmarks](benchmarks.md)), so there is little reason to leave vLLM's default, UE8M0.
"""

DENSITY = """
One seed and 30 steps for each learning rate, with the earlier warm-up of the scale formats, and without torch.compile. The
run with 1e-4 unlearns: its policy goes from {fp8 at 1e-04.warm_up_reward:.3f} to {fp8 at 1e-04.last:.3f}, where the one with
3e-5 goes to {fp8 at 3e-05.last:.3f}.

One optimizer step a rollout: AdamW, clipped gradients, fp32 master weights. The share of values that change grows a little
slower than the learning rate. At 1e-6 one BF16 value in 70 changes, and one FP8 code in 800; at 1e-4 it is more than a third
and one in 20. An FP8 code spans 16 BF16 values, so it changes about a tenth as often. fp32 scales change when the greatest
value of their block does. No UE8M0 scale changed in any of these 150 steps. The first step after the warm-up changes two to
three times as many BF16 values as later ones do, and 3 to 3.5 times as many FP8 codes, because Adam starts from nothing.
"""

CPU = """
The same loop with a tiny model and rollouts by transformers, whose FP8 kernels are fp8refit's own for CPUs. It says nothing
about the kernels of an engine on a GPU.

BF16 rises from {bf16.warm_up_reward:.2f} to {bf16.reward:.2f} in 50 steps, FP8 to {fp8.reward:.2f}, FP8 with importance
weights to {fp8+token.reward:.2f}, and FP8 over an FP8 KV cache to {fp8kv.reward:.2f}. Rollouts of the engine that is never
refitted stay at {fp8-stale.reward:.2f}. The trainer's policy peaks at {fp8-stale.peak:.2f} after {fp8-stale.peak_step:.0f}
steps, and falls back to {fp8-stale.expected_reward:.2f}.
"""

SECTIONS = {
    "grpo_vllm_h200": Section(title="vLLM on an H200", says=LEARNING, has_density=True),
    "grpo_alone_vllm_h200": Section(title="A refit's share of a step, alone on an H200", says=ALONE, pictures=()),
    "grpo_transformers_cpu": Section(title="A tiny model on a CPU", says=CPU, pictures=("reward", "mismatch")),
    "grpo_scales_fp32_vllm_h200": Section(title="fp32 scales", says=FP32, pictures=()),
    "grpo_scales_ue8m0_vllm_h200": Section(title="UE8M0 scales", pictures=()),
    "grpo_density_vllm_h200": Section(
        title="How much a step changes", says=DENSITY, has_rewards=False, has_density=True, pictures=("density",)
    ),
}
"""By the name of the file, in the order of the page. Others follow."""


def load_example() -> ModuleType:
    """`grpo_results.py`, which knows what its files hold."""
    spec = importlib.util.spec_from_file_location("grpo_results", ROOT / "examples" / "grpo_results.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Results by the names of their files, in the order of the page."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("grpo_*.json"))}
    return {name: found[name] for name in sorted(found, key=lambda name: [*SECTIONS, name].index(name))}


def render(results: dict[str, dict[str, Any]]) -> str:
    """The page, as Markdown."""
    lead = []
    if LEAD[0] in results:
        lead = [f"![reward over steps]({picture(*LEAD)})", Figures(results, LEAD[0]).fill(SUMMARY)]
    return "\n".join([TITLE, *lead, TASK, *(render_file(name, results) for name in results)])


def section_of(name: str) -> Section:
    """What is said of a file."""
    return SECTIONS.get(name, Section(has_density=True))


def render_file(name: str, results: dict[str, dict[str, Any]]) -> str:
    """What one command found: rewards and mismatch, and how much of the policy changed in a step."""
    section, found = section_of(name), results[name]
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    kernels = ", ".join(dict.fromkeys(kernel for run in found["runs"] for kernel in run["kernels"]))
    about = f"{found['gpu']}, {versions}"
    parts = [f"## {section.title or about}\n"]
    if section.says:
        parts.append(Figures(results, name).fill(section.says.lstrip()))
    environment = "".join(f"{variable}={value} " for variable, value in found["runs"][0].get("environment", {}).items())
    parts.append(f"```bash\n{environment}{found['command']}\n```\n")
    parts.append(f"{about}. Kernels and formats: {kernels}. {found.get('note', '')}".rstrip() + "\n")
    if section.has_rewards:
        parts.append(rewards_table(found["summary"]))
    if section.has_density:
        parts.append("Changed in a step:\n")
        parts.append(density_table(found["summary"]))
    parts += [f"![{kind}]({picture(name, kind)})\n" for kind in section.pictures if (name, kind) != LEAD]
    return "\n".join(parts)


def peak(steps: dict[str, list[float]]) -> int:
    """At which place of the lists the trainer's policy is best."""
    rewards = steps["expected_reward"]
    return rewards.index(max(rewards))


OF_RUNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "warm_up": lambda run: run["warm_up_reward"],
    "peak": lambda run: max(run["steps"]["expected_reward"]),
    "peak_step": lambda run: run["steps"]["step"][peak(run["steps"])],
    "after_12": lambda run: run["steps"]["expected_reward"][11],
    "last": lambda run: run["steps"]["expected_reward"][-1],
    "median_k3": lambda run: statistics.median(run["steps"]["k3"]),
    "mean_k3": lambda run: statistics.mean(run["steps"]["k3"]),
}
"""Figures of a single run. Rewards are those of the trainer's policy."""


class Figures:
    """Figures of runs, for sentences.

    `{VARIANT.COLUMN:FORMAT}` is the mean of a column of the summary, or a column of `OF_RUNS` for each seed. `VARIANT at LR`
    is that of one learning rate, `COLUMN@SEED` that of one seed, and `FILE/VARIANT` that of another file.
    `{FILE>VARIANT.COLUMN}` counts the seeds for which the other file has the higher figure.
    """

    def __init__(self, results: dict[str, dict[str, Any]], name: str) -> None:
        self._results, self._name = results, name

    def fill(self, text: str) -> str:
        """Put figures into words."""
        text = re.sub(r"\{(\w+)>([^}.]+)\.(\w+)\}", self._count, text)
        return re.sub(r"\{(?:(\w+)/)?([^}.]+)\.(\w+)(?:@(\d+))?:([^}]+)\}", self._figure, text)

    def _figure(self, found: re.Match[str]) -> str:
        file, variant, column, seed, form = found.groups()
        if column not in OF_RUNS:
            (row,) = self._chosen("summary", file or self._name, variant)
            return format(row[column][1], form)
        values = self._by_seed(file or self._name, variant, column)
        *others, last = (format(value, form) for key, value in values.items() if seed in (None, str(key)))
        return f"{', '.join(others)} and {last}" if others else last

    def _count(self, found: re.Match[str]) -> str:
        file, variant, column = found.groups()
        ours, theirs = (self._by_seed(name, variant, column) for name in (self._name, file))
        return str(sum(theirs[seed] > value for seed, value in ours.items()))

    def _by_seed(self, file: str, variant: str, column: str) -> dict[int, float]:
        runs = sorted(self._chosen("runs", file, variant), key=lambda run: run["seed"])
        return {run["seed"]: OF_RUNS[column](run) for run in runs}

    def _chosen(self, kind: str, file: str, variant: str) -> list[dict[str, Any]]:
        name, _, lr = variant.partition(" at ")
        rows = self._results[file][kind]
        return [row for row in rows if row["variant"] == name and (not lr or row["lr"] == float(lr))]


def rewards_table(summary: Sequence[dict[str, Any]]) -> str:
    """A row for each variant: rewards, mismatch, and what refits cost in runs that had the GPU alone."""
    has_times = any("refit_share" in row for row in summary)
    columns = ["variant", "lr", "seeds", "warm-up", "reward", "trainer's", "k3", "token error", "ESS"]
    columns += ["refit", "of a step"] if has_times else []
    return table(columns, [learning_cells(row, has_times=has_times) for row in summary])


def density_table(summary: Sequence[dict[str, Any]]) -> str:
    """A row for each variant: which shares change in a step."""
    columns = ["variant", "lr", "BF16 values", "FP8 codes", "scales", "FP8 codes, UE8M0", "scales, UE8M0"]
    return table(columns, [density_cells(row) for row in sorted(summary, key=lambda row: row["lr"])])


def picture(name: str, kind: str) -> str:
    """Name of a picture of a file."""
    return f"{name}_{kind}.png"


def learning_cells(row: dict[str, Any], *, has_times: bool) -> list[str]:
    """Of one variant."""
    rewards = (spread(row[column], "{:.3f}") for column in ("warm_up_reward", "reward", "expected_reward"))
    error = row["token_mult_prob_error"][1]
    mismatch = (f"{row['k3'][1]:.1e}", f"{error:.4f}" if error < 10 else f"{error:.0f}", f"{row['ess'][1]:.4f}")
    times = [f"{row['refit_ms'][1]:.1f} ms", f"{row['refit_share'][1]:.1%}"] if "refit_share" in row else ["", ""]
    return [row["variant"], f"{row['lr']:g}", str(row["seeds"]), *rewards, *mismatch, *(times if has_times else [])]


def density_cells(row: dict[str, Any]) -> list[str]:
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


def write(results: dict[str, dict[str, Any]], docs: Path) -> None:
    """The page and its pictures."""
    example = load_example()
    for name, found in results.items():
        example.draw(found, docs)
        for kind in PICTURES:
            if kind in section_of(name).pictures:
                (docs / f"{kind}.png").replace(docs / picture(name, kind))
            else:
                (docs / f"{kind}.png").unlink()
    (docs / "learning.md").write_text(render(results))


def main() -> None:
    """Write the page and its pictures, if anything was measured."""
    if found := read(RESULTS):
        write(found, DOCS)
