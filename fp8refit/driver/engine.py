"""What an adapter implements.

The control plane is `Engine`: one object per live engine, on the driver's side. The data plane is `Ranks`: prepare, write
and commit on every rank of that engine.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.live.layout import EngineLayout
from fp8refit.remote.servers.control import ControlPlane
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


class Driver(ControlPlane, Protocol):
    """Drives one engine: the methods of a synchronous one never suspend, so that they run without an event loop."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the engine is driven from an event loop, and so refitted by `await refitter.refit_async(...)` alone."""
        ...

    async def check_ready(self) -> None:
        """Refuse to begin while weights may not be written.

        Raises:
            EngineBusyError: Requests are unfinished, and the engine cannot wait for them.
            EngineAsleepError: The weights are not mapped.
        """
        ...


class Engine(Driver, Protocol):
    """One live engine: its driver and its ranks."""

    name: str
    ranks: Ranks


class Adapter(Engine, Protocol):
    """What an entry point names: a kind of engine, each instance of which is attached to a live one.

    An adapter whose engine has servers of its own says so by a class attribute `server`, an `http_client.Server`.
    """

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """Whether `candidate` is this adapter's kind of engine. Must not import the engine."""
        ...

    def __init__(self, candidate: Any) -> None:
        """Attach to `candidate`.

        Raises:
            UnsupportedEngineError: It is of the right kind, but cannot be refitted.
        """
        ...

    @classmethod
    def boot(cls, model: str) -> Any:
        """Start an engine of this kind, in this process, on a model folder; for the command line.

        Raises:
            UnsupportedEngineError: The engine is not installed.
        """
        ...


class DelegatingEngine:
    """Implements `Engine` with a driver that is chosen when it is attached. For adapters to inherit.

    Args:
        driver: Its methods become those of the engine.
        ranks: Of the engine.
    """

    def __init__(self, driver: Driver, ranks: Ranks) -> None:
        self._driver = driver
        self.ranks = ranks
        self.check_ready, self.tokenize = driver.check_ready, driver.tokenize
        self.pause, self.resume, self.refuse = driver.pause, driver.resume, driver.refuse
        self.flush_caches, self.publish_version = driver.flush_caches, driver.publish_version

    @property
    def is_asynchronous(self) -> bool:
        """See `Driver`. That of a server takes part in a loop that runs, so this is asked each time."""
        return self._driver.is_asynchronous
