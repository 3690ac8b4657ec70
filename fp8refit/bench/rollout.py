"""What FP8 buys: tokens a second of rollouts with BF16 weights, FP8 weights, and FP8 weights over an FP8 KV cache."""

import json
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from fp8refit._version import __version__
from fp8refit.bench import policies
from fp8refit.bench.clock import Percentiles
from fp8refit.bench.engine import adapter_module
from fp8refit.bench.shapes import folder_of
from fp8refit.refitter import Refitter

_FIRST_TOKEN, _NUM_TOKENS = 100, 500
"""Ids of prompts: any vocabulary has them."""
_CALIBRATION = (8, 128)
"""Sequences, and tokens of each."""
_SECRETS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD"})
"""Words in names of variables that no result shows."""
MEMORY_SHARE = 0.85
"""Of a GPU, that every engine may take for weights and KV cache, whatever its precision: less weights, more cache."""


class Precision(StrEnum):
    """How an engine holds weights and KV cache."""

    BF16 = "bf16"
    FP8 = "fp8"
    """Block-FP8 weights, KV cache in BF16."""
    FP8_KV = "fp8+kv"
    """Block-FP8 weights, KV cache in FP8 under calibrated scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBoot:
    """What an adapter's `rollout.boot` is asked to boot."""

    model: Path
    tp: int
    precision: Precision
    max_length: int
    """Tokens of the longest sequence."""
    max_batch: int
    """Sequences at a time."""
    arguments: Mapping[str, object]
    """See `RolloutBenchConfig.engine_arguments`."""

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are."""
        return self.precision is not Precision.BF16


class RolloutEngine(Protocol):
    """A live engine that generates."""

    candidate: object
    """For `Refitter`."""
    settings: dict[str, object]
    """What it was booted with."""
    num_kv_tokens: int | None
    """For how many tokens its KV cache has room; None if it grows."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue every prompt by `num_tokens` sampled tokens, whatever they are."""
        ...

    def close(self) -> None:
        """End it, and everything that it started."""
        ...


class RolloutBenchConfig(BaseModel):
    """What is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    model: str
    """One of `SHAPES`, or a folder with a `config.json`."""
    tp: int = Field(default=1, ge=1)
    precisions: tuple[Precision, ...] = tuple(Precision)
    batch_sizes: tuple[int, ...] = (8, 64, 256)
    context_lengths: tuple[int, ...] = (512, 4096)
    """Tokens of each prompt."""
    num_new_tokens: int = Field(default=256, ge=1)
    repeats: int = Field(default=3, ge=1)
    seed: int = 0
    engine_arguments: dict[str, Any] = {}
    """What every engine is booted with besides, or in the place of what it is booted with here, by the engine's names."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.context_lengths) + self.num_new_tokens


class RolloutTiming(BaseModel):
    """Rollouts of one precision, batch size and context length."""

    model_config = ConfigDict(frozen=True)

    precision: Precision
    batch_size: int
    context_length: int
    tokens_per_s: Percentiles
    """New tokens of all sequences over the time from the first prompt's prefill to the last token."""
    against_bf16: float | None
    """Median over the median of BF16; None if that was not measured."""


class RolloutBenchResult(BaseModel):
    """Throughput, case by case."""

    model_config = ConfigDict(frozen=True)

    config: RolloutBenchConfig
    command: str
    gpu: str
    versions: dict[str, str]
    settings: dict[Precision, dict[str, str]]
    """What the engines were booted with."""
    kv_tokens: dict[Precision, int]
    """For how many tokens the KV caches have room, where they do not grow."""
    timings: tuple[RolloutTiming, ...]


def run_rollout_bench(
    config: RolloutBenchConfig, *, on_progress: Callable[[str, int, int], None] = lambda *_: None
) -> RolloutBenchResult:
    """Boot one engine after another, one a precision, and time generation.

    Every engine has the same share of its GPUs for weights and KV cache. FP8 engines are refitted to a policy of random weights
    first, made tensor by tensor, with calibrated KV scales where the cache is FP8. Prompts are random, and others in every run:
    no prefix is cached.

    Raises:
        UnsupportedEngineError: No such engine, shape or folder, or the engine cannot be refitted.
    """
    environment = _environment_of(config.engine)
    cases = [(batch, length) for batch in config.batch_sizes for length in config.context_lengths]
    num_steps, done = len(config.precisions) * len(cases), 0
    found: dict[tuple[Precision, int, int], Percentiles] = {}
    settings: dict[Precision, dict[str, str]] = {}
    kv_tokens: dict[Precision, int] = {}
    versions = {"fp8refit": __version__, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="fp8refit-bench-") as scratch:
        model = folder_of(config.model, Path(scratch))
        for precision in config.precisions:
            on_progress(f"boot {precision}", done, num_steps)
            engine = _open(config, model, precision)
            try:
                settings[precision] = {name: str(value) for name, value in engine.settings.items()}
                if engine.num_kv_tokens is not None:
                    kv_tokens[precision] = engine.num_kv_tokens
                if precision is not Precision.BF16:
                    versions |= _refit(engine, config, precision)
                for batch, length in cases:
                    on_progress(f"{precision}, {batch} x {length}", done, num_steps)
                    found[precision, batch, length] = _time(engine, config, batch, length)
                    done += 1
            finally:
                engine.close()
    on_progress("done", num_steps, num_steps)
    return RolloutBenchResult(
        config=config,
        command=_command_of(config, environment),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        versions=versions,
        settings=settings,
        kv_tokens=kv_tokens,
        timings=tuple(
            RolloutTiming(
                precision=precision,
                batch_size=batch,
                context_length=length,
                tokens_per_s=rate,
                against_bf16=_ratio(rate, found.get((Precision.BF16, batch, length))),
            )
            for (precision, batch, length), rate in found.items()
        ),
    )


def _open(config: RolloutBenchConfig, model: Path, precision: Precision) -> RolloutEngine:
    wanted = RolloutBoot(
        model=model,
        tp=config.tp,
        precision=precision,
        max_length=config.max_length,
        max_batch=max(config.batch_sizes),
        arguments=config.engine_arguments,
    )
    engine: RolloutEngine = adapter_module(config.engine, "rollout").boot(wanted)
    return engine


def _refit(engine: RolloutEngine, config: RolloutBenchConfig, precision: Precision) -> dict[str, str]:
    """Random weights in the place of noise, and scales that fit them. Gives the engine's versions."""
    with Refitter(engine.candidate) as refitter:
        layout = refitter.layout()
        device = torch.device("cuda" if torch.cuda.is_available() and layout.device.startswith("cuda") else "cpu")
        manifest = policies.manifest(layout)
        policy = policies.stream(manifest, config.seed, device)
        count, length = _CALIBRATION
        batch = _prompts(count, min(length, config.max_length), config.seed) if precision is Precision.FP8_KV else None
        refitter.refit(policy, manifest=manifest, calibration=batch)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return layout.versions


def _time(engine: RolloutEngine, config: RolloutBenchConfig, batch: int, length: int) -> Percentiles:
    rates = []
    for run in range(config.repeats + 1):
        prompts = _prompts(batch, length, config.seed + 1 + run)
        start_s = time.perf_counter()
        engine.generate(prompts, config.num_new_tokens)
        rates.append(batch * config.num_new_tokens / (time.perf_counter() - start_s))
    return Percentiles.of(rates[1:])


def _prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST_TOKEN, _FIRST_TOKEN + _NUM_TOKENS, (count, length), generator=generator)
    return [list(map(int, row)) for row in ids]


def _ratio(rate: Percentiles, base: Percentiles | None) -> float | None:
    return None if base is None else rate.median / base.median


def _environment_of(engine: str) -> dict[str, str]:
    """The engine's own variables that are set, which choose its kernels too; none that is a secret."""
    own = (name for name in sorted(os.environ) if name.startswith(f"{engine.upper()}_"))
    return {name: os.environ[name] for name in own if _SECRETS.isdisjoint(name.split("_"))}


def _command_of(config: RolloutBenchConfig, environment: Mapping[str, str]) -> str:
    """What measures it again, in a shell."""
    parts = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    parts += ["fp8refit bench rollout", f"--engine {config.engine}", f"--model {config.model}", f"--tp {config.tp}"]
    lists: dict[str, Sequence[object]] = {
        "precisions": config.precisions,
        "batch-sizes": config.batch_sizes,
        "context-lengths": config.context_lengths,
    }
    parts += [f"--{name} {','.join(map(str, values))}" for name, values in lists.items()]
    parts += [f"--new-tokens {config.num_new_tokens}", f"--repeats {config.repeats}", f"--seed {config.seed}"]
    arguments = (f"{name}={json.dumps(value)}" for name, value in config.engine_arguments.items())
    parts += [f"--set {shlex.quote(argument)}" for argument in arguments]
    return " ".join(parts)
