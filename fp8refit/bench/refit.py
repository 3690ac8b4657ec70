"""Times refits of one live engine, and every other way to give it weights, round by round on the same tensors."""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from fp8refit.bench import policies
from fp8refit.bench.clock import Count, Percentiles, copy_gb_per_s, time_call
from fp8refit.bench.engine import BenchEngine, Loads, Place, RefitBoot, Strategy, open_bench_engine
from fp8refit.bench.result import BenchResult, gpu_name, stamp, versions_of
from fp8refit.bench.server import BenchServer, Clients
from fp8refit.bench.shapes import CHECKPOINTS, folder_of
from fp8refit.bench.sources import Sources
from fp8refit.config import InFlight, Options
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import UnsupportedEngineError
from fp8refit.report import RefitReport

OURS = "fp8refit"
NUM_TOKENS = 64
"""Of every answer to a client."""
_PROMPT = 24
"""Tokens of the shortest prompt; others are up to twice as long."""
_NUM_UNTIMED = 2
_REST_S = 0.1
"""Before each timed run, in which clients are answered."""


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
    quantization: str = "fp8_per_block"
    """How it does, in its own words; or one of `CHECKPOINTS`, which no engine makes of BF16 weights."""
    rounds: Count = 7
    """Number of timed refits, and of timed runs of every other strategy."""
    warm_up: int = Field(default=2, ge=0, le=1 << 24)
    """Untimed refits after the first."""
    strategies: tuple[str, ...] | None = None
    """Which other ways to time; None for all of the engine's own, empty for none."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    place: Place | None = None
    """Where the engine runs; None for the adapter's choice."""
    gpu: int | None = Field(default=None, ge=0)
    """The GPU that holds the policies; None for the current one, which is the engine's."""
    clients: int = Field(default=0, ge=0, le=1 << 10)
    """How many clients keep a server busy meanwhile."""
    in_flight: InFlight = "wait"
    """What becomes of their requests, see `RefitConfig.in_flight`."""

    @property
    def asked(self) -> str | None:
        """See `RefitBoot.quantization`."""
        return self.quantization if self.online or self.quantization in CHECKPOINTS else None

    @property
    def boot(self) -> str:
        """The engine, and how it was booted."""
        return " ".join([self.engine, *self.flags])

    @property
    def flags(self) -> list[str]:
        """The options of the command line that say how it was booted, and where the policies are."""
        default = type(self).model_fields["quantization"].default
        how = [] if self.asked in (None, default) else [f"--quantization {self.quantization}"]
        place = [] if self.place is None else [f"--place {self.place}"]
        gpu = [] if self.gpu is None else [f"--gpu {self.gpu}"]
        return [*(["--online"] if self.online else []), *how, *place, *gpu]


class StrategyResult(BaseModel, frozen=True):
    """The result of one way to give the engine new weights."""

    name: str
    summary: str
    wall_ms: Percentiles
    """Time from call to return, including the cache flush; the engine is then ready to serve."""
    first_ms: float | None = None
    """The first time, if it was not counted."""
    phases_ms: dict[str, float] = {}
    """Medians of what a report says, if there is one."""
    standstill_ms: float | None = None
    """The median of how long the engine ran no request, if there is a report."""
    peak_extra_bytes: int
    """Additional GPU memory in the trainer's process, which may include ranks."""
    is_repeatable: bool
    """Whether every run with the same policy left the same bytes on every rank."""
    equals_ours: bool
    """Whether those are the bytes that fp8refit writes."""
    loads: Loads = Loads.POLICY
    """Whose bytes they should be."""

    @property
    def whose_bytes(self) -> str:
        """Whose bytes the engine ended with, for tables."""
        if self.loads is Loads.NOTHING:
            return ""
        if self.equals_ours:
            return "fp8refit's"
        return "its own" if self.is_repeatable else "NOT the same every time"


class ClientsResult(BaseModel, frozen=True):
    """What clients of a server noticed."""

    requests: int
    failed: int
    """Requests that were refused or answered with too few tokens."""


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
    clients: ClientsResult | None = None

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

    def other(self, name: str) -> StrategyResult:
        """Return the result of a strategy.

        Raises:
            KeyError: It was not timed.
        """
        return {other.name: other for other in self.others}[name]


Progress = Callable[[str, int, int], None]
"""Takes the current step, steps done, and steps in total."""


def run_refit_bench(config: RefitBenchConfig, *, on_progress: Progress = lambda *_: None) -> RefitBenchResult:
    """Boot an engine with random weights and time refits of it.

    Every round times each strategy once, in the same order and on the same tensors, with a new policy per round. After
    each run, the bytes of every rank are compared with those of other runs with the same policy.

    Raises:
        UnsupportedEngineError: The engine, shape, folder or strategy is unknown, or the engine cannot be booted like that or
            refitted.
    """
    if config.clients and config.place is not Place.SERVER:
        raise UnsupportedEngineError("clients need a server; add --place server")
    with tempfile.TemporaryDirectory(prefix="fp8refit-bench-") as scratch:
        on_progress("boot", 0, 1)
        model = folder_of(config.model, Path(scratch))
        wanted = RefitBoot(model=model, tp=config.tp, quantization=config.asked, place=config.place)
        engine = open_bench_engine(config.engine, wanted)
        with ExitStack() as stack:
            stack.callback(engine.close)
            return stack.enter_context(closing(_Bench(config, engine, on_progress))).run()


class _Bench:
    """One run."""

    def __init__(self, config: RefitBenchConfig, engine: BenchEngine, on_progress: Progress) -> None:
        self._config, self._engine, self._on_progress = config, engine, on_progress
        options: Options = {"in_flight": config.in_flight}
        self._refitter = Refitter(engine.candidate, **options)
        self._layout = self._refitter.layout()
        self._device = self._where()
        on_progress("make a policy", 0, 1)
        self._policy = policies.allocate(self._layout, self._device)
        self._sources = Sources(engine, self._refitter, options, self._device)
        self._others = _chosen([*engine.strategies, *self._sources.ways(self._policy)], config.strategies)
        self._expected: dict[int, list[str]] = {}
        """Fingerprints of policies written by fp8refit."""
        self._firsts_ms: dict[str, float] = {}
        """The first time of each way that is warmed up."""

    def _where(self) -> torch.device:
        """Return the device that holds the policies, and make it the current one."""
        if not (torch.cuda.is_available() and self._layout.device.startswith("cuda")):
            return torch.device("cpu")
        gpu = torch.cuda.current_device() if self._config.gpu is None else self._config.gpu
        if gpu >= torch.cuda.device_count():
            raise UnsupportedEngineError(f"there is no GPU {gpu}; there are {torch.cuda.device_count()}")
        torch.cuda.set_device(gpu)
        return torch.device("cuda", gpu)

    def close(self) -> None:
        """Leave what was joined."""
        self._sources.close()
        self._refitter.close()

    def run(self) -> RefitBenchResult:
        config, policy = self._config, self._policy
        first_ms = self._time_ours(policies.fill(policy, config.seed))[0]
        for _ in range(config.warm_up):
            self._time_ours(policy)
        self._firsts_ms = {each.name: self._warm_up(each) for each in self._others if each.is_on_request}
        is_repeatable = True
        ours: list[tuple[float, RefitReport, int]] = []
        others: dict[str, list[_Run]] = {strategy.name: [] for strategy in self._others}
        copy_rates = []
        num_steps, done = config.rounds * (1 + len(self._others)), 0
        with self._clients() as clients:
            for round_ in range(config.rounds):
                seed = config.seed + 1 + round_ % 2
                policies.fill(policy, seed)
                copy_rates.append(copy_gb_per_s(self._device))
                for strategy in self._others:
                    self._on_progress(strategy.name, done, num_steps)
                    others[strategy.name].append(self._time_other(strategy, seed))
                    done += 1
                # Other ways replace tensors, and memory is recognized when it comes again: what that takes is not timed.
                for _ in range(_NUM_UNTIMED):
                    with _another(policy):
                        self._refitter.refit(policy)
                self._on_progress(OURS, done, num_steps)
                self._rest()
                ours.append(self._time_ours(policy))
                done += 1
                found = self._refitter.fingerprints()
                is_repeatable &= self._expected.setdefault(seed, found) == found
        self._on_progress("done", num_steps, num_steps)
        answers = None if clients is None else clients.answers
        return self._result(first_ms, ours, others, copy_rates, answers, is_repeatable=is_repeatable)

    def _clients(self) -> AbstractContextManager[Clients[bool] | None]:
        """Return clients that keep a server busy, with prompts of several lengths."""
        server = self._engine
        if not self._config.clients:
            return nullcontext()
        if not isinstance(server, BenchServer):
            raise UnsupportedEngineError(f"the server of {self._config.engine} takes no clients; leave out --clients")

        def ask(number: int) -> bool:
            length = _PROMPT + number % _PROMPT
            return server.complete([100 + (31 * number + 7 * place) % 900 for place in range(length)], NUM_TOKENS)

        return Clients(ask, self._config.clients)

    def _rest(self) -> None:
        if self._config.clients:
            time.sleep(_REST_S)

    def _warm_up(self, strategy: Strategy) -> float:
        """Compile what a way needs, and return the milliseconds of its first time."""
        milliseconds = []
        try:
            for place in range(1 + self._config.warm_up):
                with nullcontext() if place % 2 else _another(self._policy):
                    milliseconds.append(self._run_other(strategy)[0])
        finally:
            strategy.undo()
        return milliseconds[0]

    def _time_ours(self, policy: Mapping[str, Tensor]) -> tuple[float, RefitReport, int]:
        """Return milliseconds from call to return, the report, and the peak of additional memory."""
        wall_s, extra_bytes, report = time_call(lambda: self._refitter.refit(dict(policy)), self._device)
        return 1e3 * wall_s, report, max(extra_bytes, report.extra_bytes)

    def _time_other(self, strategy: Strategy, seed: int) -> "_Run":
        try:
            for place in range(strategy.num_untimed):  # each differs from the one before, and so does what is timed
                with _another(self._policy) if place % 2 == (strategy.num_untimed - 1) % 2 else nullcontext():
                    self._run_other(strategy)
            self._rest()
            wall_ms, extra_bytes, report = self._run_other(strategy)
        finally:
            strategy.undo()
        fingerprints = tuple(self._refitter.fingerprints())
        told = report if isinstance(report, RefitReport) else None
        extra_bytes = max(extra_bytes, told.extra_bytes if told is not None else 0)
        return _Run(seed=seed, wall_ms=wall_ms, extra_bytes=extra_bytes, fingerprints=fingerprints, report=told)

    def _run_other(self, strategy: Strategy) -> tuple[float, int, object]:
        """Return milliseconds from call to return, the peak of additional memory, and what it returned."""
        strategy.prepare(self._policy)
        wall_s, extra_bytes, found = time_call(lambda: strategy.update(self._policy), self._device)
        return 1e3 * wall_s, extra_bytes, found

    def _result(
        self,
        first_ms: float,
        ours: Sequence[tuple[float, RefitReport, int]],
        others: Mapping[str, Sequence["_Run"]],
        copy_rates: Sequence[float],
        answers: Sequence[bool] | None,
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
            clients=None if answers is None else ClientsResult(requests=len(answers), failed=answers.count(False)),
        )

    @property
    def command(self) -> str:
        """The command that repeats the measurement."""
        config = self._config
        parts = ["fp8refit bench refit", f"--engine {config.engine}", f"--model {config.model}", f"--tp {config.tp}"]
        parts += config.flags
        parts += [f"--clients {config.clients}"] if config.clients else []
        parts += [f"--in-flight {config.in_flight}"] if config.in_flight != "wait" else []
        parts += [f"--rounds {config.rounds}", f"--warm-up {config.warm_up}", f"--seed {config.seed}"]
        if config.strategies is not None:
            parts.append(f"--strategies {','.join(config.strategies) or 'none'!r}")
        return " ".join(parts)

    def _other_result(self, strategy: Strategy, runs: Sequence["_Run"]) -> StrategyResult:
        first = {run.seed: run.fingerprints for run in reversed(runs)}
        reports = [run.report for run in runs if run.report is not None]
        return StrategyResult(
            name=strategy.name,
            summary=strategy.summary,
            wall_ms=Percentiles.of([run.wall_ms for run in runs]),
            first_ms=self._firsts_ms.get(strategy.name),
            phases_ms={
                name: 1e3 * statistics.median(report.phases_s.get(name, 0.0) for report in reports)
                for name in (reports[-1].phases_s if reports else ())
            },
            standstill_ms=1e3 * statistics.median(report.standstill_s for report in reports) if reports else None,
            peak_extra_bytes=max(run.extra_bytes for run in runs),
            is_repeatable=strategy.loads is Loads.NOTHING or all(run.fingerprints == first[run.seed] for run in runs),
            loads=strategy.loads,
            equals_ours=all(list(run.fingerprints) == self._expected[run.seed] for run in runs),
        )


class _Run(BaseModel, frozen=True):
    seed: int
    wall_ms: float
    extra_bytes: int
    fingerprints: tuple[str, ...]
    report: RefitReport | None


@contextmanager
def _another(policy: Mapping[str, Tensor]) -> Iterator[None]:
    """Make it another policy for a while: the one of opposite sign, which takes no memory and no time."""
    tensors = list(policy.values())
    torch._foreach_neg_(tensors)
    try:
        yield
    finally:
        torch._foreach_neg_(tensors)


def _chosen(strategies: Sequence[Strategy], names: Sequence[str] | None) -> list[Strategy]:
    """Return the strategies that were asked for.

    Raises:
        UnsupportedEngineError: One does not exist.
    """
    if names is None:
        return [strategy for strategy in strategies if not strategy.is_on_request]
    known = {strategy.name: strategy for strategy in strategies}
    absent = [name for name in names if name not in known]
    if absent:
        raise UnsupportedEngineError(f"this engine has no strategy {', '.join(absent)}; it has {', '.join(known)}")
    return [known[name] for name in names]
