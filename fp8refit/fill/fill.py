"""The interface of all ways to fill live memory. `fp8refit.fill.fills` chooses one for each source."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.fill.plan import RefitPlan
from fp8refit.fill.program import Flags
from fp8refit.sources.files import StoredTensor
from fp8refit.sources.row_runs import Piece

Arriving: TypeAlias = tuple[str, Tensor] | tuple[str, StoredTensor] | Piece
"""A tensor, a tensor in a file that has not been read, or some rows of a tensor."""


class Fill(ABC):
    """Carries out a plan, or part of one. Only `look` and `read_flags` wait for the device."""

    is_first: bool
    """Whether something was compiled for this refit."""
    plan: RefitPlan | None
    """The plan; None for an unannounced stream until all of it has arrived."""

    @property
    @abstractmethod
    def num_device_bytes(self) -> int:
        """Device memory held, in bytes."""

    @property
    def came(self) -> Iterable[str]:
        """Names of tensors that have arrived one by one, whole or in part."""
        return ()

    def look(self) -> Flags:
        """Read everything without writing, and return what is flagged. Pushed tensors are not there to be read."""
        return Flags()

    def compile(self) -> None:
        """Compile the kernels that `launch` runs."""
        return

    @abstractmethod
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Write what is already on the device. `begun` is recorded right before the first kernel."""

    def read(self, *, drain: bool) -> None:
        """Write everything else from the source.

        Args:
            drain: Read to the end even if something does not fit. Reading may be a collective operation of the trainer,
                whose other ranks would wait for this one.
        """
        return

    def take(self, tensors: Iterable[Arriving], *, drain: bool = False) -> None:
        """Write pushed tensors. Later work on the current stream may overwrite them.

        Args:
            tensors: A list of tensors that stay valid; or an iterator, which may overwrite a tensor when the next one
                is requested.
            drain: See `read`.

        Raises:
            InvalidSourceError: A tensor arrived twice, incomplete, without bytes, or not as announced.
        """
        raise AssertionError("this fill reads its own source; nothing can be pushed to it")

    def flush(self) -> None:
        """Write what is staged so far."""
        return

    def finish(self) -> None:
        """Check that everything has arrived, and write what is still staged.

        Raises:
            InvalidSourceError: Tensors are missing, or unannounced tensors do not fit.
        """
        return

    def release(self) -> None:
        """Release what only this refit needs: the source's tensors, and buckets."""
        return

    @abstractmethod
    def read_flags(self) -> Flags:
        """Wait for the device, and return what was flagged since the last call."""
