"""Has a source make what it gives recipes for, in memory that is used again and again."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fp8refit.sources.row_runs import MakesPieces, Piece, Recipe

_ALIGNMENT_BYTES = 256
"""Of a tensor in memory that several share: kernels use wide loads on aligned rows."""


def in_batches(source: MakesPieces, runs: Iterable[Piece | Recipe], room: "Room") -> Iterator[list[Piece]]:
    """Yield runs in order, once they are made. They stay valid until the next batch is requested, which overwrites them on the
    current stream.

    On a GPU, as many are made at once as there is room for; one that is larger gets the room that it takes. On a CPU they are
    made one by one.
    """
    batch: list[Piece | Recipe] = []
    for each in runs:
        if isinstance(each, Recipe) and not room.add(each.tensor):
            yield _made(source, batch, room.tensors())
            batch = []
            room.add(each.tensor)
        batch.append(each)
    if batch:
        yield _made(source, batch, room.tensors())


def _made(source: MakesPieces, batch: list[Piece | Recipe], outs: Sequence[Tensor]) -> list[Piece]:
    if outs:
        source.make([each for each in batch if isinstance(each, Recipe)], outs)
    places = iter(outs)
    return [each.piece(next(places)) if isinstance(each, Recipe) else each for each in batch]


def _shares_launches(device: torch.device) -> bool:
    """Whether many recipes are made in one launch there."""
    return device.type == "cuda"


class Room:
    """Memory for some tensors on one device, and for the next ones after them.

    Args:
        max_bytes: How much of it there is, unless one tensor is larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._likes: list[Tensor] = []
        self._num_bytes = 0
        self._views: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        """Layers are alike: what was made of the memory for one fits into the next."""

    def add(self, like: Tensor) -> bool:
        """Plan for a contiguous tensor of some shape, dtype and device. False if it has to be one of the next ones."""
        end = self._num_bytes + like.nbytes
        if self._likes:
            device = self._likes[0].device
            if not _shares_launches(device) or like.device != device or end > self._max_bytes:
                return False
        self._likes.append(like)
        self._num_bytes = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return True

    def tensors(self) -> list[Tensor]:
        """The tensors that were planned for, in the memory of the ones before. If that is too little, more is taken; on a GPU
        more than that, for larger ones to come.
        """
        likes, needed = self._likes, self._num_bytes
        self._likes, self._num_bytes = [], 0
        if not likes:
            return []
        device = likes[0].device
        if needed > self._memory.nbytes or device != self._memory.device:
            self._views.clear()
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)
            ample = min(1 << needed.bit_length(), self._max_bytes) if _shares_launches(device) else 0
            self._memory = torch.empty(max(needed, ample), dtype=torch.uint8, device=device)
        return self._lay_out(likes)

    def _lay_out(self, likes: Sequence[Tensor]) -> list[Tensor]:
        start, found = 0, []
        for like in likes:
            end, key = start + like.nbytes, (start, like.shape, like.dtype)
            if key not in self._views:
                self._views[key] = self._memory[start:end].view(like.dtype).view(like.shape)
            found.append(self._views[key])
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return found
