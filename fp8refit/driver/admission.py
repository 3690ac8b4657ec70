"""How requests are kept from an engine while it is refitted, and in which words they are refused."""

import asyncio
from collections.abc import Callable

from fp8refit.errors import CacheFlushError, EngineBusyError, EngineDirtyError


def refusal(reason: str) -> EngineDirtyError:
    """What a request that is not admitted is told."""
    return EngineDirtyError(f"this engine refuses requests: {reason}")


def unfinished(engine: str) -> EngineBusyError:
    """Why a synchronous engine with requests is not refitted."""
    return EngineBusyError(
        f"the engine has unfinished requests; a synchronous {engine} cannot drain them without taking their outputs: finish or "
        "abort them, then refit"
    )


def still_running(count: int, timeout_s: float) -> EngineBusyError:
    """Why an asynchronous engine, whose requests were waited for, is not refitted."""
    return EngineBusyError(
        f"{count} request(s) did not finish within {timeout_s:g} s; they go on. Refit later, wait longer (timeout_s), or "
        'choose in_flight="abort" or "keep"'
    )


def cache_kept(cache: str, holders: str, *, said: str = "") -> CacheFlushError:
    """Why an engine that did not drop what it computed under the old policy is not written.

    Args:
        cache: Which engine kept which cache.
        holders: What may hold blocks of it.
        said: What the engine said of it.
    """
    return CacheFlushError(
        f"{cache} because blocks of it are still held; nothing was written, and the old policy is served. Finish or abort what "
        f"holds them ({holders}), then refit again{f' ({said})' if said else ''}"
    )


class Gate:
    """Where requests to one asynchronous engine wait for the end of a refit, or are refused.

    An adapter lets every request `pass_through` while it replaces the engine's own entries.

    Args:
        refuse_with: Gives the error for a reason to refuse requests.
    """

    def __init__(self, refuse_with: Callable[[str], Exception] = refusal) -> None:
        self._refuse_with = refuse_with
        self._may_decide = asyncio.Event()
        self.reason: str | None = None

    def close(self) -> None:
        """Let requests wait."""
        self.reason = None
        self._may_decide.clear()

    def refuse(self, reason: str) -> None:
        """Refuse those that wait, and every one that comes."""
        self.reason = reason
        self._may_decide.set()

    def open(self) -> None:
        """Admit those that wait."""
        self.reason = None
        self._may_decide.set()

    async def until_decided(self) -> None:
        """Wait for the end of a refit that is under way, however it ends."""
        await self._may_decide.wait()

    async def pass_through(self) -> None:
        """Wait until the gate is open.

        Raises:
            Exception: Requests are refused; by default an `EngineDirtyError`.
        """
        await self.until_decided()
        if self.reason is not None:
            raise self._refuse_with(self.reason)
