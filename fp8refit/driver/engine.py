"""What an adapter implements.

The control plane is `Engine`: one object per live engine, on the driver's side. The data plane is `fp8refit.ranks.ranks.Ranks`:
prepare, write and commit on every rank of that engine.
"""

from typing import Any, ClassVar, Protocol

from fp8refit.ranks.ranks import Ranks
from fp8refit.remote.servers.control import ControlPlane


class Driver(ControlPlane, Protocol):
    """Drives one engine. For a synchronous engine the methods never suspend, so they need no event loop."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the engine is driven from an event loop, so that only `await refitter.refit_async(...)` can refit
        it.
        """
        ...

    async def check_ready(self) -> None:
        """Check that weights may be written now.

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
    """A kind of engine, named by an entry point. Each instance is attached to one live engine.

    If the engine also runs as a server, the class attribute `server` is its `http_client.Server`.
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
    """Implements `Engine` with a driver that is chosen on attachment. Adapters inherit from it.

    Args:
        driver: Its methods become the engine's.
        ranks: The engine's ranks.
    """

    name: ClassVar[str]
    """Also the name of the engine's package."""
    server: ClassVar[type]
    """The engine's `http_client.Server`."""

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """Whether `candidate`, or a class that it inherits from, is of the engine's package, or its server."""
        packages = {base.__module__.split(".")[0] for base in type(candidate).__mro__}
        return cls.name in packages or isinstance(candidate, cls.server)

    def __init__(self, driver: Driver, ranks: Ranks) -> None:
        self._driver = driver
        self.ranks = ranks
        self.check_ready, self.tokenize = driver.check_ready, driver.tokenize
        self.pause, self.resume, self.refuse = driver.pause, driver.resume, driver.refuse
        self.flush_caches, self.publish_version = driver.flush_caches, driver.publish_version

    @property
    def is_asynchronous(self) -> bool:
        """Whether it needs an event loop. Not constant: the driver of a server joins a running event loop if there is one."""
        return self._driver.is_asynchronous
