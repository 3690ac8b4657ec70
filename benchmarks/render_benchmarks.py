"""Writes docs/benchmarks.md and docs/figures from what `fp8refit bench` measured, so that neither drifts.

`python -m benchmarks.render` runs it.

Reads `bench_refit_*.json`, `bench_kernel_*.json`, `bench_rollout_*.json` and `linear_*.json` in benchmarks/results, each
written by the command that it names, with `--json` or `--out`. What is not there is left out.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from fp8refit.bench import KernelBenchResult, Precision, RefitBenchResult, RolloutBenchResult, RolloutTiming
from fp8refit.bench.plots import plot_comparison, plot_phases, plot_roofline
from fp8refit.bench.refit import OURS
from fp8refit.bench.result import BenchResult

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
PLACES = {"inside": "in this process", "outside": "in another process", "server": "behind its HTTP server"}
PRECISIONS = {
    Precision.BF16: "BF16",
    Precision.FP8: "FP8 weights",
    Precision.FP8_KV: "FP8 weights and KV cache",
    Precision.PER_CHANNEL: "FP8 weights per row",
    Precision.PER_TENSOR: "FP8 weights per weight",
    Precision.MXFP8: "MXFP8 weights",
}

MUCH = 1.05
"""Runs of one case that differ by more are shown by their slowest and fastest."""

Plot = Callable[[Sequence[RefitBenchResult], Path], Path]
Result = TypeVar("Result", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All results of a folder."""

    refits: dict[str, list[RefitBenchResult]]
    """By engine and how it was booted, smallest model first."""
    kernels: list[KernelBenchResult]
    rollouts: dict[str, list[RolloutBenchResult]]
    """By engine, smallest model first."""
    layers: list[dict[str, Any]]
    """Of vLLM's linear layers, see `tests/gpu/run_linear.py`."""

    @property
    def all_refits(self) -> list[RefitBenchResult]:
        """Of every engine."""
        return [result for results in self.refits.values() for result in results]


def read(folder: Path) -> Measured:
    """The results in `folder`."""
    refits = sorted(_read(folder, "bench_refit_*.json", RefitBenchResult), key=lambda result: result.num_bytes)
    sizes = {result.config.model: result.num_bytes for result in refits}
    rollouts = sorted(
        _read(folder, "bench_rollout_*.json", RolloutBenchResult), key=lambda found: sizes.get(found.config.model, 0)
    )
    boots = sorted({result.config.boot for result in refits}, key=_in_order)
    engines = sorted({result.config.engine for result in rollouts}, key=_in_order)
    return Measured(
        refits={boot: [result for result in refits if result.config.boot == boot] for boot in boots},
        kernels=_read(folder, "bench_kernel_*.json", KernelBenchResult),
        rollouts={name: [result for result in rollouts if result.config.engine == name] for name in engines},
        layers=[json.loads(file.read_bytes()) for file in sorted(folder.glob("linear_*.json"))],
    )


def _read(folder: Path, pattern: str, kind: type[Result]) -> list[Result]:
    return [kind.model_validate_json(file.read_bytes()) for file in sorted(folder.glob(pattern))]


def _in_order(boot: str) -> tuple[int, str]:
    engine = boot.split()[0]
    return (list(NAMES).index(engine) if engine in NAMES else len(NAMES)), boot


def render(measured: Measured) -> str:
    """The page, as Markdown."""
    parts = [HEAD]
    if measured.refits:
        parts.append("## A refit of a live engine\n")
        parts.append(LEGEND)
        parts.append("![Time against bytes](figures/roofline.png)\n")
        for boot, results in measured.refits.items():
            parts += [f"### {_title(boot)}\n", *render_refits(boot, results)]
    if measured.kernels:
        parts += ["## The quantizer alone\n", *map(render_kernel, measured.kernels)]
    if measured.rollouts:
        parts.append("## What FP8 buys: rollouts\n")
        parts += [render_rollouts(engine, results) for engine, results in measured.rollouts.items()]
    if measured.layers:
        parts += ["### Why, and what to set", ADVICE, *map(render_layers, measured.layers)]
    return "\n".join(parts)


HEAD = """# Benchmarks

Models are built from their published configs and filled with random weights that have outlier channels; nothing is downloaded.
Each table is preceded by the commands that measure its rows again. `python -m benchmarks.render` writes this page
from the JSON files in `benchmarks/results`.
"""

LEGEND = """The BF16 weights are on the engine's GPU, as a trainer leaves them. Each round changes them, then times one refit
and one run of each other way, interleaved. After each run the live weights are compared by fingerprint. Times
are medians in ms.

- *first*: the first refit, after the engine's loader was traced. *call to return*: all that a training loop waits for, until
  the engine can serve again. *flush*: the engine drops its prefix cache.
- *fill*: the kernel that reads BF16 and writes codes and scales, on the device's own clock. *of copy*: the fill divided by the
  time to copy as many bytes, measured in the same process. *ns/MB*: in brackets, how much more than the best row.
- *host*: call to return, minus the fill.
- *extra*: peak GPU memory beyond what is held between refits. For the engine's own ways this counts what torch allocates in the
  trainer's process: all of it for vLLM, which runs there, but not what SGLang's scheduler allocates.
"""


COLUMNS = ["model", "tensors", "GB", "first", "call to return", "p90", "plan + fill + verify", "flush"]
COLUMNS += ["fill", "of copy", "GB/s", "ns/MB", "host", "extra"]


def render_refits(boot: str, results: Sequence[RefitBenchResult]) -> Iterator[str]:
    """One way to boot an engine: where time goes, and what else there is."""
    ranks = sorted({result.config.tp for result in results})
    kernels = ", ".join(dict.fromkeys(kind for result in results for kind in result.kernels))
    yield f"{_versions(results)}; {' or '.join(map(str, ranks))} rank. Kernels and formats: {kernels}.\n"
    yield _again(results)
    yield _table(
        COLUMNS,
        (_refit_cells(result, results) for result in results),
        num_names=1,
    )
    yield f"![Phases](figures/{_slug(boot)}_phases.png)\n"
    yield "Other ways to bring the same weights, in the same runs:\n"
    yield _table(
        ["model", "way", "ms", "p90", "times refit", "extra", "bytes"],
        (row for result in results for row in _ways(result)),
        num_names=2,
    )
    yield from _ages(results)
    summaries = {other.name: other.summary for result in results for other in result.others}
    yield "".join(f"- `{name}`: {summary}.\n" for name, summary in summaries.items())
    yield f"![Comparison](figures/{_slug(boot)}_comparison.png)\n"


def _refit_cells(result: RefitBenchResult, beside: Sequence[RefitBenchResult]) -> list[str]:
    least = min(1e6 / other.gb_per_s for other in beside)
    ns_per_mb = 1e6 / result.gb_per_s
    return [
        result.config.model,
        str(result.num_tensors),
        f"{result.num_bytes / 1e9:.2f}",
        f"{result.first_ms:.0f}",
        f"**{result.wall_ms.median:.2f}**",
        f"{result.wall_ms.p90:.2f}",
        f"{result.plan_fill_verify_ms.median:.2f}",
        f"{result.phases_ms['flush'].median:.2f}",
        f"{result.fill_ms.median:.2f}",
        f"{result.fill_over_copy:.2f} x",
        f"{result.gb_per_s:.0f}",
        f"{ns_per_mb:.0f} (+{ns_per_mb / least - 1:.0%})",
        f"{result.host_ms.median:.2f}",
        _mebibytes(result.peak_extra_bytes),
    ]


def _ways(result: RefitBenchResult) -> Iterator[list[str]]:
    model, ours = result.config.model, result.wall_ms
    same = "the same every time" if result.is_repeatable else "NOT the same every time"
    extra = _mebibytes(result.peak_extra_bytes)
    yield [model, f"**{OURS}**", f"**{ours.median:.1f}**", f"{ours.p90:.1f}", "", extra, same]
    for other in result.others:
        times = f"{other.wall_ms.median / ours.median:.1f} x"
        milliseconds = (f"{other.wall_ms.median:.1f}", f"{other.wall_ms.p90:.1f}")
        yield ["", other.name, *milliseconds, times, _mebibytes(other.peak_extra_bytes), other.whose_bytes]


def render_kernel(result: KernelBenchResult) -> str:
    """One launch over many matrices of one shape, blocks of 128 x 128."""
    rows = (
        [
            f"{timing.shape[0]} x {timing.shape[1]}",
            timing.dtype,
            str(timing.scale_format),
            str(timing.num_matrices),
            f"{timing.device_us.median:.1f}",
            f"{timing.gb_per_s:.0f}",
            f"{timing.fraction_of_copy:.1%}",
        ]
        for timing in result.timings
    )
    columns = ["matrix", "from", "scales", "in one launch", "us", "GB/s", "of the copy rate"]
    copy = f"Copy: {result.copy_gb_per_s:.0f} GB/s."
    ages = "".join(f"\n{age}" for age in _ages([result]))
    return f"{_versions([result])}. {copy}\n\n{_again([result])}\n{_table(columns, rows, num_names=3)}{ages}"


def render_rollouts(engine: str, results: Sequence[RolloutBenchResult]) -> str:
    """Tokens a second of one engine."""
    tables = "\n".join(map(_render_rollout, results))
    return (
        f"### {_title(engine)}\n\n{_versions(results)}. New tokens per second over all sequences, prefill included; in "
        "brackets the ratio to BF16; in square ones the slowest and the fastest run, where they differ by more than 5 %. Every "
        "engine gets the same share of the GPU for weights and KV cache.\n\n"
        f"{tables}"
    )


def _render_rollout(result: RolloutBenchResult) -> str:
    precisions = [name for name in PRECISIONS if name in result.config.precisions]
    columns = ["model", "sequences", "prompt", "new", *(PRECISIONS[name] for name in precisions)]
    kernels = ", ".join(sorted({kernel for found in result.kernels.values() for kernel in found}))
    said = f"FP8 by {kernels}. " if kernels else ""
    return (
        f"```bash\n{result.command}\n```\n\n{result.gpu}. {said}{_runs(result)}\n\n"
        f"{_table(columns, _rollout_rows(result, precisions), num_names=1)}"
    )


def _runs(result: RolloutBenchResult) -> str:
    """How often cases were timed."""
    counts = sorted({timing.tokens_per_s.count for timing in result.timings})
    if counts == [1]:
        return "One timed run per case."
    return f"Medians of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} runs."


ADVICE = """
- **Leave DeepGEMM on**, as vLLM does by itself (`VLLM_USE_DEEP_GEMM`). Without it vLLM takes CUTLASS. For 8 to 128 tokens
  CUTLASS takes about as long as BF16 does, although it reads half the bytes (the last table), so the time to quantize the
  activations is lost. That is why Qwen3-8B is slower in FP8 at 16 sequences in the table with `VLLM_USE_DEEP_GEMM=0`. It loses
  more than these two kernels account for. The rest was not traced; those engines run without torch.compile.
- **Leave torch.compile and CUDA graphs on.** They are off, or cut short, in the table that sets `compilation_config`.
- **Let DeepGEMM compile before it serves.** With `VLLM_DEEP_GEMM_WARMUP=skip`, kernels are compiled during the first rollouts.
- **Set `kv_cache_dtype=fp8`, and refit with `calibration=`**, for many sequences and long answers. FP8 weights gain least where
  a step reads more KV cache than weights, and the FP8 cache holds twice as many tokens.
- **UE8M0 or fp32 scales is not a question of speed** on Hopper: the kernel is the same, and quantizing activations takes 3 to
  15 % longer with UE8M0. What it does to the mismatch is in [learning](learning.md). `VLLM_USE_DEEP_GEMM_E8M0=0` asks
  for fp32.

For comparison: FP8-RL ([arXiv 2601.18150](https://arxiv.org/abs/2601.18150)) reports 10 to 20 % for FP8 weights of a dense
8B model, 30 to 50 % for Qwen3-30B-A3B, and up to 44 % with an FP8 KV cache. NeMo RL reports 15 to 25 % for an 8B model, and
48 % with FP8 KV cache and attention. Here, Qwen3-8B gains 14 to 28 % from FP8 weights on an H200, and 24 to 28 % with the FP8
cache. On an H100, whose memory is slower, it gains 16 to 42 % and 35 to 52 %; the FP8 cache gains most with answers of 16 384
tokens. Qwen3-30B-A3B on an H200 gains 32 to 52 % at 16 to 256 sequences, and 35 and 44 % with answers of 16 384 tokens. At 16 x
512 + 512 the slowest FP8 run was 13 % faster than the fastest BF16 run. With prompts of 16 384 tokens it gains 9 and 12 %:
reading them takes 6.1 s in every precision. Attention, which stays in BF16 there, is more than half of that work (1.7 of 3.1 x
10^15 operations). Why the rest of the reading is no faster was not traced. By default, vLLM runs block-FP8 experts by Triton on
Hopper, unless experts are parallel.

Weights and prompts are random. Engines of Qwen3-30B-A3B hold the same policy in every precision, because routers decide how
many experts a step reads. Their BF16 rows were measured after the FP8 rows, on another H200. The BF16 engines of Qwen3-8B held
vLLM's dummy weights; how long a dense model takes does not depend on them. FlashInfer was not installed; where it is, vLLM
multiplies few tokens with a kernel of its own. Not measured: 64 or 256 prompts of 16 384 tokens, and 64 or 256 answers of more
than 512 tokens by Qwen3-30B-A3B. In 64 x 512 + 4096, some prompts were in the prefix cache from the case before; that is worth
at most 2 % of its time.

The last table has the linear layers of one decoder layer, in microseconds: each kernel alone, in a CUDA graph, with weights
that are in no cache. Quantizing the activations adds to the product's time, unless torch.compile fuses it with the kernel
before it.
"""

PRODUCTS = {
    "bf16": "BF16",
    "deepgemm_ue8m0": "DeepGEMM, UE8M0",
    "deepgemm_fp32": "DeepGEMM, fp32",
    "cutlass_fp32": "CUTLASS, fp32",
    "quantize_ue8m0": "quantize, UE8M0",
    "quantize_fp32": "quantize, fp32",
}


def render_layers(found: dict[str, Any]) -> str:
    """Linear layers of one model, by the number of tokens."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    columns = [found["model"], *PRODUCTS.values(), "gain with DeepGEMM", "with CUTLASS"]
    rows = ([str(row["tokens"]), *_layer_cells(row["total_us"])] for row in found["rows"])
    return f"```bash\n{found['command']}\n```\n\n{found['gpu']}; {versions}.\n\n{_table(columns, rows, num_names=0)}"


def _layer_cells(times_us: dict[str, float]) -> list[str]:
    gains = (
        times_us["bf16"] / (times_us[product] + times_us[quantize])
        for product, quantize in (("deepgemm_ue8m0", "quantize_ue8m0"), ("cutlass_fp32", "quantize_fp32"))
    )
    return [*(f"{times_us[name]:.0f}" for name in PRODUCTS), *(f"{gain:.2f} x" for gain in gains)]


def _rollout_rows(result: RolloutBenchResult, precisions: Sequence[Precision]) -> Iterator[list[str]]:
    if result.kv_tokens:
        room = (_thousands(result.kv_tokens[name]) if name in result.kv_tokens else "" for name in precisions)
        yield [result.config.model, "", "", "tokens in the KV cache", *room]
    found = {(timing.case, timing.precision): timing for timing in result.timings}
    for index, case in enumerate(dict.fromkeys(timing.case for timing in result.timings)):
        model = result.config.model if index == 0 and not result.kv_tokens else ""
        yield [model, *map(str, case), *(_rate(found.get((case, name))) for name in precisions)]


def _rate(timing: RolloutTiming | None) -> str:
    if timing is None:
        return ""
    against, rate = timing.against_bf16, timing.tokens_per_s
    is_base = timing.precision is Precision.BF16 or against is None
    ratio = "" if is_base else f" ({against:.2f} x)"
    spread = f" [{_thousands(rate.min)} to {_thousands(rate.max)}]" if rate.max > MUCH * rate.min else ""
    return _thousands(rate.median) + ratio + spread


def figures(measured: Measured) -> dict[str, tuple[Plot, list[RefitBenchResult]]]:
    """What draws each picture, and from which results, by the picture's name."""
    if not measured.refits:
        return {}
    here = [result for result in measured.all_refits if result.config.gpu is None]  # others read over NVLink
    found: dict[str, tuple[Plot, list[RefitBenchResult]]] = {"roofline.png": (plot_roofline, here)}
    for boot, results in measured.refits.items():
        found[f"{_slug(boot)}_phases.png"] = (plot_phases, results)
        found[f"{_slug(boot)}_comparison.png"] = (plot_comparison, results)
    return found


def _title(boot: str) -> str:
    engine, *options = boot.split()
    said = [NAMES.get(engine, engine)]
    how = options[options.index("--quantization") + 1] if "--quantization" in options else "block FP8"
    said += [f"booted to quantize BF16 weights itself ({how})"] if "--online" in options else []
    said += [PLACES[options[options.index("--place") + 1]]] if "--place" in options else []
    said += ["the policies on another GPU"] if "--gpu" in options else []
    return ", ".join(said)


def _slug(boot: str) -> str:
    return re.sub(r"\W+", "-", re.sub("--(place|quantization) ", "", boot))


def _versions(results: Iterable[RefitBenchResult | KernelBenchResult | RolloutBenchResult]) -> str:
    said = (", ".join(f"{name} {version}" for name, version in result.versions.items()) for result in results)
    gpus = dict.fromkeys(result.gpu for result in results)
    return f"{' and '.join(gpus)}; {' or '.join(dict.fromkeys(said))}"


def _ages(results: Iterable[BenchResult]) -> Iterator[str]:
    """A sentence for each age of results of earlier code."""
    for age in dict.fromkeys(result.age for result in results if result.age):
        models = (
            result.config.model for result in results if result.age == age and isinstance(result, RefitBenchResult)
        )
        about = ", ".join(models)
        yield f"{age[0].upper()}{age[1:]}{about and f': {about}'}.\n"


def _again(results: Iterable[RefitBenchResult | KernelBenchResult | RolloutBenchResult]) -> str:
    commands = "\n".join(result.command for result in results)
    return f"One command per row; add `--json` to get the file this page is made from:\n\n```bash\n{commands}\n```\n"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _thousands(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int) -> str:
    """Markdown; the first `num_names` columns are words, the others numbers."""
    rules = [" --- " if index < num_names else " ---: " for index in range(len(columns))]
    lines = (f"| {' | '.join(row)} |" for row in (columns, *rows))
    head, *body = lines
    return "\n".join([head, f"|{'|'.join(rules)}|", *body]) + "\n"


def main() -> None:
    """Write the page and its pictures."""
    measured = read(RESULTS)
    (DOCS / "benchmarks.md").write_text(render(measured))
    for name, (plot, results) in figures(measured).items():
        plot(results, DOCS / "figures" / name)
