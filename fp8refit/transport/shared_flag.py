"""A flag in shared memory with which a rank makes its engine's scheduler refuse requests and drop caches.

A worker cannot call its scheduler. The scheduler looks here before each step, which takes less than a microsecond.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from fp8refit.transport.memory.memfd import make_memfd, map_memfd
from fp8refit.transport.memory.segment import Segment

_NUM_WORDS = 4
_REASON_BYTES = 1024


class _Word:
    """One of the numbers in the flag's memory."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, flag: "SharedFlag", kind: type) -> int:
        return int(flag._words[self._place])

    def __set__(self, flag: "SharedFlag", value: int) -> None:
        flag._words[self._place] = value


class SharedFlag:
    """The flag of one rank. The rank calls `make`, the scheduler `find`."""

    is_read = _Word(0)
    """Whether a scheduler looks at it."""
    is_raised = _Word(1)
    """Whether to refuse requests: the policy is incomplete or being written."""
    num_drops = _Word(2)
    """How often caches had to be dropped. If it rose, caches belong to an older policy."""
    version = _Word(3)
    """Version of the current policy."""

    def __init__(self, segment: Segment, memory: Tensor) -> None:
        self.segment = segment
        self._words = memory[: 8 * _NUM_WORDS].view(torch.int64).numpy()
        self._text = memory[8 * _NUM_WORDS :].numpy()

    @property
    def reason(self) -> str:
        """Why requests are refused, for whoever reads; cut to a kibibyte."""
        return bytes(self._text).split(b"\0", 1)[0].decode(errors="ignore")

    @reason.setter
    def reason(self, reason: str) -> None:
        text = reason.encode()[: _REASON_BYTES - 1] + b"\0"
        self._text[: len(text)] = np.frombuffer(text, np.uint8)

    @classmethod
    def make(cls) -> Self:
        """Create a flag for this process."""
        segment, memory, _ = make_memfd(8 * _NUM_WORDS + _REASON_BYTES)
        return cls(segment, memory)

    @classmethod
    def find(cls, segment: Segment) -> Self:
        """Open the flag of another process on this host, and mark it as read.

        Raises:
            TransportError: It cannot be mapped.
        """
        flag = cls(segment, map_memfd(segment))
        flag.is_read = True
        return flag
