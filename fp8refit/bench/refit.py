"""Times refits of one live engine, and its other ways to load weights, round by round on the same tensors."""

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from fp8refit.bench import policies
from fp8refit.bench.clock import Count, Percentiles, copy_gb_per_s, time_call
from fp8refit.bench.engine import BenchEngine, Strategy, open_bench_engine
from fp8refit.bench.result import BenchResult, gpu_name, stamp, versions_of
from fp8refit.bench.shapes import folder_of
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import UnsupportedEngineError
from fp8refit.report import RefitReport

OURS = "fp8refit"


class RefitBenchConfig(BaseModel, frozen=True, extra="forbid"):
    """What to measure."""

    engine: str
    """Name of an installed adapter: vllm, sglang, transformers."""
    model: str
    """One of `SHAPES`, or a folder with a `config.json`."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""
    online: bool = False
    """Boot an engine that quantizes BF16 weights itself; its own methods then take BF16."""
    rounds: Count = 7
    """Number of timed refits, and of timed runs of every other strategy."""
    warm_up: int = Field(default=2, ge=0, le=1 << 24)
    """Untimed refits after the first."""
    strategies: tuple[str, ...] | None = None
    """Which of the engine's own strategies to time; None for all, empty for none."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)

    @property
    def boot(self) -> str:
        """The engine, and how it was booted."""
        return f"{self.engine} --online" if self.online else self.engine


class StrategyResult(BaseModel, frozen=True):
    """The result of one way to give the engine new weights."""

    name: str
    summary: str
    wall_ms: Percentiles
    """Time from call to return, including the cache flush; the engine is then ready to serve."""
    peak_extra_bytes: int
    """Additional GPU memory in the trainer's process, which may include ranks."""
    is_repeatable: bool
    """Whether every run with the same policy left the same bytes on every rank."""
    equals_ours: bool
    """Whether those are the bytes that fp8refit writes."""

    @property
    def whose_bytes(self) -> str:
        """Whose bytes the engine ended with, for tables."""
        if self.equals_ours:
            return "fp8refit's"
        return "its own" if self.is_repeatable else "NOT the same every time"


class RefitBenchResult(BenchResult, frozen=True):
    """Where the time of a refit goes, and what the alternatives take."""

    config: RefitBenchConfig
    settings: dict[str, str]
    """The arguments the engine was booted with."""
    kernels: dict[str, int]
    """Number of slots by engine kernel and scale format."""
    num_tensors: int
    bytes_read: int
    bytes_written: int
    first_ms: float
    """The first refit, including compilation of plan and kernels."""
    wall_ms: Percentiles
    phases_ms: dict[str, Percentiles]
    plan_fill_verify_ms: Percentiles
    fill_device_ms: Percentiles | None
    """On the device's clock, for the slowest rank; None on a CPU."""
    host_ms: Percentiles
    """The call minus the fill on the device."""
    peak_extra_bytes: int
    copy_gb_per_s: float
    """The copy roofline, measured in this process between rounds."""
    fill_over_copy: float
    """The fill's time divided by that of copying as many bytes, for the slowest rank."""
    is_repeatable: bool
    others: tuple[StrategyResult, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes read and written by all ranks."""
        return self.bytes_read + self.bytes_written

    @property
    def fill_ms(self) -> Percentiles:
        """The fill's time, on the device's clock if it has one."""
        return self.fill_device_ms or self.phases_ms["fill"]

    @property
    def gb_per_s(self) -> float:
        """The bytes of all ranks divided by the fill's time."""
        return self.num_bytes / self.fill_ms.median / 1e6


Progress = Callable[[str, int, int], None]
"""Takes the current step, steps done, and steps in total."""


def run_refit_bench(config: RefitBenchConfig, *, on_progress: Progress = lambda *_: None) -> RefitBenchResult:
    """Boot an engine with random weights and time refits of it.

    Every round times each strategy once, in the same order and on the same tensors, with a new policy per round. After
    each run, the bytes of every rank are compared with those of other runs with the same policy.

    Raises:
        UnsupportedEngineError: The engine, shape, folder or strategy is unknown, or the engine cannot be refitted.
    """
    with tempfile.TemporaryDirectory(prefix="fp8refit-bench-") as scratch:
        on_progress("boot", 0, 1)
        engine = open_bench_engine(
            config.engine, folder_of(config.model, Path(scratch)), tp=config.tp, online=config.online
        )
        try:
            return _Bench(config, engine, on_progress).run()
        finally:
            engine.close()


class _Bench:
    """One run."""

    def __init__(self, config: RefitBenchConfig, engine: BenchEngine, on_progress: Progress) -> None:
        self._config, self._engine, self._on_progress = config, engine, on_progress
        self._others = _chosen(engine.strategies, config.strategies)
        self._refitter = Refitter(engine.candidate)
        self._layout = self._refitter.layout()
        has_gpu = torch.cuda.is_available() and self._layout.device.startswith("cuda")
        self._device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        self._expected: dict[int, list[str]] = {}
        """Fingerprints of policies written by fp8refit."""

    def run(self) -> RefitBenchResult:
        config = self._config
        self._on_progress("make a policy", 0, 1)
        policy = policies.allocate(self._layout, self._device)
        first_ms = self._time_ours(policies.fill(policy, config.seed))[0]
        for _ in range(config.warm_up):
            self._time_ours(policy)
        is_repeatable = True
        ours: list[tuple[float, RefitReport, int]] = []
        others: dict[str, list[_Run]] = {strategy.name: [] for strategy in self._others}
        copy_rates = []
        num_steps, done = config.rounds * (1 + len(self._others)), 0
        for round_ in range(config.rounds):
            seed = config.seed + 1 + round_ % 2
            policies.fill(policy, seed)
            copy_rates.append(copy_gb_per_s(self._device))
            for strategy in self._others:
                self._on_progress(strategy.name, done, num_steps)
                others[strategy.name].append(self._time_other(strategy, policy, seed))
                done += 1
            # Tensors replaced by other strategies are read again here, with a policy that is not timed.
            self._refitter.refit(policies.fill(policy, seed + 2))
            policies.fill(policy, seed)
            self._on_progress(OURS, done, num_steps)
            ours.append(self._time_ours(policy))
            done += 1
            found = self._refitter.fingerprints()
            is_repeatable &= self._expected.setdefault(seed, found) == found
        self._on_progress("done", num_steps, num_steps)
        return self._result(first_ms, ours, others, copy_rates, is_repeatable=is_repeatable)

    def _time_ours(self, policy: Mapping[str, Tensor]) -> tuple[float, RefitReport, int]:
        """Return milliseconds from call to return, the report, and the peak of additional memory."""
        wall_s, extra_bytes, report = time_call(lambda: self._refitter.refit(dict(policy)), self._device)
        return 1e3 * wall_s, report, max(extra_bytes, report.extra_bytes)

    def _time_other(self, strategy: Strategy, policy: Mapping[str, Tensor], seed: int) -> "_Run":
        strategy.prepare(policy)
        wall_s, extra_bytes, _ = time_call(lambda: strategy.update(policy), self._device)
        fingerprints = tuple(self._refitter.fingerprints())
        return _Run(seed=seed, wall_ms=1e3 * wall_s, extra_bytes=extra_bytes, fingerprints=fingerprints)

    def _result(
        self,
        first_ms: float,
        ours: Sequence[tuple[float, RefitReport, int]],
        others: Mapping[str, Sequence["_Run"]],
        copy_rates: Sequence[float],
        *,
        is_repeatable: bool,
    ) -> RefitBenchResult:
        reports = [report for _, report, _ in ours]
        last, copy_rate = reports[-1], statistics.median(copy_rates)
        phases = {
            name: Percentiles.of([1e3 * report.phases_s.get(name, 0.0) for report in reports]) for name in last.phases_s
        }
        device_ms = [1e3 * report.fill_device_s for report in reports if report.fill_device_s is not None]
        fill_ms = Percentiles.of(device_ms) if device_ms else None
        host_ms = [wall - 1e3 * (report.fill_device_s or 0.0) for wall, report, _ in ours]
        num_bytes = max(rank.bytes_read + rank.bytes_written for rank in last.ranks)
        fill_s = (fill_ms or phases["fill"]).median / 1e3
        return RefitBenchResult(
            config=self._config,
            command=self.command,
            gpu=gpu_name(self._device),
            **stamp(),
            versions={**versions_of(), **self._layout.versions},
            settings={name: str(value) for name, value in self._engine.settings.items()},
            kernels=Counter(
                f"{slot.kernel} {slot.format.scale_format}" if slot.format is not None else slot.dtype
                for slot in self._layout.slots
            ),
            num_tensors=last.num_tensors,
            bytes_read=last.bytes_read,
            bytes_written=last.bytes_written,
            first_ms=first_ms,
            wall_ms=Percentiles.of([wall for wall, _, _ in ours]),
            phases_ms=phases,
            plan_fill_verify_ms=Percentiles.of(
                [1e3 * sum(report.phases_s[name] for name in ("plan", "fill", "verify")) for report in reports]
            ),
            fill_device_ms=fill_ms,
            host_ms=Percentiles.of(host_ms),
            peak_extra_bytes=max(extra_bytes for _, _, extra_bytes in ours),
            copy_gb_per_s=copy_rate,
            fill_over_copy=fill_s * copy_rate * 1e9 / num_bytes,
            is_repeatable=is_repeatable,
            others=tuple(self._other_result(strategy, others[strategy.name]) for strategy in self._others),
        )

    @property
    def command(self) -> str:
        """The command that repeats the measurement."""
        config = self._config
        parts = ["fp8refit bench refit", f"--engine {config.engine}", f"--model {config.model}", f"--tp {config.tp}"]
        parts += ["--online"] if config.online else []
        parts += [f"--rounds {config.rounds}", f"--warm-up {config.warm_up}", f"--seed {config.seed}"]
        if config.strategies is not None:
            parts.append(f"--strategies {','.join(config.strategies) or 'none'!r}")
        return " ".join(parts)

    def _other_result(self, strategy: Strategy, runs: Sequence["_Run"]) -> StrategyResult:
        first = {run.seed: run.fingerprints for run in reversed(runs)}
        return StrategyResult(
            name=strategy.name,
            summary=strategy.summary,
            wall_ms=Percentiles.of([run.wall_ms for run in runs]),
            peak_extra_bytes=max(run.extra_bytes for run in runs),
            is_repeatable=all(run.fingerprints == first[run.seed] for run in runs),
            equals_ours=all(list(run.fingerprints) == self._expected[run.seed] for run in runs),
        )


class _Run(BaseModel, frozen=True):
    seed: int
    wall_ms: float
    extra_bytes: int
    fingerprints: tuple[str, ...]


def _chosen(strategies: Sequence[Strategy], names: Sequence[str] | None) -> list[Strategy]:
    """Return the strategies that were asked for.

    Raises:
        UnsupportedEngineError: One does not exist.
    """
    known = {strategy.name: strategy for strategy in strategies}
    absent = [name for name in names or () if name not in known]
    if absent:
        raise UnsupportedEngineError(
            f"this engine has no strategy {', '.join(absent)}; it has {', '.join(known) or 'none'}"
        )
    return [known[name] for name in (known if names is None else names)]
