"""What adapters have in common whose engine has a driver: the control plane of `fp8refit.engine.Engine` is the driver's."""

from collections.abc import Sequence
from typing import Protocol

from fp8refit.config import RefitConfig
from fp8refit.control import ControlPlane
from fp8refit.engine import Ranks


class Driver(ControlPlane, Protocol):
    """Drives one engine. The members mean what they mean in `fp8refit.engine.Engine`."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether it needs an event loop."""
        ...

    async def check_ready(self) -> None:
        """Refuse to begin."""
        ...


class DrivenEngine:
    """The control plane of `fp8refit.engine.Engine`, for adapters to inherit.

    Args:
        driver: Of the engine.
        ranks: Of the engine.
    """

    def __init__(self, driver: Driver, ranks: Ranks) -> None:
        self._driver = driver
        self.ranks = ranks

    @property
    def is_asynchronous(self) -> bool:
        """See `fp8refit.engine.Engine`."""
        return self._driver.is_asynchronous

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.check_ready()

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`."""
        return await self._driver.pause(config)

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.resume()

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.refuse(reason)

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.flush_caches()

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.engine.Engine`."""
        return await self._driver.tokenize(prompts)

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._driver.publish_version(version)
