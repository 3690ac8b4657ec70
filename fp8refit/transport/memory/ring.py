"""A stream of texts from one process to an engine's ranks, through shared memory, without waiting for answers.

Up to two texts may be pending. Each describes one of two sets of buckets. Once all ranks have read a set, it is filled
again. Nothing here waits: readers poll, and leave if nothing comes.
"""

from collections.abc import Callable
from enum import IntEnum
from threading import Lock
from typing import Self

import torch
from torch import Tensor

from fp8refit.errors import RankFailedError, TransportError
from fp8refit.transport.memory.memfd import make_memfd, map_memfd
from fp8refit.transport.memory.segment import Segment

NUM_SETS = 2
MAX_RANKS = 1024
_TEXT_BYTES = 16 << 20
_SENT, _CALLED, _LENGTHS = 0, 1, 2
_TAKEN = _LENGTHS + NUM_SETS
_LEFT = _TAKEN + MAX_RANKS
_NUM_WORDS = _LEFT + MAX_RANKS
_NUM_BYTES = _NUM_WORDS * 8 + NUM_SETS * _TEXT_BYTES


class Call(IntEnum):
    """What the sender last said to the readers."""

    STAY = 0
    BACK = 1
    """Leave once there is nothing to read."""
    OVER = 2
    """Nothing more will come."""


class Ring:
    """One end of the ring. The sender calls `make`, readers call `find`. Unused memory takes no room.

    Args:
        segment: The ring's memory.
        memory: The same memory, mapped.
    """

    def __init__(self, segment: Segment, memory: Tensor) -> None:
        self.segment = segment
        self._words = memory[: _NUM_WORDS * 8].view(torch.int64).numpy()
        self._texts = memory[_NUM_WORDS * 8 :].view(NUM_SETS, _TEXT_BYTES).numpy()
        self._close: Callable[[], None] = lambda: None
        self._lock = Lock()

    @classmethod
    def make(cls) -> Self:
        """Create a ring in this process."""
        segment, memory, close = make_memfd(_NUM_BYTES)
        ring = cls(segment, memory)
        ring._close = close
        return ring

    @classmethod
    def find(cls, segment: Segment) -> Self:
        """Open the ring of another process.

        Raises:
            TransportError: It cannot be mapped, or is not a ring.
        """
        if segment.num_bytes != _NUM_BYTES:
            raise TransportError(f"segment {segment.id} has {segment.num_bytes} bytes, so it is not a ring of texts")
        return cls(segment, map_memfd(segment))

    def close(self) -> None:
        """Close its handle."""
        close, self._close = self._close, lambda: None
        close()

    # The sender's end.

    def begin(self) -> None:
        """Start over: nothing was sent, and nobody reads."""
        self._words[:] = 0

    @property
    def num_sent(self) -> int:
        """Number of texts sent."""
        return int(self._words[_SENT])

    def num_taken(self, num_ranks: int) -> int:
        """Return how many texts every rank has taken, with the buckets they describe."""
        num_taken = int(self._words[_TAKEN : _TAKEN + num_ranks].min())
        self._keep_order()
        return num_taken

    def send(self, text: str) -> None:
        """Send the next text. Every rank must have taken all earlier ones but the last.

        Raises:
            RankFailedError: It is too long.
        """
        content = text.encode()
        if len(content) > _TEXT_BYTES:
            raise RankFailedError(f"the names of one bucket take {len(content)} bytes, more than can be sent at once")
        place = self.num_sent % NUM_SETS
        self._texts[place, : len(content)] = memoryview(content)
        self._words[_LENGTHS + place] = len(content)
        self._keep_order()
        self._words[_SENT] += 1

    def expect_readers(self) -> None:
        """Expect every rank to read, from now on."""
        self._words[_CALLED] = 0
        self._words[_LEFT : _LEFT + MAX_RANKS] = 0

    def call_back(self, call: Call = Call.BACK) -> None:
        """Let readers leave as soon as there is nothing to read, and say why."""
        self._keep_order()
        self._words[_CALLED] = call

    def is_left(self, num_ranks: int) -> bool:
        """Whether a rank has stopped reading."""
        return bool(self._words[_LEFT : _LEFT + num_ranks].any())

    # The readers' end.

    @property
    def call(self) -> Call:
        """Whether readers may leave once there is nothing to read, and why."""
        call = Call(int(self._words[_CALLED]))
        self._keep_order()
        return call

    def num_taken_by(self, rank: int) -> int:
        """Return how many texts a rank has taken."""
        return int(self._words[_TAKEN + rank])

    def receive(self, num_received: int) -> str | None:
        """Return the text after the first `num_received`, if it has arrived."""
        if self.num_sent <= num_received:
            return None
        self._keep_order()
        place = num_received % NUM_SETS
        length = min(int(self._words[_LENGTHS + place]), _TEXT_BYTES)
        return bytes(self._texts[place, :length]).decode()

    def take(self, rank: int, num_taken: int) -> None:
        """Tell the sender how many texts a rank has taken. Their buckets may be overwritten."""
        self._keep_order()
        self._words[_TAKEN + rank] = num_taken

    def leave(self, rank: int) -> None:
        """Tell the sender that a rank has stopped reading."""
        self._words[_LEFT + rank] = 1

    def _keep_order(self) -> None:
        """A memory barrier: earlier reads and writes become visible to other processors before later ones."""
        for _ in range(2):
            self._lock.acquire()
            self._lock.release()
