"""The driver side of an engine whose ranks run in other processes.

Tensors that those processes can map go by handle, all at once; files go by path; everything else goes through one shared
bucket, part by part. What is said goes through a channel of the engine's own.
"""

import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Protocol, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from fp8refit._version import __version__
from fp8refit.announcement import announce
from fp8refit.broadcast import Broadcast
from fp8refit.caught import Caught
from fp8refit.config import LONGEST_WAIT_S, KvOrder, RefitConfig
from fp8refit.errors import (
    EngineLostError,
    InvalidSourceError,
    RankFailedError,
    RefitError,
    UnsupportedEngineError,
)
from fp8refit.layout import EngineLayout
from fp8refit.pieces import in_pieces
from fp8refit.report import KvReport, RankReport
from fp8refit.slots import dtype_name
from fp8refit.sources import MappingSource, SafetensorsSource, Source
from fp8refit.transport import messages
from fp8refit.transport.memory import Bucket, Export, Exporter, TensorRef
from fp8refit.transport.messages import PROTOCOL, Reply, Request
from fp8refit.transport.pairs import Pairs
from fp8refit.transport.segment import DTYPES
from fp8refit.vote import merge_errors

T = TypeVar("T")

NUM_VOTES = 3
"""Of a prepare, of a calibration, and of a write that sets KV scales."""
GRACE_S = 30.0
"""How much longer a driver waits than the ranks wait for each other, so that theirs is the error that is told."""


logger = logging.getLogger(__name__)

_LOST_STEP = (
    "the engine's channel to its ranks lost step, which it does for good when a worker raises. Start the engine again"
)


class Channel(Protocol):
    """How a driver reaches every rank of one engine."""

    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        """Give `message` to the `RankServer` of every rank, and their answers.

        Raises:
            EngineLostError: The engine, or a rank, died or does not answer.
        """
        ...


class RemoteRanks:
    """Implements `fp8refit.engine.Ranks` over a channel.

    What the ranks have to judge before a write that is laid out as the last one waits for the write, where both can go in one
    exchange: until then they hear nothing of it, and if they refuse it then, nothing is written. Not where requests are aborted
    meanwhile: that would have been for nothing.

    Args:
        channel: Reaches every rank.
        pairs: Does so with two messages at once, if the engine can.
    """

    def __init__(self, channel: Channel, pairs: Pairs | None = None) -> None:
        self.version = 0
        self.is_dirty = False
        self._channel = channel
        self._pairs = pairs
        self._held: Request | None = None
        self._flush_s = 0.0
        self.has_refused = False
        """See `fp8refit.broadcast.Audience`."""
        self._config = RefitConfig()
        self._exporter = Exporter()
        self._buckets: dict[torch.device, Bucket] = {}
        self._source: Source | None = None
        self._is_pushed = False
        self._mapped_digest = ""
        self._offered_digest = ""
        self._refit = ""
        self._is_settled = False
        self._sets_kv_scales = False
        self._compares = False
        self._has_met = False
        self.num_ranks = 0
        """As many as answer; none before the first refit."""
        self._broadcast = Broadcast([self])
        self._is_broadcast = False
        self._num_buckets = 0
        self._lost_because: str | None = None

    @property
    def channel(self) -> Channel:
        """How the ranks are reached."""
        return self._channel

    @property
    def pairs(self) -> Pairs | None:
        """How they are reached with two messages at once, if they can be."""
        return self._pairs

    @property
    def drops_caches(self) -> bool:
        """See `fp8refit.engine.Ranks`."""
        return self._held is not None

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
        self._config = config
        await self._meet()
        source = make_source()
        if config.transport == "collective":
            await self._broadcast.prepare(source, config, kv=kv)
            return
        self._broadcast.leave()
        self._is_broadcast = False
        self._refit, self._source, self._is_pushed, self._compares = uuid.uuid4().hex, source, False, False
        self._sets_kv_scales = kv is not None
        last_digest = self._offered_digest
        offer = await self._or_give_up(self._prepare(source, kv))
        self._offered_digest = offer.digest if isinstance(offer, messages.MappedTensors) else ""
        self._mapped_digest, self._is_settled = self._offered_digest, self._offered_digest == last_digest

    async def write(self, *, objection: BaseException | None = None) -> Sequence[RankReport]:
        """See `fp8refit.engine.Ranks`."""
        if self._is_broadcast and objection is None:
            (reports,) = await self._broadcast.write(self.version + 1)
            return reports
        replies = await self._or_give_up(self._write(objection))
        self._source = None
        if not self._is_settled:
            self._mapped_digest = ""
        return self._reports(replies)

    async def meet(self, config: RefitConfig) -> None:
        """Learn who is at the other end, for a refit by `config`.

        Raises:
            EngineLostError: Nobody, any more.
            RankFailedError: Another version.
        """
        self._config = config
        await self._meet()

    async def join(self, order: messages.Join) -> None:
        """See `fp8refit.broadcast.Audience`."""
        await self._ask(order)

    async def layouts(self) -> list[EngineLayout]:
        """See `fp8refit.broadcast.Audience`."""
        replies = sorted(await self._ask(messages.Describe()), key=lambda reply: reply.rank)
        return [reply.layout for reply in replies if reply.layout is not None]

    async def prepare_offered(
        self, offer: messages.Broadcast, config: RefitConfig, *, refit: str, kv: KvOrder | None, may_wait: bool
    ) -> bool:
        """See `fp8refit.broadcast.Audience`."""
        self.has_refused = False
        self._refit, self._is_broadcast, self._sets_kv_scales = refit, True, kv is not None
        self._mapped_digest = self._offered_digest = ""
        self._num_buckets = offer.num_buckets if offer.num_buckets else self._num_buckets
        order = messages.Prepare(refit=refit, config=config, source=offer, kv=kv)
        if may_wait and self._hold(order.model_copy(update={"is_under_way": True})):
            return True
        await self._or_give_up(self._ask(order))
        return False

    async def take(self, version: int) -> Sequence[RankReport]:
        """See `fp8refit.broadcast.Audience`."""
        self.is_dirty = True
        replies = await self._or_give_up(self._ask(messages.Take(refit=self._refit, version=version)))
        self._check_is_one_policy(replies)
        self._is_broadcast = False
        return self._reports(replies)

    async def check_calibration(
        self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None
    ) -> None:
        """See `fp8refit.engine.Ranks`."""
        if objection is not None:
            raise objection
        self._config = config
        await self._meet()
        await self._ask(messages.CheckCalibration(config=config, kv=kv))

    async def calibrate(self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None) -> KvReport:
        """See `fp8refit.engine.Ranks`."""
        if objection is not None:
            raise objection
        with Caught() as caught:
            report = (await self._ask(messages.Calibrate(config=config, kv=kv)))[0].kv
            if report is None:
                raise RankFailedError("a rank calibrated and did not say what came of it; refit again")
            return report
        if not isinstance(caught.error, RefitError):
            with contextlib.suppress(RefitError):
                await self._ask(messages.Hello())  # interrupted: whether scales were written in part was not heard
        raise caught.take()

    async def _prepare(
        self, source: Source, kv: KvOrder | None
    ) -> messages.MappedTensors | messages.Files | messages.Pushed:
        offer = self._offer(source)
        compares = self._compares
        order = messages.Prepare(refit=self._refit, config=self._config, source=offer, kv=kv, compares=compares)
        if not (order.is_known and kv is None and not compares and self._hold(order)):
            await self._ask(order)
        return offer

    async def _write(self, objection: BaseException | None, *, is_dirty: bool = True) -> list[Reply]:
        if objection is not None:
            raise objection
        self.is_dirty = is_dirty
        if not self._is_pushed:
            # A trainer that gathers into new memory every time wants it back; weights that stay in place stay mapped.
            replies = await self._ask(messages.Write(refit=self._refit, keeps_mapped=self._is_settled))
        else:
            await self._ask(messages.Begin(refit=self._refit))
            try:
                await self._push(self._source)
            except InvalidSourceError as error:
                raise InvalidSourceError(error.problems, written=True) from error
            replies = await self._ask(messages.Finish(refit=self._refit))
        if not self._compares:
            self._check_is_one_policy(replies)
        return replies

    def _check_is_one_policy(self, replies: Sequence[Reply]) -> None:
        """Hold that every rank committed the same.

        Raises:
            RankFailedError: They did not.
        """
        if self.is_dirty:
            held = ", ".join(f"rank {reply.rank} holds {reply.version}" for reply in replies)
            raise RankFailedError(f"the ranks serve different versions ({held}); refit again")

    async def verify(self, make_source: Callable[[], Source], config: RefitConfig) -> Sequence[RankReport]:
        """See `fp8refit.engine.Ranks`. What ranks on other hosts hold is not compared.

        Raises:
            UnsupportedEngineError: The transport is a broadcast.
        """
        if config.transport == "collective":
            raise UnsupportedEngineError(
                'verify() needs memory, or files, that the ranks can read: leave out transport="collective"'
            )
        self._config = config
        await self._meet()
        self._refit, self._source, self._is_pushed = uuid.uuid4().hex, make_source(), False
        self._sets_kv_scales, self._compares = False, True
        offer = await self._or_give_up(self._prepare(self._source, None))
        replies = await self._or_give_up(self._write(None, is_dirty=self.is_dirty))
        self._source = None
        if not (isinstance(offer, messages.MappedTensors) and offer.digest == self._mapped_digest):
            self._mapped_digest = self._offered_digest = ""
        return replies[0].reports

    async def abandon(self) -> None:
        """See `fp8refit.engine.Ranks`."""
        if self._source is not None or self._is_broadcast:  # or it was done already
            await self._ask(messages.Abandon(refit=self._refit))
            self._source, self._is_broadcast = None, False

    async def layout(self) -> EngineLayout:
        """See `fp8refit.engine.Ranks`."""
        replies = await self._ask(messages.Describe())
        return EngineLayout.merge([reply.layout for reply in replies if reply.layout is not None])

    async def fingerprints(self) -> list[str]:
        """See `fp8refit.engine.Ranks`."""
        replies = await self._ask(messages.Fingerprint())
        return [reply.fingerprint for reply in sorted(replies, key=lambda reply: reply.rank)]

    async def close(self) -> None:
        """See `fp8refit.engine.Ranks`."""
        try:
            if self._lost_because is None:
                await self._ask(messages.Close())
        finally:
            self._broadcast.close()
            self._source, self._mapped_digest = None, ""
            self._exporter.close()
            for bucket in self._buckets.values():
                bucket.close()
            self._buckets.clear()

    async def _meet(self) -> None:
        """Learn, once, who is at the other end.

        Raises:
            EngineLostError: Nobody, any more.
            RankFailedError: Another version.
        """
        self._check_is_there()
        if self._has_met:
            return
        replies = await self._ask(messages.Hello())
        self.num_ranks = len(replies)
        for reply in replies:
            if reply.package_version != __version__:
                raise RankFailedError(
                    f"rank {reply.rank} has fp8refit {reply.package_version}, this process has {__version__}; install the "
                    "same version for both"
                )
        self._has_met = True

    def _offer(self, source: Source) -> messages.MappedTensors | messages.Files | messages.Pushed:
        """Say how the ranks come by the source's tensors.

        Raises:
            NonFiniteError: NaN or Inf, if they are looked for before writing and this process reads the source.
            InvalidSourceError: They have to be looked for in a source that can be read only once.
        """
        if isinstance(source, SafetensorsSource):
            return messages.Files(path=str(Path(source.path).resolve()), stamps=source.stamps)
        if isinstance(source, MappingSource):
            export, problems = self._export(source)
            for device in export.gpus:
                torch.cuda.synchronize(device)  # what the trainer computes has to be there before it is read
            if not export.leftover:
                if export.digest == self._mapped_digest and not problems:
                    return messages.MappedTensors(digest=export.digest)
                return messages.MappedTensors(
                    digest=export.digest, segments=export.segments, refs=export.refs, problems=problems
                )
            if export.refs:
                logger.warning(
                    "%d of %d tensors (%s first) cannot be mapped by the engine's processes: all of them go through a bucket",
                    len(export.leftover),
                    len(source.tensors),
                    export.leftover[0],
                )
        self._is_pushed = True
        return self._announce(source)

    def _export(self, source: MappingSource) -> tuple[Export, tuple[str, ...]]:
        """References to the tensors, and what is wrong with others. If all lie where and as the last ones did, nothing is: they
        are not looked at one by one.
        """
        export = self._exporter.again(source.sent_names, source.sent)
        if export is not None:
            return export, ()
        known_as = None if source.problems else source.sent_names
        return self._exporter.export(source.tensors, known_as), source.problems

    def _announce(self, source: Source) -> messages.Pushed:
        said = announce(source, self._config)
        if said is None:
            return messages.Pushed(manifest=None)
        manifest = {name: (meta.shape, dtype_name(meta.dtype)) for name, meta in said.metadata.items()}
        return messages.Pushed(
            manifest=manifest, problems=tuple(said.problems), odd_scales=said.odd_scales, unfit=said.unfit
        )

    async def _push(self, source: Source | None) -> None:
        """Read the source, and hand it over bucket by bucket: what no bucket takes whole, in runs of rows."""
        assert source is not None, "prepared"
        refs: dict[str, TensorRef] = {}
        runs: dict[str, messages.Run] = {}
        for piece in in_pieces(source, self._config.bucket_bytes):
            name, tensor = piece.name, piece.tensor
            if dtype_name(tensor.dtype) not in DTYPES:
                raise InvalidSourceError([f"{name}: has dtype {dtype_name(tensor.dtype)}, which no weight has"])
            bucket = self._bucket_for(tensor)
            if name in refs or not bucket.has_room(tensor):
                await self._flush(refs, runs)
                if not bucket.has_room(tensor):
                    bucket = await self._grow(bucket, tensor)
            refs[name] = bucket.put(name, tensor.detach())
            if not piece.is_whole:
                runs[name] = messages.Run(first_row=piece.first_row, full_shape=piece.full_shape)
        await self._flush(refs, runs)

    async def _flush(self, refs: dict[str, TensorRef], runs: dict[str, messages.Run]) -> None:
        """Let the ranks take what is in the buckets, and empty them."""
        if not refs:
            return
        for device in self._buckets:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # and not what the trainer gathers meanwhile
        segments = tuple(bucket.segment for bucket in self._buckets.values())
        await self._ask(messages.Push(refit=self._refit, segments=segments, refs=tuple(refs.values()), runs=dict(runs)))
        refs.clear()
        runs.clear()
        for bucket in self._buckets.values():
            bucket.clear()

    def _bucket_for(self, tensor: Tensor) -> Bucket:
        device = tensor.device
        if device not in self._buckets:
            self._buckets[device] = self._make_bucket(device, max(self._config.bucket_bytes, tensor.nbytes))
        return self._buckets[device]

    async def _grow(self, bucket: Bucket, tensor: Tensor) -> Bucket:
        """A larger bucket in the place of one that cannot take `tensor`, and of which every rank has let go.

        There is need of one where a single row of blocks is larger than a bucket.
        """
        del self._buckets[tensor.device]
        kept = tuple(other.segment for other in self._buckets.values())
        await self._ask(messages.Push(refit=self._refit, segments=kept, refs=()))
        bucket.close()
        self._buckets[tensor.device] = self._make_bucket(tensor.device, tensor.nbytes)
        return self._buckets[tensor.device]

    def _make_bucket(self, device: torch.device, num_bytes: int) -> Bucket:
        return Bucket(num_bytes, device if device.type == "cuda" else None)

    async def _ask(self, order: messages.Order) -> list[Reply]:
        """Give an order to every rank and hear from each.

        Raises:
            RefitError: What the ranks agreed on, or what some of them could not do.
            EngineLostError: They cannot be reached any more.
        """
        self._check_is_there()
        held, self._held = self._held, None  # whatever else is asked for first ends it
        self._flush_s = 0.0
        request = Request(id=uuid.uuid4().hex, order=order)
        try:
            if held is not None and isinstance(order, messages.Write | messages.Take):
                replies = await self._exchange_pair(held, request)
            else:
                answers = await self._channel.call(request.encode(), timeout_s=self._timeout_s(order))
                replies = _replies(answers, request)
        except EngineLostError as lost:
            self._lost_because, self.is_dirty = str(lost), True
            raise
        versions = {reply.version for reply in replies}
        self.is_dirty = len(versions) > 1 or any(reply.is_dirty for reply in replies)
        self.version = min(versions)
        failed = {rank: reply.error for rank, reply in enumerate(replies) if reply.error is not None}
        if failed:
            error = merge_errors(failed, num_ranks=len(replies), is_agreed=len(failed) == len(replies))
            if isinstance(error, EngineLostError):
                self._lost_because = str(error)
            raise error
        return replies

    async def _exchange_pair(self, held: Request, request: Request) -> list[Reply]:
        """Give the ranks what was held and, if all could do that, a request. Replies are those to the last they were given."""
        assert self._pairs is not None, "something was held"
        timeouts_s = self._timeout_s(held.order), self._timeout_s(request.order)
        pair = await self._pairs.call_pair(held.encode(), request.encode(), timeouts_s=timeouts_s)
        self._flush_s, self.has_refused = pair.flush_s, pair.is_refused
        return _replies(pair.answers, held if pair.is_refused else request)

    def _hold(self, order: messages.Prepare) -> bool:
        """Keep an order for the exchange of the next one; False if the engine is not to be given both at once."""
        if self._pairs is None or self._config.in_flight == "abort":
            return False
        self._check_is_there()
        self._held = Request(id=uuid.uuid4().hex, order=order)
        return True

    def _reports(self, replies: Sequence[Reply]) -> Sequence[RankReport]:
        """What each rank wrote, and how long the engine dropped its caches meanwhile."""
        if not self._flush_s:
            return replies[0].reports
        return [report.model_copy(update={"flush_s": self._flush_s}) for report in replies[0].reports]

    def _timeout_s(self, order: messages.Order) -> float:
        """How long to wait for the ranks."""
        return min(self._num_votes(order) * self._config.timeout_s + GRACE_S, LONGEST_WAIT_S)

    def _num_votes(self, order: messages.Order) -> int:
        """How often the ranks may wait for each other until they answer."""
        sets_scales = isinstance(order, messages.Write | messages.Finish) and self._sets_kv_scales
        if isinstance(order, messages.Prepare | messages.Calibrate) or sets_scales:
            return NUM_VOTES
        if isinstance(order, messages.Take):  # each bucket, the votes of these ranks, and those of the other engines
            return self._num_buckets + 2 * NUM_VOTES
        return 1

    def _check_is_there(self) -> None:
        if self._lost_because is not None:
            raise EngineLostError(self._lost_because)

    async def _or_give_up(self, step: Awaitable[T]) -> T:
        """On an error let the ranks go of what was prepared. After a lost rank the source stays: somebody may still read it."""
        with Caught() as caught:
            return await step
        self._mapped_digest = ""
        with contextlib.suppress(RefitError):
            await self._ask(messages.Abandon(refit=self._refit))
        if self._lost_because is None:
            self._source = None
        self._is_broadcast = False
        raise caught.take()


def _read(answer: str) -> Reply:
    """What a rank said.

    Raises:
        EngineLostError: It is an answer to something else than a request of ours.
        RankFailedError: It is nothing that this version knows.
    """
    try:
        reply = Reply.model_validate_json(answer)
    except ValidationError as error:
        if not (isinstance(answer, str) and answer.startswith('{"id":')):
            raise EngineLostError(f"a rank answered {shorten(repr(answer), 80)}: {_LOST_STEP}") from error
        raise RankFailedError(
            f"a rank answered what fp8refit {__version__} cannot read; install the same version for every process "
            f"({messages.first_problem(error)})"
        ) from error
    if reply.protocol != PROTOCOL:
        raise RankFailedError(
            f"a rank, fp8refit {reply.package_version}, speaks protocol {reply.protocol} and this process, fp8refit "
            f"{__version__}, speaks {PROTOCOL}; install the same version for every process"
        )
    return reply


def _replies(answers: Sequence[str], request: Request) -> list[Reply]:
    """What the ranks answered to a request.

    Raises:
        EngineLostError: One answered something else.
        RankFailedError: It is nothing that this version knows.
    """
    replies = [_read(answer) for answer in answers]
    if not replies:
        raise EngineLostError("no rank of the engine answered; start the engine again")
    stale = [rank for rank, reply in enumerate(replies) if not reply.is_to(request)]
    if stale:
        raise EngineLostError(f"rank(s) {', '.join(map(str, stale))} answered an earlier request: {_LOST_STEP}")
    return replies
