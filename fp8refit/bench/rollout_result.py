"""What the rollout benchmark measures and finds, and the command that repeats it."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from pydantic import BaseModel, Field

from fp8refit.bench.clock import Count, Percentiles
from fp8refit.bench.result import BenchResult
from fp8refit.bench.rollout_engine import USUAL, Precision

_SECRETS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD"})
"""Variables with these words in their names are left out of results."""


class RolloutBenchConfig(BaseModel, frozen=True, extra="forbid"):
    """What to measure."""

    engine: str
    model: str
    """One of `SHAPES`, or a folder with a `config.json`."""
    tp: int = Field(default=1, ge=1)
    precisions: tuple[Precision, ...] = Field(default=USUAL, min_length=1)
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


class RolloutTiming(BaseModel, frozen=True):
    """The timing of one precision and case."""

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


class RolloutBenchResult(BenchResult, frozen=True):
    """Throughput by case."""

    config: RolloutBenchConfig
    settings: dict[Precision, dict[str, str]]
    """The arguments engines were booted with."""
    kv_tokens: dict[Precision, int]
    """Tokens that fit into KV caches that do not grow."""
    kernels: dict[Precision, tuple[str, ...]] = Field(default={})
    """Kernels and scale formats of FP8 engines."""
    timings: tuple[RolloutTiming, ...]


def environment_of(engine: str) -> dict[str, str]:
    """Return the engine's own environment variables, which may choose its kernels, without secrets."""
    own = (name for name in sorted(os.environ) if name.startswith(f"{engine.upper()}_"))
    return {name: os.environ[name] for name in own if _SECRETS.isdisjoint(name.split("_"))}


def command_of(config: RolloutBenchConfig, environment: Mapping[str, str]) -> str:
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
