"""Reads a live model: which checkpoint tensor lies where."""

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn

from fp8refit.names import strip_wrappers
from fp8refit.slots import SCALE_SUFFIX, Inventory, Slot, live_tensors
from fp8refit_transformers.linear import BlockFp8Linear


def read_inventory(model: nn.Module) -> Inventory:
    """Give a slot to every tensor of the model's state dict that holds floating-point values.

    Tied tensors share the slot of the first name. Persistent buffers of integers have none: no optimizer changes them.
    """
    slots: list[Slot] = []
    aliases: dict[str, str] = {}
    unneeded: list[str] = []
    canonical: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in _state(model):
        checkpoint_name = strip_wrappers(name)
        storage = (tensor.data_ptr(), tuple(tensor.shape))
        first = canonical.setdefault(storage, checkpoint_name) if tensor.numel() else checkpoint_name
        if not tensor.is_floating_point():
            unneeded.append(checkpoint_name)
        elif first != checkpoint_name:
            aliases[checkpoint_name] = first
        else:
            slots.append(_slot(model, name, tensor))
    return Inventory(slots=tuple(slots), aliases=aliases, unneeded=tuple(unneeded), live=live_tensors(model))


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything a checkpoint of the model carries, besides block scales."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not name.endswith(SCALE_SUFFIX):
            yield name, tensor


def _slot(model: nn.Module, name: str, tensor: Tensor) -> Slot:
    module, _, key = name.rpartition(".")
    owner = model.get_submodule(module)
    place = Slot(
        name=strip_wrappers(name),
        full_shape=tuple(tensor.shape),
        weight=tensor,
        module=module,
        kernel=type(owner).__name__,
    )
    if not isinstance(owner, BlockFp8Linear) or key != "weight":
        return place
    return dataclasses.replace(
        place,
        scale=owner.weight_scale_inv.detach(),
        scale_format=owner.scale_format,
        block_size=owner.block_size,
    )
