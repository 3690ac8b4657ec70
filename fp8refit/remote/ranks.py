"""The driver's side of an engine whose ranks run in other processes, on this host or others."""

import contextlib
from collections.abc import Callable, Sequence

from typing_extensions import override

from fp8refit.config import Job
from fp8refit.errors import RankFailedError, RefitError, UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.ranks import Ranks
from fp8refit.remote.broadcast.broadcast import Broadcast
from fp8refit.remote.broadcast.peer import BroadcastPeer
from fp8refit.remote.host.host_route import HostRoute, Offered
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import Channel, RankClient
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import Source
from fp8refit.transport.error_capture import ErrorCapture


class RemoteRanks(Ranks):
    """Ranks over a channel, by two routes: what this host shares, and a broadcast.

    If a source has the layout of the last one, its check is sent together with the write, where the engine takes both in one
    exchange. If the ranks refuse it then, nothing is written. With `in_flight="abort"` the check always comes first: otherwise
    requests might be aborted for nothing.

    Args:
        channel: Reaches every rank.
        named: Notes on an error of a broadcast which engine it comes from.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        named: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.client = RankClient(channel)
        self.host_route = HostRoute(self.client)
        self.peer = BroadcastPeer(self.client, self.host_route, named=named)
        self._broadcast = Broadcast([self.peer])
        self._offered: Offered | None = None
        """The offer that is prepared over `host_route`; None if a broadcast is prepared, or nothing."""

    @property
    @override
    def version(self) -> int:
        return self.client.version

    @property
    @override
    def is_dirty(self) -> bool:
        return self.client.is_dirty

    @property
    def ahead_s(self) -> float:
        """See `SendsAhead`."""
        return self._broadcast.ahead_s if self._offered is None else 0.0

    @override
    async def prepare(
        self, make_source: Callable[[], Source], job: Job, *, driver_error: BaseException | None = None
    ) -> bool:
        if driver_error is not None:
            raise driver_error
        self._offered = None
        await self.handshake(job)
        source = make_source()
        if job.config.transport == "collective":
            return await self._broadcast.prepare(source, job)
        if not job.compares:
            self._broadcast.leave()
        self._offered = await self._offer(source, job)
        return self._offered.waits

    @override
    async def write(self, *, driver_error: BaseException | None = None) -> Sequence[RankReport]:
        offered, self._offered = self._offered, None
        if driver_error is not None:
            with contextlib.suppress(RefitError):
                await self.host_route.abandon()
            raise driver_error
        if offered is not None:
            return await self.host_route.write(offered)
        (reports,) = await self._broadcast.write(self.version + 1)
        return reports

    @override
    async def abandon(self) -> None:
        self._offered = None
        await self.host_route.abandon()

    @override
    async def check_calibration(self, job: Job, *, driver_error: BaseException | None = None) -> None:
        if driver_error is not None:
            raise driver_error
        await self.handshake(job)
        await self.client.ask(messages.Calibrate(step="check_calibration", job=job))

    @override
    async def calibrate(self, job: Job, *, driver_error: BaseException | None = None) -> KvReport:
        if driver_error is not None:
            raise driver_error
        with ErrorCapture() as failed:
            report = (await self.client.ask(messages.Calibrate(job=job)))[0].kv
            if report is None:
                raise RankFailedError("a rank calibrated but did not report the result; refit again")
            return report
        if not isinstance(failed.error, RefitError):
            with contextlib.suppress(RefitError):
                await self.client.ask(
                    messages.Do(step="hello")
                )  # interrupted: it is unknown whether scales were partly written
        raise failed.take()

    @override
    async def layout(self) -> EngineLayout:
        return EngineLayout.merge(await self.peer.layouts())

    @override
    async def fingerprints(self) -> list[str]:
        replies = await self.client.ask(messages.Do(step="fingerprint"))
        return [reply.fingerprint for reply in sorted(replies, key=lambda reply: reply.rank)]

    @override
    async def close(self) -> None:
        try:
            if self.client.lost_because is None:
                await self.client.ask(messages.Do(step="close"))
        finally:
            self._release()

    async def handshake(self, job: Job) -> None:
        """Identify the ranks, before a job.

        Raises:
            EngineLostError: They no longer answer.
            RankFailedError: They have another version of fp8refit.
            UnsupportedEngineError: The ranks have to compare with a broadcast; only the host route can do that.
        """
        if job.compares and job.config.transport == "collective":
            raise UnsupportedEngineError(
                'verify() needs memory, or files, that the ranks can read: leave out transport="collective"'
            )
        self.client.config = job.config
        await self.client.handshake()

    async def _offer(self, source: Source, job: Job) -> Offered:
        return await self.host_route.prepare(source, job)

    def _release(self) -> None:
        """Give back what this process shares with the ranks."""
        self._broadcast.close()
        self._offered = None
        self.host_route.close()
