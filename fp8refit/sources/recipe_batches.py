"""Computes the recipes of a source, in memory that is reused for the next ones."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fp8refit.sources.row_runs import MakesPieces, Piece, Recipe

_ALIGNMENT_BYTES = 256
"""Alignment of each tensor in a `ScratchBuffer`: kernels use wide loads on aligned rows."""


def in_batches(source: MakesPieces, runs: Iterable[Piece | Recipe], scratch: "ScratchBuffer") -> Iterator[list[Piece]]:
    """Yield runs in order, with all recipes computed.

    A batch stays valid until the next one is requested, which overwrites it on the current stream. On a GPU, a batch has as
    many recipes as fit into `scratch`, or one that is larger than it. On a CPU, it has one.
    """
    batch: list[Piece | Recipe] = []
    for each in runs:
        if isinstance(each, Recipe) and not scratch.add(each.tensor):
            yield _made(source, batch, scratch.tensors())
            batch = []
            scratch.add(each.tensor)
        batch.append(each)
    if batch:
        yield _made(source, batch, scratch.tensors())


def _made(source: MakesPieces, batch: list[Piece | Recipe], outs: Sequence[Tensor]) -> list[Piece]:
    if outs:
        source.make([each for each in batch if isinstance(each, Recipe)], outs)
    places = iter(outs)
    return [each.piece(next(places)) if isinstance(each, Recipe) else each for each in batch]


def _shares_launches(device: torch.device) -> bool:
    """Whether many recipes are made in one launch there."""
    return device.type == "cuda"


class ScratchBuffer:
    """Memory for a batch of tensors on one device, reused for the next batch.

    Args:
        max_bytes: How much of it there is, unless one tensor is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._likes: list[tuple[int, Tensor]] = []
        """What it is for: the first byte of each tensor, and one like it."""
        self._num_bytes = 0
        self._views: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        """Views of the memory. Layers are alike, so views for one layer serve the next."""

    def add(self, like: Tensor) -> bool:
        """Reserve room for a contiguous tensor like `like`; False if it must go into the next batch."""
        end = self._num_bytes + like.nbytes
        if self._likes:
            device = self._likes[0][1].device
            if not _shares_launches(device) or like.device != device or end > self._max_bytes:
                return False
        self._likes.append((self._num_bytes, like))
        self._num_bytes = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return True

    def tensors(self) -> list[Tensor]:
        """Return the reserved tensors, in the memory of the batch before.

        If that is too small, it is replaced. On a GPU, the new memory has some to spare for larger batches.
        """
        likes, needed = self._likes, self._num_bytes
        self._likes, self._num_bytes = [], 0
        if not likes:
            return []
        device = likes[0][1].device
        if needed > self._memory.nbytes or device != self._memory.device:
            self._views.clear()
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)
            ample = min(1 << needed.bit_length(), self._max_bytes) if _shares_launches(device) else 0
            self._memory = torch.empty(max(needed, ample), dtype=torch.uint8, device=device)
        return [self._view(*each) for each in likes]

    def _view(self, start: int, like: Tensor) -> Tensor:
        key = start, like.shape, like.dtype
        if key not in self._views:
            self._views[key] = self._memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
        return self._views[key]
