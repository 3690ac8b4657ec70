"""Keeps requests from an engine during a refit, and words the refusals."""

import asyncio
from collections.abc import Callable

from fp8refit.errors import CacheFlushError, EngineBusyError, EngineDirtyError


def refusal(reason: str) -> EngineDirtyError:
    """The error for a refused request."""
    return EngineDirtyError(f"this engine refuses requests: {reason}")


def unfinished(engine: str) -> EngineBusyError:
    """The error for a synchronous engine with unfinished requests."""
    return EngineBusyError(
        f"the engine has unfinished requests; a synchronous {engine} cannot drain them without taking their outputs: finish or "
        "abort them, then refit"
    )


def still_running(count: int, timeout_s: float) -> EngineBusyError:
    """The error for an asynchronous engine whose requests did not finish in time."""
    return EngineBusyError(
        f"{count} request(s) did not finish within {timeout_s:g} s and keep running. Refit later, wait longer (timeout_s), or "
        'choose in_flight="abort" or "keep"'
    )


def cache_kept(cache: str, holders: str, *, said: str = "") -> CacheFlushError:
    """The error for an engine that did not drop the old policy's caches.

    Args:
        cache: Which engine kept which cache.
        holders: What may hold blocks of it.
        said: The engine's own message.
    """
    return CacheFlushError(
        f"{cache} because blocks of it are still held; nothing was written, and the old policy is served. Finish or abort what "
        f"holds them ({holders}), then refit again{f' ({said})' if said else ''}"
    )


class Gate:
    """Holds requests to one asynchronous engine until a refit ends, or refuses them.

    An adapter replaces the engine's entry points and awaits `pass_through` in them.

    Args:
        refuse_with: Makes the error that refused requests raise, from the reason.
    """

    def __init__(self, refuse_with: Callable[[str], Exception] = refusal) -> None:
        self._refuse_with = refuse_with
        self._may_decide = asyncio.Event()
        self.reason: str | None = None

    def close(self) -> None:
        """Make requests wait."""
        self.reason = None
        self._may_decide.clear()

    def refuse(self, reason: str) -> None:
        """Refuse waiting and new requests."""
        self.reason = reason
        self._may_decide.set()

    def open(self) -> None:
        """Admit waiting and new requests."""
        self.reason = None
        self._may_decide.set()

    async def until_decided(self) -> None:
        """Wait until the current refit ends, however it ends."""
        await self._may_decide.wait()

    async def pass_through(self) -> None:
        """Wait until the gate is open.

        Raises:
            Exception: Requests are refused; by default an `EngineDirtyError`.
        """
        await self.until_decided()
        if self.reason is not None:
            raise self._refuse_with(self.reason)
