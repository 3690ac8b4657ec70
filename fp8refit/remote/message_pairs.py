"""Two messages to every rank of an engine in one exchange, in which the engine drops its caches once all could do the first."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fp8refit.remote.messages import have_done


@dataclass(frozen=True, kw_only=True, slots=True)
class PairAnswers:
    """What came of two messages in one exchange."""

    answers: Sequence[str]
    """To the second; or to the first, if a rank could not do that and nothing came after it."""
    is_refused: bool
    """Whether they are those to the first."""
    flush_s: float
    """Seconds in which the engine dropped its caches while the ranks waited for that."""


class Pairs(Protocol):
    """Reaches every rank with two messages in one exchange."""

    async def call_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> PairAnswers:
        """Give every rank `first`; if all could do that drop the caches, and give every rank `second`.

        Raises:
            CacheFlushError: Caches stay. No rank was given `second`.
            RankFailedError: Dropping them failed. No rank was given `second`.
            EngineLostError: A rank does not answer; or caches stay that nothing uses, and the ranks were given `second`.
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
    """See `Pairs.call_pair`, where whoever asks is beside the engine and an exchange costs little.

    Args:
        call: Gives every rank a message; see `fp8refit.remote.channel.Channel`.
        flush_caches: Drops the caches; see `fp8refit.remote.servers.control.ControlPlane`.
        first: See `Pairs.call_pair`.
        second: See there.
        timeouts_s: For each.
    """
    answers = await call(first, timeout_s=timeouts_s[0])
    if not have_done(answers, first):
        return PairAnswers(answers=answers, is_refused=True, flush_s=0.0)
    start_s = time.perf_counter()
    await flush_caches()
    flush_s = time.perf_counter() - start_s
    return PairAnswers(answers=await call(second, timeout_s=timeouts_s[1]), is_refused=False, flush_s=flush_s)
