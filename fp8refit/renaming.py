"""What becomes of a trainer's tensors on their way to an engine: other names, and tensors put together or taken apart."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from fp8refit.batches import PartRows
from fp8refit.pieces import Piece, cut
from fp8refit.shards import Part
from fp8refit.slots import TensorMeta
from fp8refit.sources import NamedTensors


class Renamer(Protocol):
    """Makes checkpoint tensors of a trainer's tensors.

    Called with every name and whole tensor, in the order of the state dict, on every rank that reads; and before that with
    tensors on the meta device, for names, shapes and dtypes alone. So what it gives may depend on name, shape and dtype, and
    not on values. Give the tensor itself, under another name, if that is all: it then needs not be whole in memory at once.

    Examples:
        >>> def renamed(name, tensor):
        ...     if name.endswith(".gate_up.weight"):
        ...         prefix = name.removesuffix("gate_up.weight")
        ...         gate, up = tensor.chunk(2)
        ...         yield f"{prefix}gate_proj.weight", gate
        ...         yield f"{prefix}up_proj.weight", up
        ...     else:
        ...         yield name, tensor
    """

    def __call__(self, name: str, tensor: Tensor, /) -> NamedTensors:
        """Checkpoint names and tensors, or nothing if no engine wants it."""
        ...


class Renaming:
    """What a `Renamer` makes of the parts of a state dict; without one they stay what they are."""

    def __init__(self, rename: Renamer | None) -> None:
        self._rename = rename

    def metadata(self, part: Part) -> Iterator[tuple[str, TensorMeta]]:
        """Names, shapes and dtypes of what becomes of a part."""
        if self._rename is None:
            yield part.name, part.meta
            return
        for name, tensor in self._rename(part.name, _on_meta(part)):
            yield name, TensorMeta.of(tensor)

    def pieces(self, rows: PartRows, max_bytes: int) -> Iterator[Piece]:
        """What becomes of rows as they come, in pieces of at most `max_bytes`; see `fp8refit.pieces.cut`.

        What is just renamed goes through in the rows in which it comes; what changes is put together first.
        """
        for part, first, tensor in rows if self._rename is None else self._whole_to_change(rows):
            yield from self._changed(part, first, tensor, max_bytes)
            del tensor  # nothing is held while the next batch is waited for

    def _changed(self, part: Part, first: int, tensor: Tensor, max_bytes: int) -> Iterator[Piece]:
        """Pieces of what becomes of a part, of which `tensor` is all or, if it gets no more than a name, some rows."""
        is_whole = tuple(tensor.shape) == part.meta.shape
        for name, changed in [(part.name, tensor)] if self._rename is None else self._rename(part.name, tensor):
            full_shape = None if is_whole else part.meta.shape
            yield from cut(name, changed, max_bytes, first_row=first, full_shape=full_shape)

    def _whole_to_change(self, rows: PartRows) -> PartRows:
        """Rows of tensors that are just renamed, and all of those that change."""
        whole: Tensor | None = None
        for part, first, tensor in rows:
            if tuple(tensor.shape) == part.meta.shape or self._is_kept(part):
                yield part, first, tensor
                del tensor
                continue
            if first == 0:
                whole = tensor.new_empty(part.meta.shape)
            assert whole is not None, "rows come in order"
            end = first + tensor.shape[0]
            whole[first:end].copy_(tensor)
            del tensor
            if end == part.meta.shape[0]:
                yield part, 0, whole
                whole = None

    def _is_kept(self, part: Part) -> bool:
        """Whether a part gets another name, and nothing more."""
        assert self._rename is not None, "there is something to change"
        tensor = _on_meta(part)
        return [id(renamed) for _, renamed in self._rename(part.name, tensor)] == [id(tensor)]


def _on_meta(part: Part) -> Tensor:
    return torch.empty(part.meta.shape, dtype=part.meta.dtype, device="meta")
