"""Sends two messages to every rank in one exchange; between them the engine drops its caches, if the first
succeeded.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fp8refit.remote.messages import have_done


@dataclass(frozen=True, kw_only=True, slots=True)
class PairAnswers:
    """The result of an exchange of two messages."""

    answers: Sequence[str]
    """Answers to the second message; or to the first, if a rank failed it and the second was not sent."""
    is_refused: bool
    """Whether a rank failed the first message."""
    flush_s: float
    """Seconds that the ranks waited while the engine dropped its caches."""


class Pairs(Protocol):
    """Sends two messages to every rank in one exchange."""

    @property
    def can_begin(self) -> bool:
        """Whether `begin_pair` is possible."""
        return False

    async def begin_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> Awaitable[PairAnswers]:
        """`call_pair` without waiting for answers; see `fp8refit.remote.channel.Channel.begin`."""
        raise AssertionError("can_begin says no")

    async def call_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> PairAnswers:
        """Send `first` to every rank. If all succeed, drop the caches and send `second`.

        Raises:
            CacheFlushError: The engine kept its caches; `second` was not sent.
            RankFailedError: Dropping the caches failed; `second` was not sent.
            EngineLostError: A rank does not answer; or unused caches could not be dropped after `second` was sent.
        """
        ...


async def call_in_turn(
    call: Callable[..., Awaitable[Sequence[str]]],
    flush_caches: Callable[[], Awaitable[None]],
    first: str,
    second: str,
    *,
    timeouts_s: tuple[float, float],
) -> PairAnswers:
    """Implement `Pairs.call_pair` by two separate calls, for callers near the engine, where an exchange is cheap.

    Args:
        call: Sends a message to every rank; see `fp8refit.remote.channel.Channel`.
        flush_caches: Drops the caches; see `fp8refit.remote.servers.control.ControlPlane`.
        first: The first message.
        second: The second message.
        timeouts_s: Time limit of each.
    """
    answers = await call(first, timeout_s=timeouts_s[0])
    if not have_done(answers, first):
        return PairAnswers(answers=answers, is_refused=True, flush_s=0.0)
    start_s = time.perf_counter()
    await flush_caches()
    flush_s = time.perf_counter() - start_s
    return PairAnswers(answers=await call(second, timeout_s=timeouts_s[1]), is_refused=False, flush_s=flush_s)
