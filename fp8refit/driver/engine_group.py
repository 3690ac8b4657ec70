"""Makes several engines look like one, so that they are refitted together.

The steps of a refit are those of one engine: all are prepared, then all paused and flushed, then one broadcast goes to
all, and all commit or none does.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from typing_extensions import override

from fp8refit.config import Job, RefitConfig
from fp8refit.driver.attach import AttachedEngine, attach_engine
from fp8refit.driver.engine import Engine
from fp8refit.errors import EngineLostError, RefitError, UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.live.turn import Turns
from fp8refit.ranks.ranks import Ranks
from fp8refit.remote.broadcast.broadcast import Broadcast
from fp8refit.remote.protocol.messages import Do
from fp8refit.remote.ranks import RemoteRanks
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import Source
from fp8refit.transport.running import run

T = TypeVar("T")


class EngineGroup(Engine):
    """Implements `fp8refit.driver.engine.Engine` over several engines.

    Args:
        candidates: What `Refitter` takes: an `LLM`, an `AsyncLLM`, a URL. Or what is attached to them.

    Raises:
        UnsupportedEngineError: One of them is not accepted by `Refitter`, or runs in this process.

    Attributes:
        attached: What is attached to each engine.
    """

    def __init__(self, candidates: Sequence[object]) -> None:
        if not candidates:
            raise UnsupportedEngineError("there is no engine to broadcast to; pass at least one")
        attached = [each if isinstance(each, AttachedEngine) else attach_engine(each) for each in candidates]
        if len({id(each) for each in attached}) < len(attached):
            raise UnsupportedEngineError("an engine is named twice; name every engine once")
        self.attached = tuple(attached)
        self._engines = [each.engine for each in attached]
        members = [engine.ranks for engine in self._engines if isinstance(engine.ranks, RemoteRanks)]
        if len(members) < len(self._engines):
            raise UnsupportedEngineError(
                "an engine whose model is in this process needs no broadcast; give it to Refitter, or boot it with workers in "
                "processes of their own"
            )
        self.name = " + ".join(engine.name for engine in self._engines)
        self.ranks: EngineGroupRanks = EngineGroupRanks(members, self._together)
        turns = Turns([each.turn for each in attached])
        self._fp8refit_engine = AttachedEngine(self, turns)

    @property
    def is_asynchronous(self) -> bool:
        """Whether any of the engines is."""
        return any(engine.is_asynchronous for engine in self._engines)

    @override
    async def check_ready(self) -> None:
        await self._together([engine.check_ready() for engine in self._engines])

    @override
    async def pause(self, config: RefitConfig) -> int:
        return sum(await self._together([engine.pause(config) for engine in self._engines]))

    @override
    async def resume(self) -> None:
        await self._together([engine.resume() for engine in self._engines])

    @override
    async def refuse(self, reason: str) -> None:
        """Refuse requests on dirty engines. Whole engines resume, and lost ones need nothing."""

        async def refuse(engine: Engine) -> None:
            if not engine.ranks.is_dirty:
                with contextlib.suppress(RefitError):
                    await engine.resume()
                    return
            with contextlib.suppress(RefitError):
                await engine.refuse(reason)

        await self._together([refuse(engine) for engine in self._engines])

    @override
    async def flush_caches(self) -> None:
        await self._together([engine.flush_caches() for engine in self._engines])

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Tokenize with the first engine: all have the same tokenizer."""
        return await self._engines[0].tokenize(prompts)

    @override
    async def publish_version(self, version: int) -> None:
        await self._together([engine.publish_version(version) for engine in self._engines])

    async def _together(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Await one call per engine concurrently. Calls to synchronous engines block, so each gets a thread."""
        if self.is_asynchronous:
            outcomes: list[T | BaseException] = await asyncio.gather(
                *(
                    call if engine.is_asynchronous else asyncio.to_thread(run, call)
                    for engine, call in zip(self._engines, calls, strict=True)
                ),
                return_exceptions=True,
            )
        elif len(calls) == 1:
            return [run(calls[0])]
        else:
            with ThreadPoolExecutor(len(calls)) as pool:
                outcomes = list(pool.map(_outcome, calls))
        results, errors = [], []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                results.append(outcome)
        if errors:  # other engines only report that a lost one is gone
            raise next((error for error in errors if isinstance(error, EngineLostError)), errors[0])
        return results


class EngineGroupRanks(Ranks):
    """Implements `fp8refit.ranks.ranks.Ranks` over the ranks of several engines.

    Args:
        members: The ranks of each engine.
        together: Awaits calls to all engines concurrently.

    Attributes:
        least_version: Lowest version of the next policy.
    """

    def __init__(self, members: Sequence[RemoteRanks], together: Callable[..., Any]) -> None:
        self._members, self.least_version = tuple(members), 0
        self._together = together
        self._broadcast = Broadcast([member.peer for member in self._members], together)
        self._compares = False

    @property
    @override
    def version(self) -> int:
        """The highest version. Engines that were refitted separately differ until the next common refit."""
        return max(member.version for member in self._members)

    @property
    @override
    def is_dirty(self) -> bool:
        return any(member.is_dirty for member in self._members)

    @property
    def ahead_s(self) -> float:
        """See `SendsAhead`."""
        return self._broadcast.ahead_s

    @override
    async def prepare(
        self, make_source: Callable[[], Source], job: Job, *, driver_error: BaseException | None = None
    ) -> bool:
        """Check a policy on all engines. They compare it one by one, and each reads it again: a broadcast cannot compare."""
        if driver_error is not None:
            raise driver_error
        self._compares = job.compares
        if job.compares:
            for member in self._members:
                await member.prepare(make_source, job)
            return False
        await self._together([member.handshake(job) for member in self._members])
        return await self._broadcast.prepare(make_source(), job)

    @override
    async def write(self, *, driver_error: BaseException | None = None) -> Sequence[RankReport]:
        """Write on all engines; their ranks are numbered consecutively."""
        if driver_error is not None:
            await self.abandon()
            raise driver_error
        if self._compares:
            reports = [await member.write() for member in self._members]
        else:
            reports = await self._broadcast.write(max(self.version + 1, self.least_version))
        every = [report for of_engine in reports for report in of_engine]
        return [report.model_copy(update={"rank": rank}) for rank, report in enumerate(every)]

    @override
    async def check_calibration(self, job: Job, *, driver_error: BaseException | None = None) -> None:
        await self._together([member.check_calibration(job, driver_error=driver_error) for member in self._members])

    @override
    async def calibrate(self, job: Job, *, driver_error: BaseException | None = None) -> KvReport:
        calls = [member.calibrate(job, driver_error=driver_error) for member in self._members]
        return KvReport.merge(await self._together(calls))

    @override
    async def abandon(self) -> None:
        await self._together([member.abandon() for member in self._members])

    @override
    async def layout(self) -> EngineLayout:
        """The merged layout. Slices are those of the first engine that holds a tensor."""
        return EngineLayout.merge(await self._together([member.layout() for member in self._members]))

    @override
    async def fingerprints(self) -> Sequence[str]:
        """The fingerprints of all ranks, engine by engine."""
        found = await self._together([member.fingerprints() for member in self._members])
        return [each for of_engine in found for each in of_engine]

    async def are_lost(self) -> list[bool]:
        """Whether each engine answers no longer. Also learns the versions of those that do."""

        async def is_lost(member: RemoteRanks) -> bool:
            try:
                await member.client.ask(Do(step="hello"))
            except RefitError as error:
                return isinstance(error, EngineLostError)
            return False

        found: list[bool] = await self._together([is_lost(member) for member in self._members])
        return found

    def leave(self) -> None:
        """Leave the broadcast group, which another one follows."""
        self._broadcast.close()

    @override
    async def close(self) -> None:
        self._broadcast.close()
        await self._together([member.close() for member in self._members])


def _outcome(call: Coroutine[Any, Any, T]) -> T | BaseException:
    try:
        return run(call)
    except BaseException as error:  # noqa: BLE001 - raised again once every engine has answered
        return error
