"""The parameters and buffers of a live model, and whether the engine replaced one."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not

import torch
from torch import Tensor, nn

from fp8refit.guard import LayoutGuard


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveTensor:
    """One parameter or buffer of the live model, with what a refit must not change about it."""

    name: str
    holder: dict[str, Tensor | None]
    """The `_parameters` or `_buffers` of the module that owns it."""
    key: str
    tensor: Tensor
    data_ptr: int
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]

    @property
    def has_moved(self) -> bool:
        """Whether the module holds another tensor now, or the same one over other storage or in another layout."""
        tensor = self.tensor
        return (
            self.holder.get(self.key) is not tensor
            or tensor.data_ptr() != self.data_ptr
            or (tensor.shape, tensor.stride(), tensor.dtype) != self.layout
        )


class Watch:
    """Notices live tensors that the engine replaced. To ask all at once takes a third of looking at each."""

    def __init__(self, live: Sequence[LiveTensor]) -> None:
        self.live = tuple(live)
        self._tensors = [entry.tensor for entry in live]
        self._places = [(entry.holder, entry.key) for entry in live]
        self._addresses = [entry.data_ptr for entry in live]
        self._layouts = LayoutGuard((), self._tensors)

    def was_any_replaced(self) -> bool:
        """Whether any module holds another tensor now, or the same one over other storage."""
        held = [holder.get(key) for holder, key in self._places]
        return any(map(is_not, held, self._tensors)) or list(map(Tensor.data_ptr, self._tensors)) != self._addresses

    def moved(self) -> list[str]:
        """The names of those that `LiveTensor.has_moved` is true of."""
        if self._layouts.holds([], self._tensors) and not self.was_any_replaced():
            return []
        return [entry.name for entry in self.live if entry.has_moved]


def live_tensors(model: nn.Module) -> tuple[LiveTensor, ...]:
    """Every parameter and buffer of `model`, tied ones under each of their names."""
    return tuple(
        LiveTensor(
            name=f"{prefix}.{key}" if prefix else key,
            holder=holder,
            key=key,
            tensor=tensor,
            data_ptr=tensor.data_ptr(),
            layout=(tensor.shape, tensor.stride(), tensor.dtype),
        )
        for prefix, module in model.named_modules()
        for holder in (module._parameters, module._buffers)
        for key, tensor in holder.items()
        if tensor is not None
    )
