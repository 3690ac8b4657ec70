"""A policy that the caller hands over bucket by bucket, while the engine stays locked for its refit."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from fp8refit.live.slots import TensorMeta
from fp8refit.sources.renamed import Names, renamed
from fp8refit.sources.row_runs import Piece
from fp8refit.sources.source import Manifest, PushedSource, StreamSource

HandedBucket: TypeAlias = Iterable[tuple[str, Tensor] | Piece]
"""A list of tensors, or an iterator, which may overwrite each tensor when asked for the next."""


class HandedSource(PushedSource):
    """The source behind `fp8refit.update`: the writer awaits each bucket, so the refit stops until the next one arrives.

    Args:
        manifest: Shape and dtype of everything that will come, if known.
        names: The engine's names for those of the manifest, if it has others.
    """

    def __init__(self, manifest: Manifest | None, names: Names | None = None) -> None:
        announced: tuple[Mapping[str, TensorMeta], Sequence[str]] | None = None
        if manifest is not None:
            announced = renamed(StreamSource(tuple, is_repeatable=False, manifest=manifest), names).scan()
        metadata, problems = announced or (None, ())
        super().__init__(metadata, problems=problems)

    async def next_bucket(self) -> HandedBucket | None:
        """Return the next bucket; None after the last.

        Raises:
            BaseException: What was raised where the buckets come from.
        """
        return await _Turn()


class _Turn:
    """Suspends a coroutine until it is sent a bucket."""

    def __await__(self) -> Generator[None, HandedBucket | None, HandedBucket | None]:
        return (yield)
