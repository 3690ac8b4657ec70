"""Trains, refits and compares, round by round; then judges, draws and samples from the refitted engine."""

import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from fp8refit_transformers import to_block_fp8
from pydantic import BaseModel, ConfigDict, Field, computed_field
from torch import nn

from fp8refit.cli.demo.chart import draw_chart
from fp8refit.cli.demo.corpus import read_corpus, sample_windows
from fp8refit.cli.demo.policy import Trainer, held_out_loss, make_policy
from fp8refit.driver.refitter import Refitter
from fp8refit.report import RefitReport

LEAST_FALL = 0.20
"""Minimum fall of the refitted engine's held-out loss, relative to its start."""
GREATEST_GAP = 0.05
"""Maximum difference between the refitted engine's held-out loss and the trainer's, relative to the trainer's."""
PROMPT = "The "


class DemoConfig(BaseModel):
    """The size of the demo."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=150, ge=1)
    """Optimizer steps in total."""
    refit_every: int = Field(default=15, ge=1)
    """Optimizer steps between refits."""
    out: Path = Path("fp8refit-demo")
    """Folder for `demo.png`."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    batch_size: int = Field(default=16, ge=1)
    window_bytes: int = Field(default=129, ge=2)
    """Length of one training example."""
    num_held_out: int = Field(default=32, ge=1)
    """Held-out examples, the same in every round."""
    sample_bytes: int = Field(default=240, ge=1)
    """Length of the text sampled at the end."""


class Round(BaseModel):
    """One round: some optimizer steps, then a refit. Losses are in nats per byte."""

    model_config = ConfigDict(frozen=True)

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


class DemoResult(BaseModel):
    """The results of the demo."""

    model_config = ConfigDict(frozen=True)

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


def run_demo(config: DemoConfig, *, on_round: Callable[[Round], None] = lambda _: None) -> DemoResult:
    """Train a small policy, and refit one FP8 engine to it but not another.

    Args:
        config: The size of the demo.
        on_round: Called after every round, and first with the state before training.
    """
    start_s = time.perf_counter()
    demo = _Demo(config)
    rounds = []
    for row in demo.rounds():
        on_round(row)
        rounds.append(row)
    config.out.mkdir(parents=True, exist_ok=True)
    chart = draw_chart(rounds, config.out / "demo.png")
    sample = write_text(demo.refitted, num_bytes=config.sample_bytes)
    return DemoResult(rounds=tuple(rounds), seconds=time.perf_counter() - start_s, chart=chart, sample=sample)


def write_text(engine: Any, *, num_bytes: int) -> str:
    """Sample a continuation of `PROMPT` from `engine`."""
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = engine.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_bytes, do_sample=True, temperature=0.7
    )
    return bytes(tokens[0].tolist()).decode(errors="replace")


class _Demo:
    """A trainer, and two engines that started with its weights."""

    def __init__(self, config: DemoConfig) -> None:
        torch.manual_seed(config.seed)
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)
        self._corpus = read_corpus()
        self._held_out = sample_windows(
            self._corpus.held_out,
            num_windows=config.num_held_out,
            length=config.window_bytes,
            generator=self._generator,
        )
        self._policy = make_policy()
        self._trainer = Trainer(self._policy, num_steps=config.steps)
        self.refitted = _make_engine(self._policy)
        self._stale = _make_engine(self._policy)

    def rounds(self) -> Iterator[Round]:
        """Measure, then train, refit and measure until the steps are used up."""
        yield self._measure(step=0)
        refitter = Refitter(self.refitted)
        for start in range(0, self._config.steps, self._config.refit_every):
            step = min(start + self._config.refit_every, self._config.steps)
            train_loss = mean(self._train_step() for _ in range(start, step))
            report = refitter.refit(self._policy.state_dict())
            yield self._measure(step=step, train_loss=train_loss, report=report)

    def _train_step(self) -> float:
        config = self._config
        windows = sample_windows(
            self._corpus.train, num_windows=config.batch_size, length=config.window_bytes, generator=self._generator
        )
        return self._trainer.step(windows)

    def _measure(self, *, step: int, train_loss: float | None = None, report: RefitReport | None = None) -> Round:
        return Round(
            step=step,
            version=report.version if report is not None else 0,
            train_loss=train_loss,
            trainer_loss=held_out_loss(self._policy, self._held_out),
            refitted_loss=held_out_loss(self.refitted, self._held_out),
            stale_loss=held_out_loss(self._stale, self._held_out),
            refit_ms=report.total_s * 1e3 if report is not None else None,
            gb_per_s=report.gb_per_s if report is not None else None,
        )


def _make_engine(policy: nn.Module) -> nn.Module:
    """Create a block-FP8 engine with the current weights of `policy`."""
    return to_block_fp8(copy.deepcopy(policy).to(torch.bfloat16)).eval()
