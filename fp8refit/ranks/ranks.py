"""The data plane of an engine, as its driver sees it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.live.layout import EngineLayout
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import Source


class Ranks(Protocol):
    """Every rank of one engine, as one. `prepare` may be repeated; `write` follows a `prepare` that returned.

    A driver that fails at a step hands its error to the next one as its `driver_error`, so that the drivers of the other ranks,
    if each rank has one, hear of it there instead of waiting.
    """

    @property
    def version(self) -> int:
        """Policy version held; 0 is what the engine was booted with."""
        ...

    @property
    def is_dirty(self) -> bool:
        """Whether a write began and was not committed."""
        ...

    @property
    def drops_caches(self) -> bool:
        """Whether `write` has the engine drop its caches, once every rank can take what was prepared; nobody else need then."""
        ...

    async def prepare(
        self,
        make_source: Callable[[], Source],
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        driver_error: BaseException | None = None,
    ) -> None:
        """Judge names, shapes, dtypes, scales and readiness on every rank, and compile what is missing. Writes nothing.

        Where the ranks know the source's layout already, they may be asked together with the write: then that raises what they
        refuse, and nothing is written either.

        Args:
            make_source: Gives the policy; called only when every rank is ready.
            config: How to refit.
            kv: Which KV scales `write` sets once the weights are in place, measured or given.
            driver_error: Why the engine may not be refitted now; raised here, and by the drivers of the other ranks.

        Raises:
            InvalidSourceError: The source does not fit; names everything that is wrong with it.
            NonFiniteError: NaN or Inf, if they are looked for before writing.
            UnsupportedEngineError: The engine cannot be refitted, or its KV scales not be set; names every module and the
                setting that helps.
            InvalidCalibrationError: A calibration batch, or KV scales, that do not fit the engine.
            EngineAsleepError: The weights are not mapped.
            EngineLostError: A rank is gone.
        """
        ...

    async def write(self, *, driver_error: BaseException | None = None) -> Sequence[RankReport]:
        """Write what was prepared on every rank, and commit it there once it is whole on all; one report per rank.

        Args:
            driver_error: Why nothing may be written (caches that stayed); raised here, and by the drivers of the other ranks.

        Raises:
            NonFiniteError: NaN or Inf in the source. This and every later error leaves all ranks dirty.
            CalibrationError: NaN or Inf in the network, or no memory to measure it.
            RefitError: See `fp8refit.ranks.target.Target.finish`.
        """
        ...

    async def check_calibration(
        self, kv: KvOrder, config: RefitConfig, *, driver_error: BaseException | None = None
    ) -> None:
        """Check that KV scales can be set on every rank, while requests still run. Changes nothing.

        Args:
            kv: What to measure, or which scales to set.
            config: How.
            driver_error: Why not; raised here, and by the drivers of the other ranks.

        Raises:
            EngineDirtyError: No whole policy is served.
            RefitError: See `prepare`.
        """
        ...

    async def calibrate(
        self, kv: KvOrder, config: RefitConfig, *, driver_error: BaseException | None = None
    ) -> KvReport:
        """Set KV scales on every rank for the policy that is served, and say which.

        Args:
            kv: What to measure, or which scales to set.
            config: How.
            driver_error: Why nothing may be written; raised here, and by the drivers of the other ranks.

        Raises:
            EngineDirtyError: No whole policy is served.
            CalibrationError: NaN or Inf in the network, or no memory to measure it; nothing was written.
            RefitError: See `prepare`. An error after the first scale was written leaves all ranks dirty.
        """
        ...

    async def verify(self, make_source: Callable[[], Source], config: RefitConfig) -> Sequence[RankReport]:
        """Compare what every rank holds with what it would write of a policy; one report per rank. Changes nothing.

        Raises:
            RefitError: See `prepare`, and `fp8refit.ranks.target.Target.finish`.
        """
        ...

    async def abandon(self) -> None:
        """Let go of what was prepared."""
        ...

    async def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals of all ranks."""
        ...

    async def fingerprints(self) -> Sequence[str]:
        """A digest of the weights of each rank, in order of rank."""
        ...

    async def close(self) -> None:
        """Drop what is held beyond the engine itself."""
        ...
