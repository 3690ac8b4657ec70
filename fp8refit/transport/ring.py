"""A stream of messages from one process to the ranks of an engine, through memory of this host: none waits for an answer.

Two messages may be on their way. Each tells what lies in one of two sets of buckets; a rank says when it has read that, and the
set is filled anew. Waiting is looking, at first every few microseconds.
"""

import time
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from fp8refit.errors import RankFailedError, TransportError
from fp8refit.transport.memfd import make_memfd, map_memfd
from fp8refit.transport.segment import Segment

NUM_SETS = 2
MAX_RANKS = 1024
_TEXT_BYTES = 16 << 20
_SENT, _STATE, _LENGTHS, _TAKEN = 0, 1, 2, 2 + NUM_SETS
_FAILED = _TAKEN + MAX_RANKS
_NUM_WORDS = _FAILED + MAX_RANKS
_NUM_BYTES = _NUM_WORDS * 8 + NUM_SETS * _TEXT_BYTES
_OPEN, _COMPLETE, _GIVEN_UP = range(3)
_POLL_S, _SLOWEST_POLL_S, _LOOK_S = 2e-5, 1e-3, 0.5
"""How often is looked, at first and later; and how often, whether the other process is alive."""


class Ring:
    """One end of it. `make` it where messages come from, and `find` it where they go; memory that is not used takes no room.

    Args:
        segment: Where it is.
        memory: The same, mapped.
    """

    def __init__(self, segment: Segment, memory: Tensor) -> None:
        self.segment = segment
        self._words = memory[: _NUM_WORDS * 8].view(torch.int64).numpy()
        self._texts = memory[_NUM_WORDS * 8 :].view(NUM_SETS, _TEXT_BYTES).numpy()
        self._close: Callable[[], None] = lambda: None

    @classmethod
    def make(cls) -> Self:
        """A ring of this process."""
        segment, memory, close = make_memfd(_NUM_BYTES)
        ring = cls(segment, memory)
        ring._close = close
        return ring

    @classmethod
    def find(cls, segment: Segment) -> Self:
        """That of another process, or of this one.

        Raises:
            TransportError: It cannot be mapped, or is none.
        """
        if segment.num_bytes != _NUM_BYTES:
            raise TransportError(f"segment {segment.id} has {segment.num_bytes} bytes, and is no ring of messages")
        return cls(segment, map_memfd(segment))

    def begin(self) -> None:
        """Nothing was sent. Nobody reads yet."""
        self._words[:] = 0

    @property
    def num_sent(self) -> int:
        """How many messages were."""
        return int(self._words[_SENT])

    def num_taken(self, num_ranks: int) -> int:
        """How many messages every rank has read, and what they tell of.

        Raises:
            RankFailedError: One cannot go on; it says why in its answer.
        """
        if self._words[_FAILED : _FAILED + num_ranks].any():
            raise RankFailedError("a rank could not take what was sent; refit again")
        return int(self._words[_TAKEN : _TAKEN + num_ranks].min())

    def send(self, message: str) -> None:
        """Send the next message. Every rank has read all but the last of those before.

        Raises:
            RankFailedError: It is too long.
        """
        text = message.encode()
        if len(text) > _TEXT_BYTES:
            raise RankFailedError(f"the names of one bucket take {len(text)} bytes, more than can be sent at once")
        place = self.num_sent % NUM_SETS
        self._texts[place, : len(text)] = memoryview(text)
        self._words[_LENGTHS + place] = len(text)
        self._words[_SENT] += 1

    def end(self, *, is_complete: bool) -> None:
        """Let ranks know that nothing more comes: all came, or the rest does not."""
        self._words[_STATE] = _COMPLETE if is_complete else _GIVEN_UP

    def close(self) -> None:
        """Take its handle away."""
        close, self._close = self._close, lambda: None
        close()

    def receive(self, rank: int, num_received: int, *, timeout_s: float, meanwhile: Callable[[], None]) -> str | None:
        """Wait for a message; None if there is none after those that came, or if the rest does not come.

        Args:
            rank: Who receives.
            num_received: How many it did.
            timeout_s: How long to wait.
            meanwhile: Called while nothing comes.

        Raises:
            TransportError: The other process died, or sends nothing.
        """

        def has_come() -> bool:
            meanwhile()
            return self.num_sent > num_received or self._words[_STATE] != _OPEN

        process = self.segment.process
        wait_until(has_come, timeout_s=timeout_s, who="the trainer", is_alive=lambda: process.is_alive)
        if self.num_sent == num_received or self._words[_STATE] == _GIVEN_UP:
            return None  # whoever gave up says why
        place = num_received % NUM_SETS
        return bytes(self._texts[place, : int(self._words[_LENGTHS + place])]).decode()

    def take(self, rank: int, num_taken: int) -> None:
        """Let the sender know how many messages a rank has read, and what they tell of."""
        self._words[_TAKEN + rank] = num_taken

    def fail(self, rank: int) -> None:
        """Let the sender know that a rank cannot go on."""
        self._words[_FAILED + rank] = 1


def wait_until(
    is_true: Callable[[], bool], *, timeout_s: float, who: str, is_alive: Callable[[], bool] = lambda: True
) -> None:
    """Look until something is so.

    Raises:
        TransportError: It takes too long, or is not to be waited for any more.
    """
    start_s = looked_s = time.monotonic()
    pause_s = _POLL_S
    while not is_true():
        now_s = time.monotonic()
        if now_s - start_s > timeout_s:
            raise TransportError(f"{who} did nothing for {timeout_s:g} s in the middle of a refit; refit again")
        if now_s - looked_s > _LOOK_S:
            looked_s = now_s
            if not is_alive():
                raise TransportError(f"{who} died in the middle of a refit; refit again")
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _SLOWEST_POLL_S)
