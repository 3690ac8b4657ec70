"""Fills from tensors that arrive one after another, pulled from a stream or pushed by its reader.

Tensors on the engine's device are read in place, others are staged. After an unannounced stream, the next one is expected
to be the same, and is planned again if it differs.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from typing_extensions import override

from fp8refit.fill.arrivals import Arrivals
from fp8refit.fill.direct import DirectFill
from fp8refit.fill.fill import Arriving, Fill
from fp8refit.fill.program import Flags
from fp8refit.fill.staging import Staging
from fp8refit.fill.stream_writer import StreamWriter
from fp8refit.kernels import Action
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.recipe_batches import ScratchBuffer, in_batches
from fp8refit.sources.row_runs import InPieces, MakesPieces
from fp8refit.sources.source import MappingSource, PushedSource, Source

_MOST_TOGETHER = 32
"""How many tensors that stay valid are taken at a time. The device works on these while the host looks at the next ones."""


class StreamFill(Fill):
    """Carries out steps on tensors that arrive one after another.

    Args:
        source: The source of the tensors.
        arrivals: Judges what arrives.
        staging: Buckets for tensors that are elsewhere.
        direct: Fills from tensors on the engine's device; None to stage them too.
        is_first: Whether the expected tensors were planned for this refit.
    """

    def __init__(
        self,
        source: Source,
        arrivals: Arrivals,
        staging: Staging,
        *,
        direct: DirectFill | None = None,
        is_first: bool = False,
    ) -> None:
        self._source = source
        self._arrivals = arrivals
        self._staging = staging
        self._direct = direct
        self._writer = StreamWriter(arrivals, staging, direct, is_stable=isinstance(source, MappingSource))
        self.is_first, self.plan = is_first, arrivals.plan

    @property
    @override
    def num_device_bytes(self) -> int:
        """Device memory of buckets and of tables kept between streams, in bytes."""
        return self._staging.num_device_bytes + (self._direct.num_device_bytes if self._direct is not None else 0)

    @property
    @override
    def came(self) -> Iterable[str]:
        return self._arrivals.came

    @override
    def look(self) -> Flags:
        scout = StreamFill(self._source, Arrivals(self._arrivals.expected), self._staging)
        scout._writer.clear_maxima()
        with self._staging.doing(Action.CHECK):
            scout.read(drain=False)
            scout.finish()
            return scout.read_flags()

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Start; nothing has arrived yet."""
        self._writer.clear_maxima()
        if self._direct is not None:
            self._direct.begin(self._staging.config, self._staging.action)
        if begun is not None:
            begun.record()

    @override
    def read(self, *, drain: bool) -> None:
        # To read on from recipes would fill slots, and reading them is no collective operation.
        self._take_all(self._tensors(), drain=drain and not isinstance(self._source, MakesPieces))

    @override
    def take(self, tensors: Iterable[Arriving], *, drain: bool = False) -> None:
        self._take_all(tensors, drain=drain)

    @override
    def flush(self) -> None:
        self._writer.flush()

    @override
    def finish(self) -> None:
        self._writer.check_is_complete()
        came = self._arrivals.finish()
        self.is_first |= came is not self._arrivals.expected
        self.plan = came.plan
        if self._direct is not None:
            self._direct.end(came)
        self._writer.flush()

    @override
    def release(self) -> None:
        self._writer.release()
        self._staging.release()

    @override
    def read_flags(self) -> Flags:
        staged = self._staging.read_flags()
        return staged if self._direct is None else Flags.union((staged, self._direct.read_flags()))

    def _tensors(self) -> Iterable[Arriving | list[Arriving]]:
        """Read the source, whole tensors, runs of rows, or groups of both; a list if all tensors stay valid."""
        source = self._source
        if isinstance(source, MakesPieces):
            return self._made(source)
        if isinstance(source, InPieces):
            return source.pieces(self._staging.bucket_bytes)
        if isinstance(source, MappingSource):
            assert self._arrivals.expected is not None, "a mapping is announced"
            return [(name, source.tensors[name]) for name in self._arrivals.expected.steps]
        if isinstance(source, SafetensorsSource):
            return iter(source.stored.items())
        return () if isinstance(source, PushedSource) else iter(source)

    def _made(self, source: MakesPieces) -> Iterator[list[Arriving]]:
        """Take what can be read where it is, and yield the rest, computed in memory of the size of a bucket."""
        scratch = ScratchBuffer(self._staging.bucket_bytes)
        runs = source.recipes(sys.maxsize)
        while part := list(islice(runs, _MOST_TOGETHER)):
            recipes = self._writer.take_at_rest(part)
            pieces = (piece for recipe in recipes for piece in recipe.cut(self._staging.bucket_bytes))
            for batch in in_batches(source, pieces, scratch):
                yield [(each.name, each.tensor) if each.is_whole else each for each in batch]

    def _take_all(self, tensors: Iterable[Arriving | list[Arriving]], *, drain: bool) -> None:
        try:
            self._writer.take(tensors)
        except Exception:
            if drain and isinstance(tensors, Iterator):
                for _ in tensors:
                    pass
            raise
