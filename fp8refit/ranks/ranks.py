"""The data plane of an engine, as its driver sees it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from fp8refit.config import Job
from fp8refit.live.layout import EngineLayout
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import Source


class Ranks(Protocol):
    """All ranks of one engine. `prepare` may be repeated; `write` follows a `prepare` that returned.

    If a driver fails at a step, it passes its error to the next one as `driver_error`. If each rank has its own driver,
    the other drivers then raise it too, instead of waiting.
    """

    @property
    def version(self) -> int:
        """The current policy version; 0 is what the engine was booted with."""
        ...

    @property
    def is_dirty(self) -> bool:
        """Whether a write began and was not committed."""
        ...

    async def prepare(
        self, make_source: Callable[[], Source], job: Job, *, driver_error: BaseException | None = None
    ) -> bool:
        """Check names, shapes, dtypes, scales and readiness on every rank, and compile what is missing. Writes nothing.

        If the ranks know the source's layout, the check may be postponed to `write`, which then raises its errors, with
        nothing written.

        Args:
            make_source: Makes the policy's source; called only when every rank is ready.
            job: What `write` does.
            driver_error: Why the engine may not be refitted now; raised here, and by the drivers of the other ranks.

        Returns:
            Whether `write` itself makes the engine drop its caches, so that the caller need not.

        Raises:
            InvalidSourceError: The source does not fit; lists every problem.
            NonFiniteError: NaN or Inf, with `validate="strict"`.
            UnsupportedEngineError: The engine, or its KV scales, cannot be refitted; names every module and the setting
                that helps. Or a broadcast is asked to compare.
            InvalidCalibrationError: The calibration batch or KV scales do not fit the engine.
            EngineAsleepError: The weights are not mapped.
            EngineLostError: A rank is gone.
        """
        ...

    async def write(self, *, driver_error: BaseException | None = None) -> Sequence[RankReport]:
        """Write what was prepared on every rank, and commit it once it is whole on all; or compare it, and change nothing.
        Returns one report per rank.

        Args:
            driver_error: Why nothing may be written, such as caches that could not be dropped; raised here, and by the
                drivers of the other ranks.

        Raises:
            NonFiniteError: NaN or Inf in the source. This and every later error leaves all ranks dirty.
            CalibrationError: NaN or Inf in the network, or not enough memory to measure it.
            RefitError: See `fp8refit.ranks.target.Target.finish`.
        """
        ...

    async def check_calibration(self, job: Job, *, driver_error: BaseException | None = None) -> None:
        """Check that KV scales can be set on every rank, while requests still run. Changes nothing.

        Args:
            job: What to measure.
            driver_error: Why not; raised here, and by the drivers of the other ranks.

        Raises:
            EngineDirtyError: No whole policy is served.
            RefitError: See `prepare`.
        """
        ...

    async def calibrate(self, job: Job, *, driver_error: BaseException | None = None) -> KvReport:
        """Set KV scales on every rank for the served policy. Returns which.

        Args:
            job: What to measure.
            driver_error: Why nothing may be written; raised here, and by the drivers of the other ranks.

        Raises:
            EngineDirtyError: No whole policy is served.
            CalibrationError: NaN or Inf in the network, or not enough memory to measure it; nothing was written.
            RefitError: See `prepare`. An error after the first scale was written leaves all ranks dirty.
        """
        ...

    async def abandon(self) -> None:
        """Drop what was prepared."""
        ...

    async def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals of all ranks."""
        ...

    async def fingerprints(self) -> Sequence[str]:
        """A digest of each rank's weights, in rank order."""
        ...

    async def close(self) -> None:
        """Release everything except the engine itself."""
        ...
