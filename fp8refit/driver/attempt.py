"""The timed steps of one refit. In the end the engine serves a whole policy or refuses requests."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from textwrap import shorten
from typing import TypeVar

from fp8refit.config import LORA, Job, KvOrder, RefitConfig
from fp8refit.driver.attach import AttachedEngine
from fp8refit.driver.engine import Engine
from fp8refit.errors import (
    WRITTEN_IN_PART,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    InvalidCalibrationError,
    InvalidOptionError,
    RefitError,
)
from fp8refit.fill.plan import is_any_of
from fp8refit.live.turn import IN_USE
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues, order_of
from fp8refit.remote.broadcast.broadcast import SendsAhead
from fp8refit.report import KvReport, PhaseClock, RefitReport, VerifyReport, longest_phases
from fp8refit.sources.renamed import Names, renamed, without_scales
from fp8refit.sources.source import Manifest, Source, StateDict, as_source
from fp8refit.transport.error_capture import ErrorCapture

logger = logging.getLogger(__name__)

T = TypeVar("T")
_WHY_IDLE = {
    "keep": "the engine has no such weight, or it was sent",
    "ignore": "no such name was sent, or the engine needs it",
}


class Attempt:
    """One refit or calibration.

    Args:
        engine: The engine.

    Attributes:
        version: Policy version before the engine was paused; None if it is not paused.
        is_written: Whether another policy was committed, as far as known.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._resumes = False
        self.version: int | None = None
        self.is_written = False

    async def refit(
        self,
        state_dict: StateDict,
        config: RefitConfig,
        names: Names | None,
        *,
        manifest: Manifest | None,
        calibration: Calibration | None,
        kv_scales: KvScaleValues | None,
        adapted: Callable[[Source], Source] | None = None,
    ) -> RefitReport:
        """Move the engine to a policy, or one of its adapters. See `fp8refit.Refitter.refit` and `refit_adapter`.

        Args:
            state_dict: See `Refitter.refit`, as the others.
            config: Its options.
            names: The engine's names for the trainer's.
            manifest: Of the state dict.
            calibration: What KV scales are measured on.
            kv_scales: KV scales.
            adapted: Makes an adapter's matrices of the source.
        """
        engine, ranks, clock = self._engine, self._engine.ranks, PhaseClock()
        with clock.phase("plan"):
            job = Job(config=config)
            with ErrorCapture() as unready:
                if calibration is not None or kv_scales is not None:
                    _check_scales_stay(config)
                    kv = await order_of(calibration, kv_scales, config.kv, engine.tokenize)
                    job = Job(config=config, kv=kv)
                await engine.check_ready()

            def make_source() -> Source:
                source = _source_of(state_dict, config, names, manifest)
                return source if adapted is None else adapted(source)

            drops_caches = await ranks.prepare(make_source, job, driver_error=unready.error)
        if isinstance(ranks, SendsAhead) and ranks.ahead_s:
            clock.move("plan", stage=ranks.ahead_s)
        self.version, num_interrupted = ranks.version, 0
        with ErrorCapture() as busy:
            with clock.phase("pause"):
                num_interrupted = await engine.pause(config)
            with clock.phase("flush"):
                if not drops_caches:
                    await engine.flush_caches()
        since_s = time.perf_counter() - clock.phases_s.get("flush", 0.0)
        try:
            with clock.phase("transfer"):
                written = await ranks.write(driver_error=busy.error)
        finally:
            del busy  # it and the error's traceback would keep each other alive
        clock.move("transfer", **longest_phases(written))
        self.is_written = True
        with clock.phase("resume"):
            await self.resume()
        report = RefitReport.of(
            written,
            version=ranks.version,
            engine=engine.name,
            phases_s=clock.phases_s,
            standstill_s=max(rank.still_s for rank in written) or time.perf_counter() - since_s,
            num_interrupted=num_interrupted,
        )
        kept = () if adapted is not None else tuple(name for name in report.kept if not name.startswith(LORA))
        report = report.model_copy(update={"kept": kept})
        logger.info("%s", report.summary())
        return report

    async def calibrate(self, calibration: Calibration, config: RefitConfig) -> KvReport:
        """Set KV scales for the served policy. See `fp8refit.Refitter.calibrate`."""
        engine, ranks = self._engine, self._engine.ranks
        job = Job(config=config, kv=KvOrder())
        with ErrorCapture() as unready:
            if ranks.is_dirty:
                raise EngineDirtyError("this engine's weights are incomplete; refit it before calibrating")
            _check_scales_stay(config)
            kv = await order_of(calibration, None, config.kv, engine.tokenize)
            if kv is None or not kv.token_ids:
                raise InvalidCalibrationError("calibration: no batch was given")
            job = Job(config=config, kv=kv)
            await engine.check_ready()
        await ranks.check_calibration(job, driver_error=unready.error)
        self.version = ranks.version
        with ErrorCapture() as busy:
            await engine.pause(config)
            await engine.flush_caches()
        try:
            report = await ranks.calibrate(job, driver_error=busy.error)
        finally:
            del busy  # it and the error's traceback would keep each other alive
        await self.resume()
        logger.info(
            "%d KV scales from %d tokens in %.1f ms", len(report.scales), report.num_tokens, report.seconds * 1e3
        )
        return report

    async def verify(
        self, state_dict: StateDict, config: RefitConfig, names: Names | None, *, manifest: Manifest | None
    ) -> VerifyReport:
        """Compare what the engine holds with a policy. See `fp8refit.Refitter.verify`."""
        ranks = self._engine.ranks
        await ranks.prepare(
            lambda: renamed(as_source(state_dict, manifest=manifest), names), Job(config=config, compares=True)
        )
        return VerifyReport.of(await ranks.write(), version=ranks.version, is_dirty=ranks.is_dirty)

    async def resume(self) -> None:
        """Serve the current policy."""
        self._resumes = True
        version = self._engine.ranks.version
        if self.is_written or version != self.version:
            await self._engine.publish_version(version)
        await self._engine.resume()
        self.version = None

    async def fail(self, error: BaseException) -> None:
        """After an error, serve the old or the new policy if it is whole; otherwise refuse requests.

        Raises:
            BaseException: The engine could not resume.
        """
        engine, ranks = self._engine, self._engine.ranks
        if isinstance(error, EngineLostError):
            await engine.refuse(f"the engine is lost ({_describe(error)})")
        elif self.version is not None and ranks.is_dirty:
            if not isinstance(error, RefitError):  # ours say so themselves
                error.add_note(f"fp8refit: {WRITTEN_IN_PART}")
            await engine.refuse(
                f"the last refit failed part way ({_describe(error)}); the next one that succeeds heals it"
            )
        elif self.version is not None:
            # Nothing was written; or the ranks committed, and the driver did not learn of it or did not resume.
            with ErrorCapture() as stuck:
                if self._resumes and isinstance(error, GeneratorExit):
                    raise error  # nothing can be awaited any more
                await ranks.abandon()
                await self.resume()
            if stuck.error is not None:
                await engine.refuse(
                    f"version {ranks.version} is in place, but the engine did not resume ({_describe(stuck.error)}); "
                    "refit again"
                )
                self.version = None
                raise stuck.take()
        self.version = None


def _source_of(state_dict: StateDict, config: RefitConfig, names: Names | None, manifest: Manifest | None) -> Source:
    source = renamed(as_source(state_dict, manifest=manifest), names)
    return without_scales(source, is_any_of(config.ignore)) if config.in_flight == "continue" else source


def _check_scales_stay(config: RefitConfig) -> None:
    if config.in_flight == "continue":
        raise InvalidOptionError(
            'in_flight="continue" goes on with KV of the old scales, so new ones cannot be set; choose "keep", which computes '
            "the KV anew"
        )


async def take_turn(attached: AttachedEngine, steps: Callable[[Attempt], Awaitable[T]]) -> T:
    """Run the steps of one refit, unless another one is running. Afterwards the engine serves or refuses requests.

    An interrupt may hit between any two lines. So the necessary clean-up is tried twice, in case the first attempt is
    interrupted.

    Raises:
        EngineBusyError: Another refit is running.
        BaseException: Whatever the steps raise.
    """
    attempt, turn = Attempt(attached.engine), attached.turns
    try:
        try:
            if not turn.take(attempt):
                raise EngineBusyError(IN_USE)
            with ErrorCapture() as failed:
                return await steps(attempt)
            assert failed.error is not None, "it failed"
            await attempt.fail(failed.error)
            raise failed.take()
        except BaseException as error:
            if attempt.version is not None:
                await attempt.fail(error)
            raise
        finally:
            turn.end(attempt)
    finally:
        turn.end(attempt)


def warn_of_idle(config: RefitConfig, names: Names | None, report: RefitReport, idle: set[str]) -> None:
    """Warn, when a plan is compiled, of patterns that matched nothing, unless they are in `idle`; add them to it."""
    if not report.is_first:
        return
    named = [("ignore", pattern, report.ignored) for pattern in config.ignore]
    if all(map(is_any_of(config.keep), report.kept)):  # else one was kept under another of its names
        named += [("keep", pattern, report.kept) for pattern in config.keep if pattern != f"{LORA}*"]
    unmet = [(f'{what}="{pattern}"', _WHY_IDLE[what]) for what, pattern, some in named if not _match(pattern, some)]
    unmet += [(f"rename={old}", why) for old, why in (names.idle if names is not None else ())]
    for said, why in unmet:
        if said not in idle:
            idle.add(said)
            logger.warning("%s matches nothing: %s", said, why)


def _match(pattern: str, names: Iterable[str]) -> bool:
    return any(map(is_any_of([pattern]), names))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 240)}"
