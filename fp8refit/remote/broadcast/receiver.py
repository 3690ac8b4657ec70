"""The rank's side of a broadcast: joins the trainer's group, and writes what arrives, bucket by bucket."""

import hashlib
import logging
from collections import deque
from collections.abc import Sequence

import torch
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
from fp8refit.transport.memory.cuda_driver import CudaDriver
from fp8refit.transport.running import InThread
from fp8refit.transport.vote import ErrorRecord

logger = logging.getLogger(__name__)

MARGIN_BYTES = 4 << 30
"""GPU memory that stays free if buckets are received ahead without being told to."""


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
        self._ahead: InThread[None] | None = None
        """Receives all of them, while requests run."""
        self._stream: torch.cuda.Stream | None = None
        """The current stream of that thread."""

    def join(self, order: messages.Join) -> int:
        """Join the trainer's group, and leave the previous one.

        Returns:
            How many bytes of buckets the GPU has room for, so that `MARGIN_BYTES` stay free. 0 without NCCL, and where the
            engine may take more: in sleep mode, or if memory is allocated in expandable segments.

        Raises:
            TransportError: A member did not join in time, or cannot be connected to.
        """
        self.leave()
        rank = order.first_rank + self._rank.group.rank
        communicator = Communicator.find(order.meeting, rank, timeout_s=order.timeout_s)
        device = self._rank.target.live.device
        communicator.join(device, timeout_s=order.timeout_s)
        self._communicator = communicator
        if order.meeting.backend != "nccl" or self._may_sleep():
            return 0
        held = sum(buffer.nbytes for buffer in self._buffers)
        return max(torch.cuda.mem_get_info(device)[0] + held - MARGIN_BYTES, 0)

    def _may_sleep(self) -> bool:
        """Whether the memory of the weights may be unmapped, so that another process cannot map it."""
        inventory, driver = self._rank.target.live.inventory, CudaDriver()
        if inventory is None or not inventory.slots:
            return True
        base, _ = driver.allocation_of(inventory.slots[0].weight.data_ptr())
        return driver.ipc_handle(base) is None

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
                self._take_buffers(buckets, is_ahead=offer.is_ahead),
                problems=offer.problems,
                odd_scales=offer.odd_scales,
                unfit=offer.unfit,
            )
            self._source = known_as, source
        elif self._source is None or self._source[0] != known_as:
            raise TransportError("this rank no longer knows what the last refit announced; refit again")
        return self._source[1]

    def receive_ahead(self, config: RefitConfig, *, all_of_it: bool) -> None:
        """Start receiving buckets before `take`: one per buffer, which the trainer is already sending; or all, in a thread.

        Raises:
            TransportError: A member is gone or gave up.
        """
        assert self._source is not None, "receive_ahead() follows source()"
        communicator, source = self._require(), self._source[1]
        if all_of_it:
            device = self._rank.target.live.device
            if device.type == "cuda":
                if self._stream is None:  # one of normal priority could be the engine's
                    self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
                self._stream.wait_stream(
                    torch.cuda.current_stream(device)
                )  # a write that failed may still read the buffers
            self._ahead = InThread(self._receive_all(communicator, source, config))
        else:
            self._begin_next(communicator, source, config, num_taken=0)

    @property
    def is_ahead(self) -> bool:
        """Whether everything is being received, or was, before `take`."""
        return self._ahead is not None

    def recall(self) -> None:
        """Discard buckets being received, because `take` will not follow. Leaving the group is the only way to end
        broadcasts.
        """
        if self._arriving or self.is_ahead:
            self.leave()

    def take(self, order: messages.Take, prepared: Prepared) -> list[RankReport]:
        """Receive and write every bucket, agree with all ranks of all engines that the policy is whole, and commit.

        A rank that cannot write keeps receiving, so that no other rank waits for it.

        Raises:
            RefitError: This rank, another one, or the trainer failed. The rank is dirty.
        """
        assert self._source is not None, "take() follows source()"
        communicator, source, clock = self._require(), self._source[1], PhaseClock()
        ahead, self._ahead = self._ahead, None
        with ErrorCapture() as failed:
            if ahead is not None:
                with clock.phase("wait"):
                    ahead.result()
            self._receive(communicator, source, order.refit, prepared, clock, is_here=ahead is not None)
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
        ahead, self._ahead = self._ahead, None
        if communicator is not None and ahead is not None:
            communicator.expect_end(
                "a rank left the group", within_s=0
            )  # so that the thread ends, and no broadcast begins
            with ErrorCapture():
                ahead.result()
        if communicator is not None:
            communicator.abort()
        self._arriving.clear()

    def forget(self) -> None:
        """Leave the group, and free the buffers."""
        self.leave()
        self._source, self._buffers = None, ()

    async def _receive_all(self, communicator: Communicator, source: ReceivedSource, config: RefitConfig) -> None:
        """Receive every bucket into a buffer of its own, and agree with all members that all have come. Never suspends.

        Raises:
            RefitError: A member is gone or gave up, or the trainer's source is bad.
        """
        # Other engines are prepared before the first one comes.
        timeout_s = (1 + NUM_VOTES) * config.timeout_s
        with torch.cuda.stream(self._stream):
            for ordinal in range(len(source.buckets)):
                self._begin_next(communicator, source, config, num_taken=ordinal)
                communicator.wait(self._arriving.popleft(), timeout_s=timeout_s)
                timeout_s = config.timeout_s
                if read_header(source.buffer(ordinal), ordinal) is Status.NOTHING:
                    raise _gave_up()
        communicator.agree(None, timeout_s=config.timeout_s)

    def _receive(
        self,
        communicator: Communicator,
        source: ReceivedSource,
        refit: str,
        prepared: Prepared,
        clock: PhaseClock,
        *,
        is_here: bool,
    ) -> None:
        """Receive every bucket unless all `is_here`, and write it; further ones arrive while one is written.

        Raises:
            RefitError: The first failure, once nothing is pending.
        """
        config, timeout_s = prepared.config, prepared.config.timeout_s
        with ErrorCapture() as failed:
            self._rank.target.begin(prepared)
        for ordinal in range(len(source.buckets)):
            if not is_here:
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
        """Start receiving the next buckets, as far as there are free buffers, but not more than `NUM_BUFFERS`.

        Args:
            communicator: The group.
            source: The announced source.
            config: Options of the refit.
            num_taken: Number of buckets received, whose writes are queued on the current stream.
        """
        num_buffers = min(len(source.buffers), NUM_BUFFERS)
        begun, end = num_taken + len(self._arriving), min(num_taken + num_buffers, len(source.buckets))
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

    def _take_buffers(self, buckets: Sequence[BucketLayout], *, is_ahead: bool) -> tuple[Tensor, ...]:
        """Buffers large enough for every bucket, one for each if all arrive ahead; reused if possible.

        Raises:
            StagingMemoryError: There is not enough memory.
        """
        num_bytes, device = largest_bytes(buckets), self._rank.target.live.device
        num_buffers = len(buckets) if is_ahead else min(len(buckets), NUM_BUFFERS)
        fitting = [buffer for buffer in self._buffers if buffer.numel() >= num_bytes and buffer.device == device]
        self._buffers = tuple(fitting[:num_buffers])
        if lacking := num_buffers - len(self._buffers):
            del fitting
            remedy = 'set collective.stage="during"' if is_ahead else "lower bucket_bytes"
            remedy += ", or leave the engine less memory"
            self._buffers += take_buffers(buckets, device, remedy=remedy, count=lacking)
        return self._buffers


def digest_of(offer: messages.Broadcast) -> str:
    """SHA-256 over an offer, without its digest and group."""
    said = offer.model_copy(update={"token": "", "digest": ""})
    return hashlib.sha256(said.encode().encode()).hexdigest()


def _gave_up() -> RefitError:
    return RankFailedError("the trainer gave up in the middle of a refit; refit again")
