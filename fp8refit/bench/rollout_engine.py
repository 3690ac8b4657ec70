"""What an adapter's module `rollout` provides for the rollout benchmark: engines that hold weights in some precision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, assert_never

from fp8refit.bench.engine import LiveEngine
from fp8refit.errors import UnsupportedEngineError

MEMORY_SHARE = 0.85
"""Share of a GPU for weights and KV cache, whatever the precision: smaller weights leave more cache."""


class Precision(StrEnum):
    """How an engine holds weights and KV cache."""

    BF16 = "bf16"
    FP8 = "fp8"
    """Block-FP8 weights, BF16 KV cache."""
    FP8_KV = "fp8+kv"
    """Block-FP8 weights, FP8 KV cache with calibrated scales."""
    PER_CHANNEL = "fp8_per_channel"
    """BF16 weights that the engine itself quantizes to FP8, one scale per row; as it names that."""
    PER_TENSOR = "fp8_per_tensor"
    """The same, one scale per weight."""
    MXFP8 = "mxfp8"
    """The same, one scale per 32 values."""

    @property
    def online(self) -> str | None:
        """How the engine quantizes BF16 weights itself, in its own words; None if it does not."""
        match self:
            case Precision.BF16 | Precision.FP8 | Precision.FP8_KV:
                return None
            case Precision.PER_CHANNEL | Precision.PER_TENSOR | Precision.MXFP8:
                return self.value
            case _:
                assert_never(self)


USUAL = Precision.BF16, Precision.FP8, Precision.FP8_KV
"""Those of every engine."""


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
    """Additional boot arguments, in the engine's own names. They override the benchmark's."""

    @property
    def is_fp8(self) -> bool:
        """Whether weights are FP8."""
        return self.precision is not Precision.BF16

    def refuse_online(self, engine: str) -> None:
        """Refuse what an engine does not quantize itself.

        Raises:
            UnsupportedEngineError: It is asked to.
        """
        if self.precision.online is not None:
            usual = ", ".join(USUAL)
            raise UnsupportedEngineError(f"{engine} is not timed with {self.precision}; use {usual}, or vllm")


class RolloutEngine(LiveEngine, Protocol):
    """A live engine that generates."""

    num_kv_tokens: int | None
    """Tokens that fit into its KV cache; None if it grows."""

    def load_bf16(self, seed: int) -> None:
        """Load policy number `seed` of `fp8refit.bench.policies` into BF16 weights, by the engine's own means."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue every prompt by `num_tokens` sampled tokens, ignoring end of text."""
        ...
