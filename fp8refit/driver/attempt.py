"""How a refit or a calibration of an engine ends: the engine serves a whole policy, or refuses requests."""

from collections.abc import Awaitable, Callable
from textwrap import shorten
from typing import TypeVar

from fp8refit.driver.attach import AttachedEngine
from fp8refit.driver.engine import Engine
from fp8refit.errors import EngineBusyError, EngineLostError
from fp8refit.transport.error_capture import ErrorCapture

T = TypeVar("T")


class Attempt:
    """One refit or calibration.

    Args:
        engine: Of which engine.

    Attributes:
        version: Of the policy before the engine was paused; None while it is not.
        is_written: Whether another policy was committed, as far as is known.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._resumes = False
        self.version: int | None = None
        self.is_written = False

    async def resume(self) -> None:
        """Serve the policy that is in place."""
        self._resumes = True
        version = self._engine.ranks.version
        if self.is_written or version != self.version:
            await self._engine.publish_version(version)
        await self._engine.resume()
        self.version = None

    async def fail(self, error: BaseException) -> None:
        """Go on with a whole policy, the old or the new one; with parts of both refuse requests.

        Raises:
            BaseException: Why the engine could not go on.
        """
        engine, ranks = self._engine, self._engine.ranks
        if isinstance(error, EngineLostError):
            await engine.refuse(f"the engine is lost ({_describe(error)})")
        elif self.version is not None and ranks.is_dirty:
            await engine.refuse(
                f"the last refit failed part way ({_describe(error)}); the next one that succeeds heals it"
            )
        elif self.version is not None:
            # It wrote nothing, or the ranks committed and their driver did not hear of it, or did not go on.
            with ErrorCapture() as stuck:
                if self._resumes and isinstance(error, GeneratorExit):
                    raise error  # what had to be awaited then cannot be awaited now
                await ranks.abandon()
                await self.resume()
            if stuck.error is not None:
                await engine.refuse(
                    f"version {ranks.version} is in place, but the engine did not go on ({_describe(stuck.error)}); refit again"
                )
                self.version = None
                raise stuck.take()
        self.version = None


async def take_turn(attached: AttachedEngine, steps: Callable[[Attempt], Awaitable[T]]) -> T:
    """Take the steps of one refit while no other one is under way, and leave an engine that serves or refuses.

    An interrupt may come between any two lines. What has to be done in any case is therefore done twice: an interrupt of the
    first time is followed by the second.

    Raises:
        EngineBusyError: Another refit is under way.
        BaseException: What the steps raise.
    """
    attempt, turn = Attempt(attached.engine), attached.turn
    try:
        try:
            if not turn.take(attempt):
                raise EngineBusyError("another refit of this engine is under way; wait for it")
            with ErrorCapture() as failed:
                return await steps(attempt)
            assert failed.error is not None, "it failed"
            await attempt.fail(failed.error)
            raise failed.take()
        except BaseException as error:
            if attempt.version is not None:
                await attempt.fail(error)
            raise
        finally:
            turn.end(attempt)
    finally:
        turn.end(attempt)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 240)}"
