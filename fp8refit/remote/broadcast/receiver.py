"""The rank's side of a broadcast: joins the trainer's group, and writes what arrives, bucket by bucket."""

import hashlib
import logging
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.errors import RankFailedError, RefitError, TransportError
from fp8refit.fill.fills import Prepared
from fp8refit.fill.from_buckets import ReceivedSource
from fp8refit.ranks.rank import Rank
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import NUM_VOTES
from fp8refit.report import PhaseClock, RankReport
from fp8refit.transport.collective.buckets import NUM_BUFFERS, BucketLayout, largest_bytes, lay_out, take_buffers
from fp8refit.transport.collective.communicator import Communicator
from fp8refit.transport.collective.header import Status, read_header
from fp8refit.transport.collective.links import Transfer
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.vote import ErrorRecord

logger = logging.getLogger(__name__)


class Receiver:
    """Receives broadcasts on one rank. Keeps its membership, buffers and the last offer between refits.

    Args:
        rank: The rank to write. Buffers are on its device.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._communicator: Communicator | None = None
        self._token = ""
        """That of the group in which the offered source arrives."""
        self._buffers: tuple[Tensor, ...] = ()
        self._source: tuple[tuple[str, int | None], ReceivedSource] | None = None
        self._arriving: deque[Transfer] = deque()
        """Buckets being received, in order."""

    def join(self, order: messages.Join) -> None:
        """Join the trainer's group, and leave the previous one.

        Raises:
            TransportError: A member did not join in time, or cannot be connected to.
        """
        self.leave()
        rank = order.first_rank + self._rank.group.rank
        communicator = Communicator.find(order.meeting, rank, timeout_s=order.timeout_s)
        communicator.join(self._rank.target.live.device, timeout_s=order.timeout_s)
        self._communicator = communicator

    def source(self, offer: messages.Broadcast) -> ReceivedSource:
        """The offered source, with the buffers in which it will arrive.

        Raises:
            TransportError: This rank is not in the trainer's group.
            RankFailedError: It does not know the offer.
            StagingMemoryError: There is no room for the buffers.
        """
        self._token = offer.token
        communicator = self._require()
        if offer.sections != communicator.meeting.sections:
            raise TransportError("this rank joined the trainer's group for other sections; refit again")
        known_as = offer.digest, communicator.section
        if offer.tensors is not None:
            if digest_of(offer) != offer.digest:
                raise RankFailedError("the offer of a broadcast does not match its digest; refit again")
            self._source = None
            buckets = lay_out(offer.tensors, offer.bucket_bytes, offer.num_sections)
            if communicator.section is not None:
                buckets = tuple(bucket.of_section(communicator.section) for bucket in buckets)
            source = ReceivedSource(
                offer.tensors,
                buckets,
                self._take_buffers(buckets),
                problems=offer.problems,
                odd_scales=offer.odd_scales,
                unfit=offer.unfit,
            )
            self._source = known_as, source
        elif self._source is None or self._source[0] != known_as:
            raise TransportError("this rank no longer knows what the last refit announced; refit again")
        return self._source[1]

    def receive_ahead(self, config: RefitConfig) -> None:
        """Start receiving the first buckets, one per buffer, before `take`. The trainer is already sending.

        Raises:
            TransportError: A member is gone or gave up.
        """
        assert self._source is not None, "receive_ahead() follows source()"
        self._begin_next(self._require(), self._source[1], config, num_taken=0)

    def recall(self) -> None:
        """Discard buckets being received, because `take` will not follow. Leaving the group is the only way to end
        broadcasts.
        """
        if self._arriving:
            self.leave()

    def take(self, order: messages.Take, prepared: Prepared) -> list[RankReport]:
        """Receive and write every bucket, agree with all ranks of all engines that the policy is whole, and commit.

        A rank that cannot write keeps receiving, so that no other rank waits for it.

        Raises:
            RefitError: This rank, another one, or the trainer failed. The rank is dirty.
        """
        assert self._source is not None, "take() follows source()"
        communicator, source, clock = self._require(), self._source[1], PhaseClock()
        with ErrorCapture() as failed:
            self._receive(communicator, source, order.refit, prepared, clock)
        timeout_s = NUM_VOTES * prepared.config.timeout_s

        def confirm(error: BaseException | None) -> None:
            with clock.phase("agree"):
                communicator.agree(error, timeout_s=timeout_s)

        try:
            with clock.phase("finish"):
                return self._rank.finish(prepared, version=order.version, error=failed.error, confirm=confirm)
        finally:
            self.recall()  # after an error that the trainer does not know of
            logger.debug("took %d buckets in %s s", len(source.buckets), clock.phases_s)

    def leave(self) -> None:
        """Leave the group, but keep the offer."""
        communicator, self._communicator = self._communicator, None
        self._arriving.clear()
        if communicator is not None:
            communicator.abort()

    def forget(self) -> None:
        """Leave the group, and free the buffers."""
        self.leave()
        self._source, self._buffers = None, ()

    def _receive(
        self, communicator: Communicator, source: ReceivedSource, refit: str, prepared: Prepared, clock: PhaseClock
    ) -> None:
        """Receive every bucket; further ones arrive while one is written.

        Raises:
            RefitError: The first failure, once nothing is pending.
        """
        config, timeout_s = prepared.config, prepared.config.timeout_s
        with ErrorCapture() as failed:
            self._rank.target.begin(prepared)
        for ordinal in range(len(source.buckets)):
            with clock.phase("begin"):
                self._begin_next(communicator, source, config, num_taken=ordinal)
            with clock.phase("wait"):
                communicator.wait(self._arriving.popleft(), timeout_s=timeout_s)
            if read_header(source.buffer(ordinal), ordinal) is Status.NOTHING:
                while self._arriving:
                    communicator.wait(self._arriving.popleft(), timeout_s=timeout_s)
                said = communicator.receive(refit)
                raise ErrorRecord.model_validate_json(said[0]).error() if said else _gave_up()
            if failed.error is None:
                with clock.phase("fill"), ErrorCapture() as failed:
                    self._rank.target.push()
        if failed.error is not None:
            raise failed.take()

    def _begin_next(
        self, communicator: Communicator, source: ReceivedSource, config: RefitConfig, *, num_taken: int
    ) -> None:
        """Start receiving the next buckets, as far as there are free buffers.

        Args:
            communicator: The group.
            source: The announced source.
            config: Options of the refit.
            num_taken: Number of buckets received, whose writes are queued on the current stream.
        """
        begun, end = num_taken + len(self._arriving), min(num_taken + len(source.buffers), len(source.buckets))
        for ordinal in range(begun, end):
            shared, *own = source.buckets[ordinal].portions(source.buffer(ordinal))
            section = communicator.section
            sections = {section: own[0]} if section is not None and own[0].numel() else {}
            self._arriving.append(communicator.broadcast(shared, sections=sections, timeout_s=config.timeout_s))

    def _require(self) -> Communicator:
        """The group in which the offered source arrives.

        Raises:
            TransportError: This rank is in no group, or in another.
        """
        communicator = self._communicator
        if communicator is None or not communicator.is_joined or communicator.meeting.token != self._token:
            raise TransportError(
                "this rank is not in the trainer's broadcast group: the engine was restarted, or another trainer has "
                "refitted it; refit again"
            )
        return communicator

    def _take_buffers(self, buckets: Sequence[BucketLayout]) -> tuple[Tensor, ...]:
        """Buffers large enough for every bucket, reused if possible.

        Raises:
            StagingMemoryError: There is not enough memory.
        """
        num_bytes, device = largest_bytes(buckets), self._rank.target.live.device
        num_buffers = min(len(buckets), NUM_BUFFERS)
        kept = self._buffers[:num_buffers]
        if len(kept) < num_buffers or any(buffer.numel() < num_bytes or buffer.device != device for buffer in kept):
            self._buffers, kept = (), ()
            self._buffers = take_buffers(buckets, device, remedy="lower bucket_bytes or leave the engine less memory")
        return self._buffers


def digest_of(offer: messages.Broadcast) -> str:
    """SHA-256 over an offer, without its digest and group."""
    said = offer.model_copy(update={"token": "", "digest": ""})
    return hashlib.sha256(said.encode().encode()).hexdigest()


def _gave_up() -> RefitError:
    return RankFailedError("the trainer gave up in the middle of a refit; refit again")
