"""The demo's size, its rounds, and its result, which says whether the demo passed."""

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, computed_field

LEAST_FALL = 0.20
"""Minimum fall of the refitted engine's held-out loss, relative to its start."""
GREATEST_GAP = 0.05
"""Maximum difference between the refitted engine's held-out loss and the trainer's, relative to the trainer's."""


class DemoConfig(BaseModel, frozen=True, extra="forbid"):
    """The size of the demo."""

    steps: int = Field(default=100, ge=1)
    """Optimizer steps in total."""
    refit_every: int = Field(default=10, ge=1)
    """Optimizer steps between refits."""
    out: Path = Path("fp8refit-demo")
    """Folder for `demo.png`."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    batch_size: int = Field(default=8, ge=1)
    window_bytes: int = Field(default=129, ge=2)
    """Length of one training example."""
    num_held_out: int = Field(default=16, ge=1)
    """Held-out examples, the same in every round."""
    sample_bytes: int = Field(default=120, ge=1)
    """Length of the text sampled at the end."""


class Round(BaseModel, frozen=True):
    """One round: some optimizer steps, then a refit. Losses are in nats per byte."""

    kind: Literal["round"] = "round"
    step: int
    version: int
    """Policy version that the refitted engine serves."""
    train_loss: float | None
    """Mean over the round; None before the first step."""
    trainer_loss: float
    """Held-out loss of the policy itself."""
    refitted_loss: float
    stale_loss: float
    """Held-out loss of an engine that is never refitted."""
    refit_ms: float | None
    gb_per_s: float | None


class DemoResult(BaseModel, frozen=True):
    """The results of the demo."""

    kind: Literal["result"] = "result"
    rounds: tuple[Round, ...] = Field(exclude=True)
    seconds: float
    chart: Path
    sample: str
    """Text that the refitted engine wrote."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fall(self) -> float:
        """How far the refitted engine's held-out loss fell, relative to its start."""
        return 1 - self.rounds[-1].refitted_loss / self.rounds[0].refitted_loss

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gap(self) -> float:
        """The largest relative difference in any round between the held-out losses of engine and trainer."""
        gaps = (abs(row.refitted_loss / row.trainer_loss - 1) for row in self.rounds)
        return max(gaps, key=lambda gap: (math.isnan(gap), gap))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def problems(self) -> tuple[str, ...]:
        """Why the demo failed; empty if it passed. NaN counts as failure."""
        problems = []
        if not self.fall >= LEAST_FALL:
            problems.append(f"the refitted engine's held-out loss fell by {self.fall:.1%}, less than {LEAST_FALL:.0%}")
        if not self.gap <= GREATEST_GAP:
            problems.append(
                f"the refitted engine strayed {self.gap:.1%} from its trainer, more than {GREATEST_GAP:.0%}"
            )
        return tuple(problems)
