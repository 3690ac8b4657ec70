"""Hands a stream to ranks in other processes of this host in buckets, without a round trip or a device wait per bucket.

The caller reads the source. Meanwhile the ranks carry out an order to write what arrives through a ring. They return
when nothing has arrived for some milliseconds, or after a fraction of a second, and get the order again. Between two
orders the engine can do other work, and a dead rank is noticed as in every order.
"""

import asyncio
import time
from collections.abc import Awaitable, Generator, Sequence

from fp8refit.remote import messages
from fp8refit.remote.channel import RankClient
from fp8refit.remote.messages import Reply
from fp8refit.remote.packing import Packed, Packer
from fp8refit.sources.row_runs import MakesPieces, Piece, Recipe, in_recipes
from fp8refit.sources.source import Source
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.memory.ring import NUM_SETS, Call, Ring

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
        self._client, self._packer, self._ring = client, packer, ring
        self._first, self._num_votes = first, num_votes
        self._order = messages.Stream(refit=refit, ring=ring.segment)
        self._packed: Packed | None = None
        """The set whose text is sent once the device has packed it."""
        self._answers: Awaitable[Sequence[Reply]] | None = None
        """Replies to the current order."""
        self._pieces: Generator[Piece | Recipe, None, None] | None = None
        """The rest of the source."""

    def open(self, source: Source, bucket_bytes: int) -> None:
        """Start reading a source, and allocate the memory that it goes through. The ranks are not told yet.

        Raises:
            InvalidSourceError: Its first tensor is one that no rank could take.
            StagingMemoryError: No room for the buckets.
            BaseException: What reading the source raised.
        """
        self._ring.begin()
        self._packer.begin(bucket_bytes, source if isinstance(source, MakesPieces) else None)
        self._pieces = in_recipes(source, bucket_bytes)
        first = next(self._pieces, None)
        if first is not None:
            self._packer.reserve(first.tensor)
            self._packer.put(first)

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
        assert self._pieces is not None, "open() comes first"
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
        self._ring.call_back()
        with ErrorCapture():
            await self._hear()
        raise failed.take()

    async def _begin(self) -> None:
        """Make the ranks get ready and read the ring, without waiting for them if possible."""
        await self._order_reading(*self._first, self._order.model_copy(update={"begins": True}))
        if self._answers is None:
            await self._client.ask(messages.RefitStep(step="begin", refit=self._order.refit))

    async def _order_reading(self, *orders: messages.Order) -> None:
        self._ring.expect_readers()
        self._answers = await self._client.begin(*orders, num_votes=self._num_votes)

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
        return self._answers is not None and not self._ring.is_left(self._client.num_ranks)

    async def _catch_up(self, call: Call = Call.BACK) -> Sequence[Reply]:
        """Wait until the ranks have taken everything packed. Returns the reports of ranks that then finished."""
        await self._tell(waits=True)
        self._ring.call_back(call)
        finished = [reply for reply in await self._hear() if reply.reports]
        # Every order takes one text at least. A slow rank may leave another.
        while not finished and self._ring.num_taken(self._client.num_ranks) < self._ring.num_sent:
            self._ring.expect_readers()
            self._ring.call_back()
            await self._client.ask(self._order)
        return finished

    async def _finish(self) -> Sequence[Reply]:
        """Make the ranks take what is left, and commit.

        A single rank does so within the order that it carries out. Several could not know whether another one has just
        left.
        """
        finished = await self._catch_up(Call.OVER if self._client.num_ranks == 1 else Call.BACK)
        order = messages.RefitStep(step="finish", refit=self._order.refit)
        return finished or await self._client.ask(order, num_votes=self._num_votes)

    async def _hear(self) -> Sequence[Reply]:
        """Wait for the end of the current order, if there is one. Returns the replies to it."""
        answers, self._answers = self._answers, None
        return await answers if answers is not None else ()
