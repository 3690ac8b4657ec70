"""Measures what FP8 gains: rollout tokens per second with BF16 weights, FP8 weights, and an FP8 KV cache."""

import json
import math
import os
import platform
import shlex
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, product
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from fp8refit import __version__
from fp8refit.bench import policies
from fp8refit.bench.clock import Count, Percentiles
from fp8refit.bench.engine import adapter_module
from fp8refit.bench.shapes import folder_of
from fp8refit.driver.adapters import booting
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.layout import EngineLayout

_FIRST_TOKEN, _NUM_TOKENS = 100, 500
"""Prompt token ids; every language model's vocabulary has them."""
_WARM_UP_TOKENS = 32
"""New tokens in the warm-up run of each case, which compiles kernels."""
_CALIBRATION = (8, 128)
"""Number of sequences, and tokens in each."""
_SECRETS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD"})
"""Variables with these words in their names are left out of results."""
MEMORY_SHARE = 0.85
"""Share of a GPU for weights and KV cache, whatever the precision: smaller weights leave more cache."""


class Precision(StrEnum):
    """How an engine holds weights and KV cache."""

    BF16 = "bf16"
    FP8 = "fp8"
    """Block-FP8 weights, BF16 KV cache."""
    FP8_KV = "fp8+kv"
    """Block-FP8 weights, FP8 KV cache with calibrated scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBoot:
    """What an adapter's `rollout.boot` has to boot."""

    model: Path
    tp: int
    precision: Precision
    max_length: int
    """Longest sequence, in tokens."""
    max_batch: int
    """Most sequences at a time."""
    arguments: Mapping[str, object]
    """As in `RolloutBenchConfig.engine_arguments`."""

    @property
    def is_fp8(self) -> bool:
        """Whether weights are FP8."""
        return self.precision is not Precision.BF16


class RolloutEngine(Protocol):
    """A live engine that generates."""

    candidate: object
    """The object to pass to `Refitter`."""
    settings: dict[str, object]
    """The arguments it was booted with."""
    num_kv_tokens: int | None
    """Tokens that fit into its KV cache; None if it grows."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue every prompt by `num_tokens` sampled tokens, ignoring end of text."""
        ...

    def close(self) -> None:
        """Stop the engine and everything it started."""
        ...


class RolloutBenchConfig(BaseModel):
    """What to measure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    model: str
    """One of `SHAPES`, or a folder with a `config.json`."""
    tp: int = Field(default=1, ge=1)
    precisions: tuple[Precision, ...] = Field(default=tuple(Precision), min_length=1)
    batch_sizes: tuple[Count, ...] = Field(default=(8, 64, 256), min_length=1)
    context_lengths: tuple[Count, ...] = Field(default=(512, 4096), min_length=1)
    """Tokens per prompt."""
    num_new_tokens: tuple[Count, ...] = Field(default=(256,), min_length=1)
    """New tokens per prompt; each value is a case of its own."""
    cases: tuple[tuple[Count, Count, Count], ...] = ()
    """Sequences, prompt tokens and new tokens, instead of all combinations of the above."""
    repeats: Count = 3
    case_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Stop repeating a case once its timed runs have taken this long."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    engine_arguments: dict[str, Any] = {}
    """Additional boot arguments for every engine, in the engine's own names. They override the benchmark's."""

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return max(length + num_new for _, length, num_new in self.every_case)

    @property
    def max_batch(self) -> int:
        """Most sequences at a time."""
        return max(batch for batch, _, _ in self.every_case)

    @property
    def every_case(self) -> list[tuple[int, int, int]]:
        """Sequences, prompt tokens and new tokens of each case."""
        return list(self.cases or product(self.batch_sizes, self.context_lengths, self.num_new_tokens))


class RolloutTiming(BaseModel):
    """The timing of one precision and case."""

    model_config = ConfigDict(frozen=True)

    precision: Precision
    batch_size: int
    context_length: int
    num_new_tokens: int
    tokens_per_s: Percentiles
    """New tokens of all sequences per second, from the start of the first prefill to the last token."""
    prefill_s: Percentiles | None = None
    """Seconds of the same run with one new token: the cost of prompts. The rest is decoding."""
    against_bf16: float | None
    """Median relative to BF16's; None if BF16 was not measured."""

    @property
    def case(self) -> tuple[int, int, int]:
        """Sequences, prompt tokens and new tokens."""
        return self.batch_size, self.context_length, self.num_new_tokens


class RolloutBenchResult(BaseModel):
    """Throughput by case."""

    model_config = ConfigDict(frozen=True)

    config: RolloutBenchConfig
    command: str
    gpu: str
    versions: dict[str, str]
    settings: dict[Precision, dict[str, str]]
    """The arguments engines were booted with."""
    kv_tokens: dict[Precision, int]
    """Tokens that fit into KV caches that do not grow."""
    kernels: dict[Precision, tuple[str, ...]] = {}
    """Kernels and scale formats of FP8 engines."""
    timings: tuple[RolloutTiming, ...]


def run_rollout_bench(
    config: RolloutBenchConfig,
    *,
    earlier: RolloutBenchResult | None = None,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
    on_result: Callable[[RolloutBenchResult], None] = lambda _: None,
) -> RolloutBenchResult:
    """Boot one engine per precision, one after another, and time generation.

    Every engine gets the same share of its GPUs for weights and KV cache. FP8 engines are first refitted to a policy of
    random weights, created tensor by tensor, with calibrated KV scales if the cache is FP8. Prompts are random and differ
    in every run, so no prefix is cached.

    Args:
        config: What to measure.
        earlier: A result of the same command on the same machine. Only the cases it lacks are measured.
        on_progress: Called with the next step, cases done, and cases in total.
        on_result: Called after each case with the result so far.

    Raises:
        UnsupportedEngineError: The engine, shape or folder is unknown, the vocabulary lacks the prompts' ids, or the
            engine cannot be refitted; or `earlier` is a result of something else.
    """
    result = _empty_result(config)
    if earlier is not None:
        _check_same(earlier, result)
        result = earlier
    num_steps = len(config.precisions) * len(config.every_case)
    with tempfile.TemporaryDirectory(prefix="fp8refit-bench-") as scratch:
        model = folder_of(config.model, Path(scratch))
        _check_vocabulary(model)
        for precision in config.precisions:
            timed = {timing.case for timing in result.timings if timing.precision is precision}
            missing = [case for case in config.every_case if case not in timed]
            if not missing:
                continue
            on_progress(f"boot {precision}", len(result.timings), num_steps)
            engine = _open(config, model, precision)
            try:
                result = _with_engine(result, engine, precision)
                for case in missing:
                    on_progress(f"{precision}, {case[0]} x {case[1]} + {case[2]}", len(result.timings), num_steps)
                    timings = _against_bf16([*result.timings, _time(engine, config, precision, case)])
                    result = result.model_copy(update={"timings": timings})
                    on_result(result)
            finally:
                engine.close()
    on_progress("done", num_steps, num_steps)
    return result


def _empty_result(config: RolloutBenchConfig) -> RolloutBenchResult:
    return RolloutBenchResult(
        config=config,
        command=_command_of(config, _environment_of(config.engine)),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        versions={"fp8refit": __version__, "torch": torch.__version__},
        settings={},
        kv_tokens={},
        timings=(),
    )


def _check_same(earlier: RolloutBenchResult, result: RolloutBenchResult) -> None:
    """Check that both results come from one command and one kind of machine.

    Raises:
        UnsupportedEngineError: They do not.
    """
    for field in ("command", "gpu"):
        before, now = getattr(earlier, field), getattr(result, field)
        if before != now:
            raise UnsupportedEngineError(
                f"the earlier result has another {field}: {before!r}, not {now!r}; choose another file"
            )


def _with_engine(result: RolloutBenchResult, engine: RolloutEngine, precision: Precision) -> RolloutBenchResult:
    """Add what is known about a live engine. An FP8 engine is refitted to learn its kernels."""
    settings = {name: str(value) for name, value in engine.settings.items()}
    update: dict[str, Any] = {"settings": result.settings | {precision: settings}}
    if engine.num_kv_tokens is not None:
        update["kv_tokens"] = result.kv_tokens | {precision: engine.num_kv_tokens}
    if precision is not Precision.BF16:
        layout = _refit(engine, result.config, precision)
        kernels = {f"{slot.kernel} {slot.scale_format}" for slot in layout.slots if slot.scale_format is not None}
        update["versions"] = result.versions | layout.versions
        update["kernels"] = result.kernels | {precision: tuple(sorted(kernels))}
    return result.model_copy(update=update)


def _check_vocabulary(model: Path) -> None:
    """Check that the model's vocabulary contains the prompts' ids, if its config gives its size.

    Raises:
        UnsupportedEngineError: It does not.
    """
    size = json.loads((model / "config.json").read_bytes()).get("vocab_size")
    if isinstance(size, int) and size < _FIRST_TOKEN + _NUM_TOKENS:
        raise UnsupportedEngineError(
            f"{model} has a vocabulary of {size}, but prompts have ids up to {_FIRST_TOKEN + _NUM_TOKENS - 1}"
        )


def _open(config: RolloutBenchConfig, model: Path, precision: Precision) -> RolloutEngine:
    wanted = RolloutBoot(
        model=model,
        tp=config.tp,
        precision=precision,
        max_length=config.max_length,
        max_batch=config.max_batch,
        arguments=config.engine_arguments,
    )
    module = adapter_module(config.engine, "rollout")
    with booting(config.engine, config.model):
        engine: RolloutEngine = module.boot(wanted)
    return engine


def _refit(engine: RolloutEngine, config: RolloutBenchConfig, precision: Precision) -> EngineLayout:
    """Replace the engine's dummy weights with random ones, calibrate scales, and return the engine's layout."""
    with Refitter(engine.candidate) as refitter:
        layout = refitter.layout()
        device = torch.device("cuda" if torch.cuda.is_available() and layout.device.startswith("cuda") else "cpu")
        manifest = policies.manifest(layout)
        policy = policies.stream(manifest, config.seed, device)
        num_sequences, length = _CALIBRATION
        batch = (
            _prompts(num_sequences, min(length, config.max_length), f"{config.seed} calibration")
            if precision is Precision.FP8_KV
            else None
        )
        refitter.refit(policy, manifest=manifest, calibration=batch)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return layout


def _time(
    engine: RolloutEngine, config: RolloutBenchConfig, precision: Precision, case: tuple[int, int, int]
) -> RolloutTiming:
    batch, length, num_new = case
    runs = count()

    def seconds(num_tokens: int) -> float:
        prompts = _prompts(batch, length, f"{config.seed} {case} {next(runs)}")
        start_s = time.perf_counter()
        with booting(config.engine, config.model, act="generate with"):
            engine.generate(prompts, num_tokens)
        return time.perf_counter() - start_s

    def timed(num_tokens: int) -> list[float]:
        found: list[float] = []
        while len(found) < config.repeats and not (found and sum(found) > (config.case_seconds or math.inf)):
            found.append(seconds(num_tokens))
        return found

    seconds(min(num_new, _WARM_UP_TOKENS))
    whole_s = timed(num_new)
    return RolloutTiming(
        precision=precision,
        batch_size=batch,
        context_length=length,
        num_new_tokens=num_new,
        tokens_per_s=Percentiles.of([batch * num_new / taken_s for taken_s in whole_s]),
        prefill_s=Percentiles.of(timed(1)),
        against_bf16=None,
    )


def _against_bf16(timings: Sequence[RolloutTiming]) -> tuple[RolloutTiming, ...]:
    """Compare each timing with BF16's in the same case, if there is one."""
    base = {timing.case: timing.tokens_per_s.median for timing in timings if timing.precision is Precision.BF16}
    ratios = (timing.tokens_per_s.median / base[timing.case] if timing.case in base else None for timing in timings)
    return tuple(
        timing.model_copy(update={"against_bf16": ratio}) for timing, ratio in zip(timings, ratios, strict=True)
    )


def _prompts(num_prompts: int, length: int, about: str) -> list[list[int]]:
    """Return random ids, seeded by what `about` says they are for."""
    generator = torch.Generator().manual_seed(zlib.crc32(about.encode()))
    return torch.randint(_FIRST_TOKEN, _FIRST_TOKEN + _NUM_TOKENS, (num_prompts, length), generator=generator).tolist()


def _environment_of(engine: str) -> dict[str, str]:
    """Return the engine's own environment variables, which may choose its kernels, without secrets."""
    own = (name for name in sorted(os.environ) if name.startswith(f"{engine.upper()}_"))
    return {name: os.environ[name] for name in own if _SECRETS.isdisjoint(name.split("_"))}


def _command_of(config: RolloutBenchConfig, environment: Mapping[str, str]) -> str:
    """The shell command that repeats the measurement."""
    parts = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    parts += ["fp8refit bench rollout", f"--engine {config.engine}", f"--model {config.model}", f"--tp {config.tp}"]
    lists: dict[str, Sequence[object]] = {"precisions": config.precisions}
    if config.cases:
        lists["cases"] = [f"{batch}x{length}+{num_new}" for batch, length, num_new in config.cases]
    else:
        lists |= {"batch-sizes": config.batch_sizes, "context-lengths": config.context_lengths}
        lists["new-tokens"] = config.num_new_tokens
    parts += [f"--{name} {','.join(map(str, values))}" for name, values in lists.items()]
    parts += [f"--repeats {config.repeats}", f"--seed {config.seed}"]
    if config.case_seconds is not None:
        parts.append(f"--case-seconds {config.case_seconds:g}")
    arguments = (f"{name}={json.dumps(value)}" for name, value in config.engine_arguments.items())
    parts += [f"--set {shlex.quote(argument)}" for argument in arguments]
    return " ".join(parts)
