"""The parameters and buffers of a live model, and whether the engine replaced any."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_not

import torch
from torch import Tensor, nn

from fp8refit.live.layout_guard import LayoutGuard

_SAMPLE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveTensor:
    """One parameter or buffer of the live model, and the properties that a refit must not change."""

    name: str
    holder: dict[str, Tensor | None]
    """`_parameters` or `_buffers` of the module that owns it."""
    key: str
    tensor: Tensor
    data_ptr: int
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]

    @classmethod
    def of(cls, name: str, holder: dict[str, Tensor | None], key: str, tensor: Tensor) -> "LiveTensor":
        """Describe `tensor`, which `holder` has under `key` now."""
        layout = tensor.shape, tensor.stride(), tensor.dtype
        return cls(name=name, holder=holder, key=key, tensor=tensor, data_ptr=tensor.data_ptr(), layout=layout)

    @property
    def has_moved(self) -> bool:
        """Whether the module now holds a different tensor, or this one with another storage or layout."""
        tensor = self.tensor
        return (
            self.holder.get(self.key) is not tensor
            or tensor.data_ptr() != self.data_ptr
            or (tensor.shape, tensor.stride(), tensor.dtype) != self.layout
        )


class Watch:
    """Notices live tensors that the engine replaced. Checking all at once takes a third of the time of checking each.

    Args:
        live: The tensors.
        has_moved: Whether the engine has moved weights from one to another since.
        moving: Those of which it may.
    """

    def __init__(
        self,
        live: Sequence[LiveTensor],
        has_moved: Callable[[], bool] = lambda: False,
        moving: Collection[Tensor] = (),
    ) -> None:
        self.live = tuple(live)
        self._has_moved = has_moved
        self._moving = set(map(id, moving))
        self._tensors = [entry.tensor for entry in live]
        self._places = [(entry.holder, entry.key) for entry in live]
        self._addresses = [entry.data_ptr for entry in live]
        self._layouts = LayoutGuard((), self._tensors)

    @cached_property
    def _samples(self) -> list[Tensor]:
        parameters = [e.detach() for e in self._tensors if isinstance(e, nn.Parameter) and id(e) not in self._moving]
        sizes = [min(each.numel(), _SAMPLE_BYTES // each.element_size()) for each in parameters]
        return [each.as_strided((size,), (1,)).view(torch.uint8) for each, size in zip(parameters, sizes, strict=True)]

    def sample(self) -> Tensor:
        """Copy the first bytes of every parameter that never moves, which are others after a write of a policy by anybody."""
        return torch.cat(self._samples)

    def was_any_replaced(self) -> bool:
        """Whether any module now holds a different tensor, or this one with another storage, or other weights in it."""
        held = [holder.get(key) for holder, key in self._places]
        is_other = any(map(is_not, held, self._tensors))
        return is_other or list(map(Tensor.data_ptr, self._tensors)) != self._addresses or self._has_moved()

    def moved(self) -> list[str]:
        """Names of the tensors for which `LiveTensor.has_moved` is true, or that hold other weights."""
        if self._layouts.holds([], self._tensors) and not self.was_any_replaced():
            return []
        moving = self._moving if self._has_moved() else set()
        return [entry.name for entry in self.live if entry.has_moved or id(entry.tensor) in moving]


def live_tensors(model: nn.Module) -> tuple[LiveTensor, ...]:
    """Return every parameter and buffer of `model`. Tied ones appear under each name."""
    return tuple(
        LiveTensor.of(f"{prefix}.{key}" if prefix else key, holder, key, tensor)
        for prefix, module in model.named_modules()
        for holder in (module._parameters, module._buffers)
        for key, tensor in holder.items()
        if tensor is not None
    )
