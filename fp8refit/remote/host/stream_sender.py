"""Hands a stream to ranks in other processes of this host in buckets, without a round trip or a device wait per bucket.

The caller reads the source. Meanwhile the ranks carry out an order to write what arrives through a ring. They return
when nothing has arrived for some milliseconds, or after a fraction of a second, and get the order again. Between two
orders the engine can do other work, and a dead rank is noticed as in every order.
"""

import asyncio
import time
from collections.abc import Awaitable, Generator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from fp8refit.remote.host.packing import Packed, Packer
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import RankClient
from fp8refit.remote.protocol.messages import Reply
from fp8refit.sources.row_runs import MakesPieces, Piece, Recipe, in_recipes
from fp8refit.sources.source import Source
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.memory.ring import NUM_SETS, Call, Ring


class State(Enum):
    """How far a stream is, and whether ranks are at work on it."""

    NEW = "nothing was read"
    OPEN = "its first tensor is packed, and no rank was told"
    READ = "the ranks carry out an order to read the ring"
    UNREAD = "it goes on, and no rank is at work"
    STOPPING = "an error ended it, and the ranks were called back"
    DONE = "every rank has taken all of it and finished"
    FAILED = "an error ended it, and no rank is at work"
    LOST = "a rank died or does not answer"


class Event(Enum):
    """What leads from one state to the next."""

    OPEN = "the source was opened"
    ORDER = "the ranks were sent an order to read the ring"
    BEGIN = "the ranks got ready over a channel that sends nothing ahead: they read when they are called back"
    ANSWER = "the answers to the order are there, or are not waited for any more"
    FINISH = "the ranks have finished"
    FAIL = "the source, a bucket or a rank failed, or a rank was displaced"
    LOSE = "the channel says that a rank is lost"


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.NEW, Event.OPEN): State.OPEN,
        (State.OPEN, Event.ORDER): State.READ,
        (State.OPEN, Event.BEGIN): State.UNREAD,
        (State.OPEN, Event.FAIL): State.FAILED,
        (State.OPEN, Event.LOSE): State.LOST,
        (State.READ, Event.ANSWER): State.UNREAD,
        (State.READ, Event.FAIL): State.STOPPING,
        (State.READ, Event.LOSE): State.LOST,
        (State.UNREAD, Event.ORDER): State.READ,
        (State.UNREAD, Event.FINISH): State.DONE,
        (State.UNREAD, Event.FAIL): State.FAILED,
        (State.UNREAD, Event.LOSE): State.LOST,
        (State.STOPPING, Event.ANSWER): State.FAILED,
        (State.STOPPING, Event.LOSE): State.LOST,
    }
)
"""All that may happen to a stream. A source that cannot be opened leaves it new."""

_POLL_S, _SLOWEST_POLL_S = 2e-5, 1e-3
_SPINNING_S = 5e-3
"""Seconds to poll ranks without sleeping: the shortest sleep lasts as long as reading half a bucket. 1 GiB takes 2 ms."""
_PATIENCE_S = 0.25
"""Seconds to poll ranks that take nothing before waiting for their answer: they may have died."""


class StreamSender:
    """Hands one stream to the ranks. They have prepared for it, or do so with its first order.

    Args:
        client: Sends orders to the ranks.
        packer: Packs the stream.
        ring: Tells the ranks what was packed.
        refit: Id of the refit.
        first: The order to prepare, if it is sent with the stream's first order.
        num_votes: How many votes the ranks hold at the end.

    Attributes:
        state: How far the stream is.
    """

    def __init__(
        self,
        client: RankClient,
        packer: Packer,
        ring: Ring,
        refit: str,
        *,
        first: Sequence[messages.Prepare] = (),
        num_votes: int = 1,
    ) -> None:
        self.state = State.NEW
        self._client, self._packer, self._ring = client, packer, ring
        self._first, self._num_votes = first, num_votes
        self._order = messages.Stream(refit=refit, ring=ring.segment)
        self._packed: Packed | None = None
        """The set whose text is sent once the device has packed it."""
        self._answers: Awaitable[Sequence[Reply]] | None = None
        """Replies to the order that ranks are at work on."""
        self._pieces: Generator[Piece | Recipe, None, None] | None = None
        """The rest of the source."""

    def open(self, source: Source, bucket_bytes: int) -> None:
        """Start reading a source, and allocate the memory that it goes through. The ranks are not told yet.

        Raises:
            InvalidSourceError: Its first tensor is one that no rank could take.
            StagingMemoryError: No room for the buckets.
            BaseException: What reading the source raised.
        """
        assert self.state is State.NEW, "a sender has one stream"
        self._ring.begin()
        self._packer.begin(bucket_bytes, source if isinstance(source, MakesPieces) else None)
        self._pieces = in_recipes(source, bucket_bytes)
        first = next(self._pieces, None)
        if first is not None:
            self._packer.reserve(first.tensor)
            self._packer.put(first)
        self._go(Event.OPEN)

    def close(self) -> None:
        """Stop reading the source."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            pieces.close()
        self._packer.end()

    async def hand_over(self) -> Sequence[Reply]:
        """Read the source that was opened to its end, and return when every rank has taken all of it and finished.

        However this ends, no rank is still working on the stream, unless the engine is lost.

        Returns:
            What the ranks replied to the order to finish.

        Raises:
            InvalidSourceError: A tensor that no rank could take.
            RefitError: What a rank failed with.
            BaseException: What reading the source raised.
        """
        assert self.state is State.OPEN and self._pieces is not None, "open() comes first"
        packer = self._packer
        with ErrorCapture() as failed:
            await self._begin()
            for piece in self._pieces:
                if not packer.has_room(piece):
                    await self._open_set(piece)
                packer.put(piece)
                del piece  # nothing of it is held while the next one is read
                if self._packed is not None:
                    await self._tell()
            if not self._packer.is_empty:
                await self._seal()
            return await self._finish()
        self.close()
        await self._stop()
        raise failed.take()

    async def _stop(self) -> None:
        """End the stream after an error."""
        self._ring.call_back()
        if self.state is not State.LOST:
            self._go(Event.FAIL if self._client.lost_because is None else Event.LOSE)
        with ErrorCapture():
            await self._hear()

    def _go(self, event: Event) -> None:
        assert (self.state, event) in TRANSITIONS, f"{event} while {self.state}"
        self.state = TRANSITIONS[self.state, event]

    async def _begin(self) -> None:
        """Make the ranks get ready and read the ring, without waiting for them if possible."""
        await self._order_reading(*self._first, self._order.model_copy(update={"begins": True}))
        if self.state is State.OPEN:
            await self._client.ask(messages.RefitStep(step="begin", refit=self._order.refit))
            self._go(Event.BEGIN)

    async def _order_reading(self, *orders: messages.Order) -> None:
        self._ring.expect_readers()
        self._answers = await self._client.begin(*orders, num_votes=self._num_votes)
        if self._answers is not None:
            self._go(Event.ORDER)

    async def _open_set(self, piece: Piece | Recipe) -> None:
        """Open another set of buckets with room for a piece.

        Replaces a bucket that is smaller than a single row of blocks.
        """
        await self._seal()
        await self._wait_for_set()
        while not self._packer.has_room(piece):
            self._packer.drop_bucket(piece.tensor.device)
            await self._seal()  # which makes every rank unmap it
            await self._catch_up()
            self._packer.free_dropped()
            self._packer.open_set()

    async def _wait_for_set(self) -> None:
        """Wait until every rank has read the next set of buckets, and clear it."""
        start_s, pause_s = time.monotonic(), _POLL_S
        while self._ring.num_taken(self._client.num_ranks) <= self._packer.num_packed - NUM_SETS:
            await self._tell()
            if not self._is_read or time.monotonic() - start_s > _PATIENCE_S:
                await self._catch_up()
                break
            is_spinning = time.monotonic() - start_s < _SPINNING_S
            if self._client.channel.is_asynchronous:
                await asyncio.sleep(0 if pause_s < _SLOWEST_POLL_S else pause_s)
            else:
                time.sleep(0 if is_spinning else pause_s)
            pause_s = pause_s if is_spinning else min(1.1 * pause_s, _SLOWEST_POLL_S)
        self._packer.open_set()

    async def _seal(self) -> None:
        """Close the filled set. Its text is sent as soon as the device has packed it."""
        await self._tell(waits=True)
        self._packed = self._packer.seal()
        await self._tell()

    async def _tell(self, *, waits: bool = False) -> None:
        """Send the text of the packed set if the device is done, or wait for that."""
        packed = self._packed
        if packed is None or not (waits or packed.is_done()):
            return
        packed.wait()
        self._packed = None
        self._ring.send(packed.text)
        if not self._is_read:
            await self._hear()
            await self._order_reading(self._order)

    @property
    def _is_read(self) -> bool:
        """Whether every rank reads the ring."""
        return self.state is State.READ and not self._ring.is_left(self._client.num_ranks)

    async def _catch_up(self, call: Call = Call.BACK) -> Sequence[Reply]:
        """Wait until the ranks have taken everything packed. Returns the reports of ranks that then finished."""
        await self._tell(waits=True)
        self._ring.call_back(call)
        finished = [reply for reply in await self._hear() if reply.reports]
        # Every order takes one text at least. A slow rank may leave another.
        while not finished and self._ring.num_taken(self._client.num_ranks) < self._ring.num_sent:
            self._ring.expect_readers()
            self._ring.call_back()
            self._answers = self._client.ask(self._order)
            self._go(Event.ORDER)
            await self._hear()
        return finished

    async def _finish(self) -> Sequence[Reply]:
        """Make the ranks take what is left, and commit.

        A single rank does so within the order that it carries out. Several could not know whether another one has just
        left.
        """
        finished = await self._catch_up(Call.OVER if self._client.num_ranks == 1 else Call.BACK)
        order = messages.RefitStep(step="finish", refit=self._order.refit)
        replies = finished or await self._client.ask(order, num_votes=self._num_votes)
        self._go(Event.FINISH)
        return replies

    async def _hear(self) -> Sequence[Reply]:
        """Wait until no rank is at work. Returns the replies to the order, if there was one."""
        answers, self._answers = self._answers, None
        if answers is None:
            return ()
        try:
            return await answers
        finally:
            self._go(Event.ANSWER if self._client.lost_because is None else Event.LOSE)
