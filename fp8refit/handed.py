"""A policy that is handed over bucket by bucket, in the middle of a refit, by somebody who was given the turn for it."""

from collections.abc import Generator, Iterable, Mapping
from typing import TypeAlias

from torch import Tensor

from fp8refit.pieces import Piece
from fp8refit.slots import TensorMeta
from fp8refit.sources import Manifest, PushedSource, StreamSource

HandedBucket: TypeAlias = Iterable[tuple[str, Tensor] | Piece]
"""A list, whose tensors are all there; or an iterator, which may overwrite each tensor when it is asked for the next."""


class HandedSource(PushedSource):
    """See `fp8refit.update`: whoever writes awaits each bucket, and so the refit stops until there is one.

    Args:
        manifest: Shape and dtype of everything that will come, if that is known.
    """

    def __init__(self, manifest: Manifest | None) -> None:
        announced: Mapping[str, TensorMeta] | None = None
        if manifest is not None:
            announced = StreamSource(tuple, is_repeatable=False, manifest=manifest).metadata
        super().__init__(announced)

    async def next_bucket(self) -> HandedBucket | None:
        """The next one; None after the last.

        Raises:
            BaseException: What was raised where the buckets come from.
        """
        return await _Turn()


class _Turn:
    """Suspends a coroutine until it is sent a bucket."""

    def __await__(self) -> Generator[None, HandedBucket | None, HandedBucket | None]:
        return (yield)
