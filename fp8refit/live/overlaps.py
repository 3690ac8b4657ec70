"""Finds live bytes that two checkpoint tensors would both write: the last one would be served under both names."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
from torch import Tensor

from fp8refit.live.slots import Inventory, Refusal, Slot

_MAX_WORK = cast(Any, 100_000)
"""Steps to search for a byte that two views of one storage share. Past this limit they count as sharing one."""


def shared_bytes(slots: Sequence[Slot]) -> list[Refusal]:
    """Return one refusal for each pair of slots that share bytes. Tensors tied as a whole are one slot with an alias."""
    return [
        Refusal(
            module=first.name,
            reason=f"its {first_part} shares memory with the {second_part} of {second.name}, and both would be written there",
            remedy="Tie both their weights and their scales (weight_scale_inv), in the same shape, or neither",
        )
        for (first, first_part), (second, second_part) in _sharing(slots)
    ]


def aliases_of_shared_scales(inventory: Inventory) -> list[Refusal]:
    """Return one refusal for each second name of a tensor that shares a scale: it cannot be compared before all have come."""
    shared = {slot.name for slot in inventory.slots if slot.group is not None}
    return [
        Refusal(
            module=alias,
            reason=f"is a second name of {name}, which has a scale for all of it",
            remedy="Boot with one scale per row or block, or leave this layer in BF16",
        )
        for alias, name in inventory.aliases.items()
        if name in shared
    ]


def _sharing(slots: Sequence[Slot]) -> Iterator[tuple[tuple[Slot, str], tuple[Slot, str]]]:
    """Yield each pair of slots that share bytes, with the parts that do."""
    parts = [
        _Part(index, part, tensor)
        for index, slot in enumerate(slots)
        for part, tensor in (("weight", slot.weight), ("scale", slot.scale))
        if tensor is not None and tensor.numel() and not tensor.is_meta
    ]
    found: set[tuple[int, int]] = set()
    reaching: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.device, part.start)):
        reaching = [other for other in reaching if other.device == part.device and other.end > part.start]
        for other in reaching:
            first, second = sorted((part, other), key=lambda one: one.slot)
            pair = first.slot, second.slot
            held = slots[first.slot].format
            is_shared = first.name == second.name == "scale" and held is not None and held.is_shared
            group = slots[first.slot].group if is_shared else None
            if group is not None and group == slots[second.slot].group:
                continue
            if first.slot != second.slot and pair not in found and first.shares_with(second):
                found.add(pair)
                yield (slots[first.slot], first.name), (slots[second.slot], second.name)
        reaching.append(part)


class _Part:
    """The weight or the scale of one slot, and its address range."""

    def __init__(self, slot: int, name: str, tensor: Tensor) -> None:
        self.slot, self.name, self._tensor = slot, name, tensor
        self.device, self.start = tensor.get_device(), tensor.data_ptr()
        num_values = tensor.numel()
        if not tensor.is_contiguous():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            num_values = 1 + sum((length - 1) * stride for length, stride in steps)
        self.end = self.start + num_values * tensor.element_size()

    def shares_with(self, other: "_Part") -> bool:
        """Whether any byte is in both. Interleaved views may share none."""
        try:
            return bool(np.shares_memory(self._addresses, other._addresses, max_work=_MAX_WORK))
        except np.exceptions.TooHardError:
            return True

    @cached_property
    def _addresses(self) -> "np.ndarray[Any, Any]":
        """The same memory as a numpy array. It may be on a device, because numpy only compares addresses."""
        size = self._tensor.element_size()
        return np.asarray(
            _Memory(
                {
                    "version": 3,
                    "data": (self.start, True),
                    "typestr": f"|V{size}",
                    "shape": tuple(self._tensor.shape),
                    "strides": tuple(stride * size for stride in self._tensor.stride()),
                }
            )
        )


class _Memory:
    def __init__(self, interface: dict[str, object]) -> None:
        self.__array_interface__ = interface
