"""Turns a trainer's tensors into checkpoint tensors: renamed, joined or split."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from fp8refit.config import NewNames
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.renamed import Names
from fp8refit.sources.row_runs import Piece, cut
from fp8refit.sources.sharded.batches import PartRows
from fp8refit.sources.sharded.shards import Part
from fp8refit.sources.source import NamedTensors


class Renamer(Protocol):
    """Makes checkpoint tensors from a trainer's tensors.

    Called with every name and whole tensor, in state-dict order, on every rank that reads. Before that, called with meta
    tensors to learn names, shapes and dtypes. So its result may depend on name, shape and dtype, but not on values. To
    rename only, yield the tensor itself: it then need not be whole in memory.

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
        """Yield checkpoint names and tensors, or nothing if no engine needs it."""
        ...


def only_names(rename: NewNames) -> Renamer:
    """The renamer that gives tensors other names, and changes nothing else.

    Raises:
        ValueError: See `fp8refit.config.read_rename`.
    """
    names = Names(rename)
    return lambda name, tensor: [(names[name], tensor)]


class Renaming:
    """Applies a `Renamer` to the parts of a state dict. Without one, parts stay as they are."""

    def __init__(self, rename: Renamer | None) -> None:
        self._rename = rename

    def metadata(self, part: Part) -> Iterator[tuple[str, TensorMeta]]:
        """Yield names, shapes and dtypes of what a part becomes."""
        if self._rename is None:
            yield part.name, part.meta
            return
        for name, tensor in self._rename(part.name, _on_meta(part)):
            yield name, TensorMeta.of(tensor)

    def pieces(self, rows: PartRows, max_bytes: int) -> Iterator[Piece]:
        """Yield what rows become as they arrive, in pieces of at most `max_bytes`; see `fp8refit.sources.row_runs.cut`.

        Tensors that are only renamed pass through row by row. Others are assembled first.
        """
        for part, first, tensor in rows if self._rename is None else self._whole_to_change(rows):
            yield from self._changed(part, first, tensor, max_bytes)
            del tensor  # hold nothing while waiting for the next batch

    def _changed(self, part: Part, first: int, tensor: Tensor, max_bytes: int) -> Iterator[Piece]:
        """Yield pieces of what a part becomes. `tensor` is all of it, or some rows if it is only renamed."""
        is_whole = tuple(tensor.shape) == part.meta.shape
        for name, changed in [(part.name, tensor)] if self._rename is None else self._rename(part.name, tensor):
            full_shape = None if is_whole else part.meta.shape
            yield from cut(name, changed, max_bytes, first_row=first, full_shape=full_shape)

    def _whole_to_change(self, rows: PartRows) -> PartRows:
        """Yield rows of tensors that are only renamed, and the whole of others."""
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
        """Whether a part is only renamed."""
        assert self._rename is not None, "there is something to change"
        tensor = _on_meta(part)
        return [id(renamed) for _, renamed in self._rename(part.name, tensor)] == [id(tensor)]


def _on_meta(part: Part) -> Tensor:
    return torch.empty(part.meta.shape, dtype=part.meta.dtype, device="meta")
