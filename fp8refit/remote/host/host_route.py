"""Gets a policy to ranks in other processes of this host.

Tensors that those processes can map are sent as handles, all at once; files as paths; everything else as a stream.
"""

import logging
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch

from fp8refit.config import Job
from fp8refit.errors import InvalidSourceError, RefitError, TensorsForgottenError
from fp8refit.live.collector import collector_paused
from fp8refit.live.slots import dtype_name
from fp8refit.remote.host.packing import Packer
from fp8refit.remote.host.stream_sender import StreamSender
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import NUM_VOTES, RankClient
from fp8refit.remote.protocol.messages import Reply
from fp8refit.remote.protocol.source_summary import summarize
from fp8refit.report import RankReport
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.source import MappingSource, Source
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.exporter import Export, Exporter
from fp8refit.transport.memory.ring import Ring

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Offer: TypeAlias = messages.MappedTensors | messages.Files | messages.Pushed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offered:
    """A policy that every rank has prepared to write or compare, or prepares together with that."""

    source: Source
    order: messages.Prepare
    """The order to prepare it."""
    waits: bool
    """Whether that is sent together with the write."""

    @property
    def first(self) -> tuple[messages.Prepare, ...]:
        """What is sent together with the write."""
        return (self.order,) if self.waits else ()


class HostRoute:
    """Offers policies to the ranks of one engine, and makes them write.

    Args:
        ranks: The engine's ranks.
    """

    def __init__(self, ranks: RankClient) -> None:
        self._ranks = ranks
        self._exporter = Exporter()
        self._packer = Packer(_make_bucket)
        self._ring: Ring | None = None
        self._mapped: Export | None = None
        """The tensors that the ranks have mapped, and keep while streams and files are refitted."""
        self._offered_digest = ""
        """Digest of the tensors that were refitted last."""
        self._streamed: messages.Pushed | None = None
        """How the stream that was refitted last was announced."""
        self._source: Source | None = None
        """The source that ranks may be reading."""

    async def prepare(self, source: Source, job: Job) -> Offered:
        """Make every rank check a policy. If it is announced as the last one was, the check may be sent together with the
        write.

        Raises:
            NonFiniteError: NaN or Inf, with `validate="strict"`, if this process reads the source.
            InvalidSourceError: It does not fit, or must be read twice and cannot be.
            RefitError: A rank's error.
        """
        with suppress(TensorsForgottenError):
            return await self._prepare_once(source, job)
        return await self._prepare_once(source, job)  # now they are sent in full

    async def _prepare_once(self, source: Source, job: Job, *, is_again: bool = False) -> Offered:
        self._source = source
        return await self.or_abandon(self._prepare(source, job, is_again=is_again))

    async def _prepare(self, source: Source, job: Job, *, is_again: bool) -> Offered:
        ranks, ranks.refit = self._ranks, uuid.uuid4().hex
        # Before the first refit ranks take seconds to read their layout. If their engine can, they do so while the policy is
        # described here.
        reading = None if ranks.version else await ranks.begin(messages.Do(step="read"), num_votes=NUM_VOTES)
        try:
            offer = self._offer(source, job)
        finally:  # the next order, even one to abandon the refit, must follow the answers
            if reading is not None:
                await reading
        order = messages.Prepare(refit=ranks.refit, job=job, source=offer, keeps=self.keeps(offer))
        is_stream = isinstance(offer, messages.Pushed)
        is_known = offer == self._streamed if is_stream else order.is_known
        waits = (is_known or is_again) and job.kv is None and not job.compares and ranks.takes_pairs(begins=is_stream)
        if not waits:
            await ranks.ask(order)
        if isinstance(offer, messages.Pushed) and not job.compares:
            self._streamed = offer
        if isinstance(offer, messages.MappedTensors):
            self._mapped = self._exporter.last
            if not job.compares:
                self._offered_digest = offer.digest
        return Offered(source=source, order=order, waits=waits)

    async def write(self, offered: Offered) -> Sequence[RankReport]:
        """Make every rank write what was prepared, or compare it. Returns one report per rank.

        No rank writes anything before the first tensor of a stream was read, and there is memory for it.

        Raises:
            InvalidSourceError: A stream is not as announced.
            StagingMemoryError: There is no room for a stream's buckets.
            RefitError: A rank's error.
            BaseException: Whatever reading a stream raised.
        """
        with ErrorCapture() as failed:
            return await self._write_once(offered)
        if not isinstance(failed.error, TensorsForgottenError):
            raise failed.take()
        failed.error = None  # its traceback would keep the source
        # Nothing is written. Now they are sent in full, with the write again, because caches are dropped in between.
        again = await self._prepare_once(offered.source, offered.order.job, is_again=True)
        if not again.waits:  # they can no longer be mapped
            await self.abandon()
            raise TensorsForgottenError("the ranks no longer have the tensors of the last refit; refit again")
        return await self._write_once(again)

    async def _write_once(self, offered: Offered) -> Sequence[RankReport]:
        if not offered.order.job.compares:
            self._ranks.is_dirty = True
        replies = await self.or_abandon(self._write(offered))
        self._ranks.refit, self._source = "", None
        return self._ranks.reports(replies)

    async def _write(self, offered: Offered) -> Sequence[Reply]:
        ranks, job = self._ranks, offered.order.job
        num_votes = NUM_VOTES if job.kv is not None else 1
        if not isinstance(offered.order.source, messages.Pushed):
            order = messages.RefitStep(step="write", refit=ranks.refit)
            replies: Sequence[Reply] = await ranks.ask(*offered.first, order, num_votes=num_votes)
        else:
            if self._ring is None:
                self._ring = Ring.make()
            sender = StreamSender(
                ranks, self._packer, self._ring, ranks.refit, first=offered.first, num_votes=num_votes
            )
            with closing(sender):
                sender.open(offered.source, job.config.bucket_bytes)
                try:
                    replies = await sender.hand_over()
                except InvalidSourceError as error:
                    is_written = ranks.is_dirty and not ranks.has_refused
                    raise InvalidSourceError(error.problems, written=is_written) from error
        if not job.compares:
            ranks.check_is_one_policy(replies)
        if "tensors" not in offered.order.keeps:
            self._mapped = None
        return replies

    def keeps(self, offer: _Offer | None = None) -> tuple[Literal["tensors", "buckets"], ...]:
        """What stays mapped; see `messages.Prepare`.

        Tensors do if they lie where the last ones did: a trainer that gathers into new memory every time needs it back. Those
        of an earlier refit do beside a stream or files, unless the trainer has freed them.

        Args:
            offer: What is refitted next; None for a broadcast.
        """
        if isinstance(offer, messages.MappedTensors):
            keeps_tensors = offer.digest == self._offered_digest
        else:
            if self._mapped is not None and not self._exporter.is_allocated(self._mapped):
                self._mapped = None
            keeps_tensors = self._mapped is not None
        tensors: tuple[Literal["tensors"], ...] = ("tensors",) if keeps_tensors else ()
        return (*tensors, "buckets") if self._packer.has_buckets else tensors

    async def or_abandon(self, step: Awaitable[T]) -> T:
        """Await a step of a refit, and abandon the refit if it fails."""
        with ErrorCapture() as failed:
            return await step
        with suppress(RefitError):
            await self.abandon()
        if self._ranks.lost_because is None:
            self._source = None
        raise failed.take()

    async def abandon(self) -> None:
        """Make the ranks drop what was prepared, if the refit is not over, and unmap what is shared.

        Raises:
            EngineLostError: They are lost. The source is kept, since one of them may be reading it.
        """
        refit, self._ranks.refit = self._ranks.refit, ""
        if refit:
            # A rank may be reading the ring until it has answered, so the next stream is not sent with its check.
            self._mapped = self._streamed = None
            await self._ranks.ask(messages.RefitStep(step="abandon", refit=refit))
        self._source = None

    def close(self) -> None:
        """Give back what this process shares; see `Packer.close`. It may be shared again."""
        self._mapped, self._offered_digest, self._streamed, self._source = None, "", None, None
        self._exporter.close()
        self._packer.close(may_be_read=self._ranks.lost_because is not None)
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    @collector_paused()
    def _offer(self, source: Source, job: Job) -> _Offer:
        """Describe how the ranks get the source's tensors."""
        if isinstance(source, SafetensorsSource):
            return messages.Files(path=str(Path(source.path).resolve()), stamps=source.stamps)
        if isinstance(source, MappingSource):
            export, problems = self._export(source)
            for device in export.gpus:
                torch.cuda.synchronize(device)  # the trainer must have finished computing what is read
            if not export.leftover:
                if self._mapped is not None and export.digest == self._mapped.digest and not problems:
                    return messages.MappedTensors(digest=export.digest)
                return messages.MappedTensors(
                    digest=export.digest, segments=export.segments, refs=export.refs, problems=problems
                )
            if export.refs:
                logger.warning(
                    "%d of %d tensors (%s first) cannot be mapped by the engine's processes: all of them go through buckets",
                    len(export.leftover),
                    len(source.tensors),
                    export.leftover[0],
                )
        said = summarize(source, job.config)
        if said is None:
            return messages.Pushed(manifest=None)
        manifest = {name: (meta.shape, dtype_name(meta.dtype)) for name, meta in said.metadata.items()}
        return messages.Pushed(
            manifest=manifest, problems=tuple(said.problems), odd_scales=said.odd_scales, unfit=said.unfit
        )

    def _export(self, source: MappingSource) -> tuple[Export, tuple[str, ...]]:
        """Return references to the tensors, and the problems of those that cannot be read.

        If no tensor has changed its address or layout since last time, none is checked again.
        """
        export = self._exporter.again(source.sent_names, source.sent)
        if export is not None:
            return export, ()
        known_as = None if source.problems else source.sent_names
        return self._exporter.export(source.tensors, known_as), source.problems


def _make_bucket(device: torch.device, num_bytes: int) -> Bucket:
    return Bucket(num_bytes, device if device.type == "cuda" else None)
