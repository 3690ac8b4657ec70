"""What an adapter implements.

The control plane is `Engine`: one object per live engine, on the driver's side. The data plane is `fp8refit.ranks.ranks.Ranks`:
prepare, write and commit on every rank of that engine.
"""

from typing import Any, Protocol

from fp8refit.ranks.ranks import Ranks
from fp8refit.remote.servers.control import ControlPlane


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
