"""Keeps requests from an engine during a refit, and words the refusals."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from fp8refit.errors import CacheFlushError, EngineBusyError, EngineDirtyError, UnsupportedEngineError


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


def cannot_continue(why: str) -> UnsupportedEngineError:
    """The error for an engine whose requests cannot go on with their KV."""
    return UnsupportedEngineError(f'in_flight="continue": {why}; choose "keep", which computes the KV anew')


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

    Until it is opened, it replaces the methods of an engine's object that an adapter names in `entries`, by its own of these
    names, which await `pass_through`.

    Args:
        owner: The object.
        last_step: An object and the name of its method that every request, and every part of one, passes after the entries
            and before the engine gets it.
        refuse_with: Makes the error that refused requests raise, from the reason.
    """

    entries: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, owner: Any, last_step: tuple[Any, str], refuse_with: Callable[[str], Exception] = refusal
    ) -> None:
        self._owner = owner
        self._last_step = last_step
        self._refuse_with = refuse_with
        self._may_decide = asyncio.Event()
        self.reason: str | None = None
        for name in self.entries:
            owner.__dict__[name] = getattr(self, name)

    def close(self) -> None:
        """Make requests wait."""
        self.reason = None
        self._may_decide.clear()
        self._restore_last_step()

    def refuse(self, reason: str) -> None:
        """Refuse waiting and new requests, and those that had passed the entries but not the last step."""
        self.reason = reason
        self._may_decide.set()
        owner, name = self._last_step
        owner.__dict__[name] = partial(self.refuse_late, reason)

    def open(self) -> None:
        """Admit waiting and new requests, and restore the engine's own methods."""
        self.reason = None
        self._may_decide.set()
        self._restore_last_step()
        for name in self.entries:
            self._owner.__dict__.pop(name, None)

    def refuse_late(self, reason: str, *_: Any, **__: Any) -> Any:
        """Replaces the last step while requests are refused."""
        raise self._refuse_with(reason)

    def _restore_last_step(self) -> None:
        owner, name = self._last_step
        owner.__dict__.pop(name, None)

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
