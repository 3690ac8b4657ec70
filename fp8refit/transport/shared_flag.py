"""A flag in shared memory with which a rank makes its engine's scheduler refuse requests and drop caches.

A worker cannot call its scheduler. The scheduler looks here before each step, which takes less than a microsecond.
"""

from typing import Self

import torch
from torch import Tensor

from fp8refit.transport.memory.memfd import make_memfd, map_memfd
from fp8refit.transport.memory.segment import Segment

_READER, _RAISED, _DROPS, _VERSION = range(4)
_NUM_BYTES = 32


class SharedFlag:
    """The flag of one rank. The rank calls `make`, the scheduler `find`."""

    def __init__(self, segment: Segment, memory: Tensor) -> None:
        self.segment = segment
        self._words = memory.view(torch.int64).numpy()

    @classmethod
    def make(cls) -> Self:
        """Create a flag for this process."""
        segment, memory, _ = make_memfd(_NUM_BYTES)
        return cls(segment, memory)

    @classmethod
    def find(cls, segment: Segment) -> Self:
        """Open the flag of another process on this host, and mark it as read.

        Raises:
            TransportError: It cannot be mapped.
        """
        flag = cls(segment, map_memfd(segment))
        flag._words[_READER] = 1
        return flag

    @property
    def is_read(self) -> bool:
        """Whether a scheduler looks at it."""
        return bool(self._words[_READER])

    @property
    def is_raised(self) -> bool:
        """Whether to refuse requests: the policy is incomplete or being written."""
        return bool(self._words[_RAISED])

    @is_raised.setter
    def is_raised(self, is_raised: bool) -> None:
        self._words[_RAISED] = is_raised

    @property
    def num_drops(self) -> int:
        """How often caches had to be dropped. If it rose, caches belong to an older policy."""
        return int(self._words[_DROPS])

    @num_drops.setter
    def num_drops(self, num_drops: int) -> None:
        self._words[_DROPS] = num_drops

    @property
    def version(self) -> int:
        """Version of the current policy."""
        return int(self._words[_VERSION])

    @version.setter
    def version(self, version: int) -> None:
        self._words[_VERSION] = version
