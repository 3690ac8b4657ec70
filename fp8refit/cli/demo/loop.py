"""Trains, refits and compares, round by round; then draws and samples from the refitted engine."""

import copy
import time
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import torch
from fp8refit_transformers import to_block_fp8
from torch import nn

from fp8refit.cli.demo.chart import draw_chart
from fp8refit.cli.demo.corpus import read_corpus, sample_windows
from fp8refit.cli.demo.policy import Trainer, held_out_loss, make_policy
from fp8refit.cli.demo.rounds import DemoConfig, DemoResult, Round
from fp8refit.driver.refitter import Refitter
from fp8refit.report import RefitReport

PROMPT = "The "


def run_demo(config: DemoConfig, *, on_round: Callable[[Round], None] = lambda _: None) -> DemoResult:
    """Train a small policy, refit an FP8 engine to it, and compare with one that is not refitted.

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
    """A trainer, and an engine that started with its weights."""

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
        self._stale_loss = held_out_loss(self.refitted, self._held_out)
        """Of an engine that is never refitted, which is as this one is now."""

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
            stale_loss=self._stale_loss,
            refit_ms=report.total_s * 1e3 if report is not None else None,
            gb_per_s=report.gb_per_s if report is not None else None,
        )


def _make_engine(policy: nn.Module) -> nn.Module:
    """Create a block-FP8 engine with the current weights of `policy`."""
    return to_block_fp8(copy.deepcopy(policy).to(torch.bfloat16)).eval()
