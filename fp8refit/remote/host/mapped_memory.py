"""Maps a trainer's memory into a rank's process."""

from collections.abc import Iterable, Mapping

from torch import Tensor
from typing_extensions import override

from fp8refit.errors import TensorsForgottenError
from fp8refit.ranks.live_model import LiveModel
from fp8refit.remote.protocol import messages
from fp8refit.sources.source import MappingSource
from fp8refit.transport.memory.importer import Importer


class TensorMapper:
    """Maps tensors that stay where the trainer has them.

    Args:
        live: The model that is written from them.
        importer: Maps them.
    """

    def __init__(self, live: LiveModel, importer: Importer) -> None:
        self._live, self._importer = live, importer
        self._known: tuple[str, MappingSource] | None = None
        """Digest and source of the tensors that are mapped."""

    def open(self, offer: messages.MappedTensors) -> MappingSource:
        """Map the tensors of an offer, or return those of the last one.

        Raises:
            TensorsForgottenError: They are no longer mapped.
            TransportError: They cannot be mapped.
        """
        if offer.refs is not None:
            self._known = None
            keep_only((segment.id for segment in offer.segments), self._importer, self._live)
            tensors = self._importer.open(offer.segments, offer.refs)
            self._known = offer.digest, MappedSource(tensors, offer.problems)
        elif self._known is None or self._known[0] != offer.digest:
            raise TensorsForgottenError("this rank no longer has the tensors of the last refit; refit again")
        return self._known[1]

    def unmap(self) -> None:
        """Unmap them, once nothing reads them any more."""
        self._known = None
        keep_only((), self._importer, self._live)


class MappedSource(MappingSource):
    """Tensors of another process, with the names and problems that it found."""

    def __init__(self, tensors: Mapping[str, Tensor], problems: tuple[str, ...]) -> None:
        super().__init__(tensors)
        self._found = problems

    @property
    @override
    def problems(self) -> tuple[str, ...]:
        return (*super().problems, *self._found)


def keep_only(ids: Iterable[str], importer: Importer, live: LiveModel) -> bool:
    """Unmap all but some segments, after waiting for launched work of `live` that may read them. Returns whether there
    were others.
    """
    kept = frozenset(ids)
    if importer.mapped <= kept:
        return False
    if live.lost_because is None:
        with live.on_device():
            live.synchronize()
    importer.keep_only(kept)
    return True
