"""What a rank lets know whoever schedules its engine's requests, perhaps in another process: a few numbers in shared memory.

A worker of an engine does not reach its scheduler. The scheduler looks here before each of its steps, which costs less than a
microsecond.
"""

from typing import Self

import torch
from torch import Tensor

from fp8refit.transport.memfd import make_memfd, map_memfd
from fp8refit.transport.segment import Segment

_READER, _RAISED, _DROPS, _VERSION = range(4)
_NUM_BYTES = 32


class Board:
    """One rank's. `make` it where the rank is, and `find` it where requests are scheduled."""

    def __init__(self, segment: Segment, memory: Tensor) -> None:
        self.segment = segment
        self._words = memory.view(torch.int64).numpy()

    @classmethod
    def make(cls) -> Self:
        """A board of this process."""
        segment, memory, _ = make_memfd(_NUM_BYTES)
        return cls(segment, memory)

    @classmethod
    def find(cls, segment: Segment) -> Self:
        """That of a process on this host; whoever does so looks at it from then on.

        Raises:
            TransportError: It cannot be mapped.
        """
        board = cls(segment, map_memfd(segment))
        board._words[_READER] = 1
        return board

    @property
    def is_read(self) -> bool:
        """Whether somebody looks at it."""
        return bool(self._words[_READER])

    @property
    def is_raised(self) -> bool:
        """Whether requests are to be refused: no whole policy is there, or it is being written."""
        return bool(self._words[_RAISED])

    @is_raised.setter
    def is_raised(self, is_raised: bool) -> None:
        self._words[_RAISED] = is_raised

    @property
    def num_drops(self) -> int:
        """How often caches had to be dropped. They are those of another policy if it is more than it was."""
        return int(self._words[_DROPS])

    @num_drops.setter
    def num_drops(self, num_drops: int) -> None:
        self._words[_DROPS] = num_drops

    @property
    def version(self) -> int:
        """Of the policy that is there."""
        return int(self._words[_VERSION])

    @version.setter
    def version(self, version: int) -> None:
        self._words[_VERSION] = version
