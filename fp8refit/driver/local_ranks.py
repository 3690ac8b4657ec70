"""The ranks of an engine whose model is in this process."""

from collections.abc import Callable, Sequence

from typing_extensions import override

from fp8refit.config import Job
from fp8refit.errors import RankFailedError
from fp8refit.fill.fills import Prepared
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.rank import Rank
from fp8refit.ranks.ranks import Ranks
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.handover import HandedSource
from fp8refit.sources.source import Source
from fp8refit.transport.error_capture import ErrorCapture


class LocalRanks(Ranks):
    """Implements `Ranks` for a rank in this process: the only one, or one of several with a driver each.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._prepared: Prepared | None = None

    @property
    @override
    def version(self) -> int:
        return self.rank.target.version

    @property
    @override
    def is_dirty(self) -> bool:
        return self.rank.target.is_dirty

    @override
    async def prepare(
        self, make_source: Callable[[], Source], job: Job, *, driver_error: BaseException | None = None
    ) -> bool:
        self._prepared = None
        self._prepared = self.rank.prepare(make_source, job, driver_error=driver_error)
        return False

    @override
    async def write(self, *, driver_error: BaseException | None = None) -> Sequence[RankReport]:
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "write() follows a prepare() that returned"
        self.rank.agree(prepared, driver_error=driver_error)
        if isinstance(prepared.source, HandedSource):
            return await self._take(prepared, prepared.source)
        return self.rank.write(prepared)

    async def _take(self, prepared: Prepared, source: HandedSource) -> Sequence[RankReport]:
        """Write the buckets that are handed over.

        If this rank fails and there are others, it keeps taking buckets: the others may wait for it at the source.
        """
        rank, error = self.rank, None
        with ErrorCapture() as failed:
            rank.target.begin(prepared)
        while failed.error is None or rank.group.size > 1:
            with ErrorCapture() as ended:
                bucket = await source.next_bucket()
            if ended.error is not None:
                error = ended.take()
                if isinstance(error, GeneratorExit):
                    error = RankFailedError("an update was interrupted")
                break
            if bucket is None:
                break
            if failed.error is not None:
                for _ in bucket:
                    pass
                continue
            with ErrorCapture() as failed:
                rank.target.push(bucket, drain=rank.group.size > 1)
            del bucket
        error = failed.error if failed.error is not None else error
        return rank.finish(prepared, error=error)

    @override
    async def check_calibration(self, job: Job, *, driver_error: BaseException | None = None) -> None:
        self.rank.check_calibration(job, driver_error=driver_error)

    @override
    async def calibrate(self, job: Job, *, driver_error: BaseException | None = None) -> KvReport:
        return self.rank.calibrate(job, driver_error=driver_error)

    @override
    async def abandon(self) -> None:
        self._prepared = None
        self.rank.target.abandon()

    @override
    async def layout(self) -> EngineLayout:
        return self.rank.target.layout()

    @override
    async def fingerprints(self) -> Sequence[str]:
        return [self.rank.target.live.fingerprint()]

    @override
    async def close(self) -> None:
        self.rank.target.close()
