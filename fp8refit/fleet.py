"""Several engines that are refitted together: one control plane and one set of ranks, as `fp8refit.engine` knows them.

So the steps of a refit, and their order, are those of one engine: all are prepared, then all paused and flushed, then one
broadcast goes to all, and all commit or none does.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar, cast

from fp8refit.broadcast import Broadcast
from fp8refit.config import KvOrder, RefitConfig
from fp8refit.engine import AttachedEngine, Engine, Turn, attach_engine
from fp8refit.errors import EngineLostError, RefitError, UnsupportedEngineError
from fp8refit.layout import EngineLayout
from fp8refit.remote import RemoteRanks
from fp8refit.report import KvReport, RankReport
from fp8refit.sources import Source

T = TypeVar("T")


class Fleet:
    """Implements `fp8refit.engine.Engine` over several engines.

    Args:
        candidates: What `Refitter` takes: an `LLM`, an `AsyncLLM`, a URL.

    Raises:
        UnsupportedEngineError: One is nothing that `Refitter` takes, or runs in this process.
    """

    def __init__(self, candidates: Sequence[object]) -> None:
        if not candidates:
            raise UnsupportedEngineError("there is no engine to broadcast to; pass at least one")
        attached = [attach_engine(candidate) for candidate in candidates]
        if len({id(each) for each in attached}) < len(attached):
            raise UnsupportedEngineError("an engine is named twice; name every engine once")
        self._engines = [each.engine for each in attached]
        members = [engine.ranks for engine in self._engines if isinstance(engine.ranks, RemoteRanks)]
        if len(members) < len(self._engines):
            raise UnsupportedEngineError(
                "an engine whose model is in this process needs no broadcast; give it to Refitter, or boot it with workers in "
                "processes of their own"
            )
        self.name = " + ".join(engine.name for engine in self._engines)
        self.ranks = FleetRanks(members, self._together)
        turns = _Turns([each.turn for each in attached])
        self._fp8refit_engine = AttachedEngine(cast(Engine, self), turns)

    @property
    def is_asynchronous(self) -> bool:
        """Whether any of the engines is."""
        return any(engine.is_asynchronous for engine in self._engines)

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """See `fp8refit.engine.Engine`: a fleet is its own adapter."""
        return isinstance(candidate, cls)

    @classmethod
    def boot(cls, model: str) -> Self:
        """See `fp8refit.engine.Engine`.

        Raises:
            UnsupportedEngineError: The engines are booted by whoever has them.
        """
        raise UnsupportedEngineError(f"a fleet is made of engines that run; boot each of them on {model}")

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._together([engine.check_ready() for engine in self._engines])

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`."""
        return sum(await self._together([engine.pause(config) for engine in self._engines]))

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._together([engine.resume() for engine in self._engines])

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`. An engine that is lost takes no request in any case; one that is whole goes on."""

        async def refuse(engine: Engine) -> None:
            if not engine.ranks.is_dirty:
                with contextlib.suppress(RefitError):
                    await engine.resume()
                    return
            with contextlib.suppress(RefitError):
                await engine.refuse(reason)

        await self._together([refuse(engine) for engine in self._engines])

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._together([engine.flush_caches() for engine in self._engines])

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.engine.Engine`: all have the same tokenizer."""
        return await self._engines[0].tokenize(prompts)

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`."""
        await self._together([engine.publish_version(version) for engine in self._engines])

    async def _together(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """See `fp8refit.broadcast.Together`. The calls of synchronous engines block: each has a thread of its own."""
        if self.is_asynchronous:
            outcomes: list[T | BaseException] = await asyncio.gather(
                *(
                    call if engine.is_asynchronous else asyncio.to_thread(_run, call)
                    for engine, call in zip(self._engines, calls, strict=True)
                ),
                return_exceptions=True,
            )
        elif len(calls) == 1:
            return [_run(calls[0])]
        else:
            with ThreadPoolExecutor(len(calls)) as pool:
                outcomes = list(pool.map(_outcome, calls))
        results, errors = [], []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                results.append(outcome)
        if errors:  # of an engine that is lost others tell only that it is gone
            raise next((error for error in errors if isinstance(error, EngineLostError)), errors[0])
        return results


class FleetRanks:
    """Implements `fp8refit.engine.Ranks` over the ranks of several engines.

    Args:
        members: Of each engine.
        together: Asks all engines at the same time.
    """

    def __init__(self, members: Sequence[RemoteRanks], together: Callable[..., Any]) -> None:
        self._members = tuple(members)
        self._together = together
        self._broadcast = Broadcast(self._members, together)

    @property
    def version(self) -> int:
        """See `fp8refit.engine.Ranks`. Engines that were refitted alone before differ, until the next refit of all."""
        return max(member.version for member in self._members)

    @property
    def is_dirty(self) -> bool:
        """See `fp8refit.engine.Ranks`."""
        return any(member.is_dirty for member in self._members)

    @property
    def drops_caches(self) -> bool:
        """See `fp8refit.engine.Ranks`: only an engine that is alone is asked for both at once."""
        return all(member.drops_caches for member in self._members)

    async def prepare(
        self,
        make_source: Callable[[], Source],
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        objection: BaseException | None = None,
    ) -> None:
        """See `fp8refit.engine.Ranks`."""
        if objection is not None:
            raise objection
        await self._together([member.meet(config) for member in self._members])
        await self._broadcast.prepare(make_source(), config, kv=kv)

    async def write(self, *, objection: BaseException | None = None) -> Sequence[RankReport]:
        """See `fp8refit.engine.Ranks`. The ranks of all engines are numbered one after another."""
        if objection is not None:
            await self.abandon()
            raise objection
        reports = await self._broadcast.write(self.version + 1)
        every = [report for of_engine in reports for report in of_engine]
        return [report.model_copy(update={"rank": rank}) for rank, report in enumerate(every)]

    async def check_calibration(
        self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None
    ) -> None:
        """See `fp8refit.engine.Ranks`."""
        await self._together([member.check_calibration(kv, config, objection=objection) for member in self._members])

    async def calibrate(self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None) -> KvReport:
        """See `fp8refit.engine.Ranks`."""
        reports = await self._together([member.calibrate(kv, config, objection=objection) for member in self._members])
        return KvReport.merge(reports)

    async def abandon(self) -> None:
        """See `fp8refit.engine.Ranks`."""
        await self._together([member.abandon() for member in self._members])

    async def layout(self) -> EngineLayout:
        """See `fp8refit.engine.Ranks`: what the first engine that holds a tensor holds of it."""
        return EngineLayout.merge(await self._together([member.layout() for member in self._members]))

    async def fingerprints(self) -> Sequence[str]:
        """See `fp8refit.engine.Ranks`: engine after engine."""
        found = await self._together([member.fingerprints() for member in self._members])
        return [each for of_engine in found for each in of_engine]

    async def close(self) -> None:
        """See `fp8refit.engine.Ranks`."""
        self._broadcast.close()
        await self._together([member.close() for member in self._members])


class _Turns(Turn):
    """The turns of several engines as one."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns

    def take(self, holder: object) -> bool:
        """See `Turn`: all of them or none."""
        if all(turn.take(holder) for turn in self._turns):
            return True
        self.end(holder)
        return False

    def end(self, holder: object) -> None:
        """See `Turn`."""
        for turn in self._turns:
            turn.end(holder)


def _run(call: Coroutine[Any, Any, T]) -> T:
    """Do what a synchronous engine does, which never suspends."""
    try:
        call.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    call.close()
    raise AssertionError("a synchronous engine suspended")


def _outcome(call: Coroutine[Any, Any, T]) -> T | BaseException:
    try:
        return _run(call)
    except BaseException as error:  # noqa: BLE001 - raised again once every engine has answered
        return error
