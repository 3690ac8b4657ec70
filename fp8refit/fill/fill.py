"""What the ways of filling live memory have in common: which one serves a source is chosen once, in `fp8refit.fill.fills`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.fill.plan import RefitPlan
from fp8refit.sources.files import StoredTensor
from fp8refit.sources.row_runs import Piece

Arriving: TypeAlias = tuple[str, Tensor] | tuple[str, StoredTensor] | Piece
"""A tensor, one in a file that is still to be read, or some rows of one."""


class Fill(ABC):
    """Carries out a plan, or a part of one. Synchronizes with the device only when it is asked for bad sources."""

    is_first: bool
    """Whether something was compiled for this refit."""

    @property
    @abstractmethod
    def plan(self) -> RefitPlan | None:
        """What is read from where; None until a stream of which nothing is known has come."""

    @property
    @abstractmethod
    def num_device_bytes(self) -> int:
        """Device memory that it holds."""

    @property
    def came(self) -> Iterable[str]:
        """Names of what came one by one so far, whole or in part."""
        return ()

    @abstractmethod
    def look(self) -> list[str]:
        """Read everything, write nothing, and name the tensors with NaN or Inf."""

    @abstractmethod
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Write what is on the device already. `begun` is recorded right before the first kernel."""

    def read(self, *, drain: bool) -> None:
        """Write everything else that the source gives.

        Args:
            drain: Read it to its end even if a part of it does not fit. Reading may be a collective operation of the trainer,
                in which the other ranks would wait for this one.
        """
        return

    def take(self, tensors: Iterable[Arriving], *, drain: bool = False) -> None:
        """Write what was pushed, which may be overwritten by what the current stream does from then on.

        Args:
            tensors: A list, all of which is there; or an iterator, which may overwrite each when it is asked for the next.
            drain: See `read`.

        Raises:
            InvalidSourceError: A tensor came twice, in part, without bytes, or otherwise than announced.
        """
        raise AssertionError("nothing is pushed to a fill that has its source")

    def flush(self) -> None:
        """Write what is still staged."""
        return

    def finish(self) -> None:
        """Check that everything came, and write what is still staged.

        Raises:
            InvalidSourceError: Not everything came, or what came without announcement does not fit.
        """
        return

    def release(self) -> None:
        """Give back what serves one refit: the source's tensors, and buckets."""
        return

    @abstractmethod
    def bad_sources(self) -> list[str]:
        """Wait for the device, and name the source tensors that were flagged since this was asked last."""
