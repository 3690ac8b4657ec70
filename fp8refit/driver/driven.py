"""What adapters have in common whose engine has a driver."""

from typing import Protocol

from fp8refit.driver.engine import Ranks
from fp8refit.remote.servers.control import ControlPlane


class Driver(ControlPlane, Protocol):
    """Drives one engine. The members mean what they mean in `fp8refit.driver.engine.Engine`."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether it needs an event loop."""
        ...

    async def check_ready(self) -> None:
        """Refuse to begin."""
        ...


class DrivenEngine:
    """The control plane of `fp8refit.driver.engine.Engine`, for adapters to inherit: its methods are the driver's own.

    Args:
        driver: Of the engine.
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
        """Whether the driver needs an event loop: that of a server takes part in one that runs."""
        return self._driver.is_asynchronous
