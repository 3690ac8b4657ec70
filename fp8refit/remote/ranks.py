"""The driver's side of an engine whose ranks run in other processes, on this host or others."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from typing_extensions import override

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.errors import RankFailedError, RefitError, UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.ranks import Ranks
from fp8refit.remote import messages
from fp8refit.remote.broadcast.broadcast import Audience, Broadcast
from fp8refit.remote.channel import NUM_VOTES, AskedRanks, Channel
from fp8refit.remote.host_route import HostRoute, Offered
from fp8refit.remote.message_pairs import Pairs
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import Source
from fp8refit.transport.error_capture import ErrorCapture

T = TypeVar("T")


class RemoteRanks(Ranks, Audience):
    """Ranks over a channel, by two routes: what this host shares, and a broadcast.

    What the ranks have to judge before a write that is laid out as the last one waits for the write, where both can go in one
    exchange: until then they hear nothing of it, and if they refuse it then, nothing is written. Not where requests are aborted
    meanwhile: that would have been for nothing.

    Args:
        channel: Reaches every rank.
        pairs: Does so with two messages at once, if the engine can.
    """

    def __init__(self, channel: Channel, pairs: Pairs | None = None) -> None:
        self.asked = AskedRanks(channel, pairs)
        self._route = HostRoute(self.asked)
        self._source: Source | None = None
        """The source that ranks may be reading."""
        self._offered: Offered | None = None
        self._broadcast = Broadcast([self])
        self._take_votes: int | None = None
        """How many votes the ranks may hold in the prepared broadcast; None if none is prepared."""
        self._num_buckets = 0

    @property
    @override
    def version(self) -> int:
        return self.asked.version

    @property
    @override
    def is_dirty(self) -> bool:
        return self.asked.is_dirty

    @property
    @override
    def num_ranks(self) -> int:
        return self.asked.num_ranks

    @property
    @override
    def has_refused(self) -> bool:
        return self.asked.has_refused

    @property
    @override
    def drops_caches(self) -> bool:
        return self.asked.holds

    @override
    async def prepare(
        self,
        make_source: Callable[[], Source],
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        driver_error: BaseException | None = None,
    ) -> None:
        if driver_error is not None:
            raise driver_error
        await self.meet(config)
        source = make_source()
        if config.transport == "collective":
            await self._broadcast.prepare(source, config, kv=kv)
            return
        self._broadcast.leave()
        self._take_votes = None
        self._source = source
        self._offered = await self._or_give_up(self._offer(source, kv))

    @override
    async def write(self, *, driver_error: BaseException | None = None) -> Sequence[RankReport]:
        if self._take_votes is not None and driver_error is None:
            (reports,) = await self._broadcast.write(self.version + 1)
            return reports
        return await self._or_give_up(self._write(driver_error))

    @override
    async def verify(self, make_source: Callable[[], Source], config: RefitConfig) -> Sequence[RankReport]:
        """What ranks on other hosts hold is not compared.

        Raises:
            UnsupportedEngineError: The transport is a broadcast.
        """
        if config.transport == "collective":
            raise UnsupportedEngineError(
                'verify() needs memory, or files, that the ranks can read: leave out transport="collective"'
            )
        await self.meet(config)
        self._source = make_source()
        self._offered = await self._or_give_up(self._offer(self._source, None, compares=True))
        return await self._or_give_up(self._write(None))

    @override
    async def abandon(self) -> None:
        await self.asked.abandon()
        self._source = self._offered = self._take_votes = None

    @override
    async def check_calibration(
        self, kv: KvOrder, config: RefitConfig, *, driver_error: BaseException | None = None
    ) -> None:
        if driver_error is not None:
            raise driver_error
        await self.meet(config)
        await self.asked.ask(messages.CheckCalibration(config=config, kv=kv))

    @override
    async def calibrate(
        self, kv: KvOrder, config: RefitConfig, *, driver_error: BaseException | None = None
    ) -> KvReport:
        if driver_error is not None:
            raise driver_error
        with ErrorCapture() as failed:
            report = (await self.asked.ask(messages.Calibrate(config=config, kv=kv)))[0].kv
            if report is None:
                raise RankFailedError("a rank calibrated but did not report the result; refit again")
            return report
        if not isinstance(failed.error, RefitError):
            with contextlib.suppress(RefitError):
                await self.asked.ask(messages.Hello())  # interrupted: it is unknown whether scales were partly written
        raise failed.take()

    @override
    async def layout(self) -> EngineLayout:
        return EngineLayout.merge(await self.layouts())

    @override
    async def fingerprints(self) -> list[str]:
        replies = await self.asked.ask(messages.Fingerprint())
        return [reply.fingerprint for reply in sorted(replies, key=lambda reply: reply.rank)]

    @override
    async def close(self) -> None:
        try:
            if self.asked.lost_because is None:
                await self.asked.ask(messages.Close())
        finally:
            self._broadcast.close()
            self._source = self._offered = None
            self._route.close(may_be_read=self.asked.lost_because is not None)

    async def meet(self, config: RefitConfig) -> None:
        """Identify the ranks, for a refit with `config`.

        Raises:
            EngineLostError: They no longer answer.
            RankFailedError: They have another version of fp8refit.
        """
        self.asked.config = config
        await self.asked.meet()

    @override
    async def join(self, order: messages.Join) -> None:
        await self.asked.ask(order)

    @override
    async def layouts(self) -> list[EngineLayout]:
        replies = sorted(await self.asked.ask(messages.Describe()), key=lambda reply: reply.rank)
        return [reply.layout for reply in replies if reply.layout is not None]

    @override
    async def prepare_offered(
        self, offer: messages.Broadcast, config: RefitConfig, *, refit: str, kv: KvOrder | None, may_wait: bool
    ) -> bool:
        asked, asked.has_refused, asked.refit = self.asked, False, refit
        self._num_buckets = offer.num_buckets if offer.num_buckets else self._num_buckets
        # Each bucket, the votes of these ranks, and those of the other engines.
        self._take_votes = self._num_buckets + 2 * NUM_VOTES
        order = messages.Prepare(refit=refit, config=config, source=offer, kv=kv, keeps=self._route.keeps())
        if may_wait and asked.hold(order.model_copy(update={"is_under_way": True})):
            return True
        await self._or_give_up(asked.ask(order))
        return False

    @override
    async def take(self, version: int) -> Sequence[RankReport]:
        asked, asked.is_dirty = self.asked, True
        order = messages.Take(refit=asked.refit, version=version)
        replies = await self._or_give_up(asked.ask(order, num_votes=self._take_votes))
        asked.check_is_one_policy(replies)
        asked.refit, self._take_votes = "", None
        return asked.reports(replies)

    async def _offer(self, source: Source, kv: KvOrder | None, *, compares: bool = False) -> Offered:
        return await self._route.prepare(source, kv, compares=compares)

    async def _write(self, driver_error: BaseException | None) -> Sequence[RankReport]:
        if driver_error is not None:
            raise driver_error
        offered = self._offered
        assert offered is not None, "write() follows a prepare() that returned"
        if not offered.compares:
            self.asked.is_dirty = True
        replies = await self._route.write(offered)
        self.asked.refit, self._source, self._offered = "", None, None
        return self.asked.reports(replies)

    async def _or_give_up(self, step: Awaitable[T]) -> T:
        """Await a step; on an error make the ranks drop what was prepared. If a rank is lost, keep the source: it may
        be reading.
        """
        with ErrorCapture() as failed:
            return await step
        self._route.fail()
        with contextlib.suppress(RefitError):
            await self.asked.ask(messages.Abandon(refit=self.asked.refit))
        if self.asked.lost_because is None:
            self.asked.refit, self._source, self._offered = "", None, None
        self._take_votes = None
        raise failed.take()
