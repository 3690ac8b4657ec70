"""Who may write a live model: one holder at a time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from fp8refit.errors import RankFailedError

IN_USE = "another refit of this engine is under way; wait for it"


class DisplacedError(RankFailedError):
    """What was being written was given up. What is written now is somebody else's."""

    def __init__(self) -> None:
        super().__init__(
            "this refit was abandoned: its driver gave it up, another one began, or the engine was closed; refit again"
        )


class _Hold:
    """A turn of one holder. It is over for good once there is a next one."""

    __slots__ = ("holder", "is_over", "next", "until_s")

    def __init__(self, holder: object, until_s: float) -> None:
        self.holder, self.until_s, self.is_over = holder, until_s, False
        self.next: dict[str, _Hold] = {}


class Turn:
    """A lock that one holder at a time has.

    It is a chain of holds, whose last one counts. Threads and interrupts may come between any two steps, and `end` is safe to
    call even if an interrupt hit `take` or `end` halfway.
    """

    def __init__(self) -> None:
        self._hold = _Hold(None, -math.inf)

    @property
    def is_free(self) -> bool:
        """Whether anybody may take it."""
        hold = self._last()
        return hold.is_over or time.monotonic() > hold.until_s

    def take(self, holder: object, *, for_s: float = math.inf, after: object = None) -> bool:
        """Take the lock for `holder`, directly `after` another one if given. False if somebody else has it.

        `for_s` later the holder loses it to whoever wants it.
        """
        hold = self._last()
        while hold.is_over or (hold.holder is not holder and (hold.holder is after or time.monotonic() > hold.until_s)):
            hold = hold.next.setdefault("next", _Hold(holder, time.monotonic() + for_s))
        return hold.holder is holder

    def lend(self) -> Callable[[], bool]:
        """Let whoever wants the lock have it. Returns what takes it back, and says whether nobody has it instead."""
        holder, lent = self._last().holder, object()
        self.take(lent, for_s=0, after=holder)
        return lambda: self.take(holder, after=lent)

    def end(self, holder: object) -> None:
        """Release the lock, if `holder` has it. May be repeated."""
        hold = self._last()
        if hold.holder is holder:
            hold.is_over, hold.holder = True, None

    @contextmanager
    def during(self, owner: object, lasts_s: Callable[[], float]) -> Iterator[bool]:
        """Hold it for one order of `owner`, which then keeps it for `lasts_s()`, for the next. Gives whether it is held."""
        order = object()
        try:
            try:
                is_held = self.take(order, after=owner)
                try:
                    yield is_held
                finally:
                    if is_held and (seconds := lasts_s()):
                        self.take(owner, for_s=seconds, after=order)
            finally:
                self.end(order)
        finally:
            self.end(order)  # again, in case that an interrupt hit the first one

    def _last(self) -> _Hold:
        hold = self._hold
        while hold.next:
            hold = hold.next["next"]
        self._hold = hold
        return hold


class Turns(Turn):
    """Several locks as one."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns

    @property
    @override
    def is_free(self) -> bool:
        return all(turn.is_free for turn in self._turns)

    @override
    def take(self, holder: object, *, for_s: float = math.inf, after: object = None) -> bool:
        """Take all of them or none."""
        if all(turn.take(holder, for_s=for_s, after=after) for turn in self._turns):
            return True
        self.end(holder)
        return False

    @override
    def lend(self) -> Callable[[], bool]:
        take_back = [turn.lend() for turn in self._turns]
        return lambda: all(take() for take in take_back)

    @override
    def end(self, holder: object) -> None:
        for turn in self._turns:
            turn.end(holder)
