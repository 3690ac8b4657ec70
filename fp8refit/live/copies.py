"""Finds copies of weights that an engine keeps and that no refit would update.

A tensor is none if it shares memory with a weight, if a refresh writes it, or if it has the values of the twin, which was built
without weights. Every other tensor is refused by name.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from fp8refit.live.held import Held, Holdings
from fp8refit.live.slots import Inventory, Refusal, TensorMeta
from fp8refit.live.storage import has_memory

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDING = 0.02
"""How much tables may differ that different devices computed, as a part of their largest value."""


class Copies:
    """What a live model holds beside its weights.

    Args:
        model: The live model.
        inventory: What a refit writes.
        built: What the twin holds, by name.
        kept: Returns the attributes of a module that hold no weights, such as its KV cache.
        apart: Other models, which have an inventory of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        inventory: Inventory,
        *,
        built: Mapping[str, Tensor],
        kept: Callable[[nn.Module], Collection[str]] = lambda _: (),
        apart: Collection[nn.Module] = (),
    ) -> None:
        self._holdings, self._built = Holdings(model, kept, apart), built
        restored = [tensor for each in inventory.refreshes if each.restores for tensor in each.written]
        written = [tensor for each in inventory.refreshes if not each.restores for tensor in each.written]
        slots = [part for slot in inventory.slots for part in (slot.weight, slot.scale) if part is not None]
        self._restored = set(map(_storage_of, restored))
        self._current = set(map(_storage_of, (*model.parameters(), *slots, *written))) - self._restored - {0}
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._beside: list[Held] = []
        self._passed: tuple[list[Held], list[Tensor]] = [], []
        """What was compared when nothing was refused last, and copies of its values."""

    @torch.inference_mode()
    def refusals(self, are_restored: bool, at_a_glance: bool = False) -> list[Refusal]:
        """Refuse every tensor that may be a copy. Synchronizes.

        Args:
            are_restored: Whether the tensors of which a refit restores the initial values have these values now.
            at_a_glance: Look for new ones in one of several layers that are alike.
        """
        if self._holdings.have_changed(at_a_glance=at_a_glance):
            self._beside = [held for held in self._holdings.search() if self._is_beside(held.tensor)]
        current = self._current if are_restored else self._current | self._restored
        unknown = [held for held in self._beside if _storage_of(held.tensor) not in current]
        values = _joined(held.tensor for held in unknown)
        if self._passed[0] == unknown and all(map(torch.equal, values, self._passed[1])):
            return []
        built = {held.name for held in unknown if self._is_built(held)}
        tables = {_storage_of(held.tensor) for held in unknown if held.name in built and _is_whole(held.tensor)}
        refused = [held for held in unknown if held.name not in built and _storage_of(held.tensor) not in tables]
        if not refused:
            self._passed = unknown, values
        return list(map(_refusal, refused))

    def _is_beside(self, tensor: Tensor) -> bool:
        is_weight = id(tensor) in self._parameters and _storage_of(tensor) not in self._restored
        return not is_weight and not _is_empty(tensor)

    def _is_built(self, held: Held) -> bool:
        """Whether a tensor has the twin's values, perhaps followed by more rows: tables grow with sequences."""
        built, tensor = self._built.get(held.name.replace(".base_layer", "")), held.tensor
        if built is None or built.dtype is not tensor.dtype or built.shape[1:] != tensor.shape[1:]:
            return False
        if is_uniform(built):
            first = tensor.flatten()[0].cpu()
            return built.shape == tensor.shape and is_uniform(tensor) and built.flatten()[0].equal(first)
        if built.is_complex():
            built, tensor = torch.view_as_real(built), torch.view_as_real(tensor)
        tensor = tensor[: len(built)].cpu()
        if not built.is_floating_point() or built.shape != tensor.shape:
            return built.equal(tensor)
        if torch.equal(_bits_of(built), _bits_of(tensor)):
            return True
        wide = torch.promote_types(built.dtype, torch.float32)
        built, tensor = built.to(wide), tensor.to(wide)
        rounding = _ROUNDING * float(built.nan_to_num(0, 0, 0).abs().max())
        apart = ~((built - tensor).abs_() <= rounding)  # NaN and Inf too
        return torch.allclose(built[apart], tensor[apart], rtol=0, atol=0, equal_nan=True)


def values_of(twin: nn.Module) -> dict[str, Tensor]:
    """Return what a model holds that was built without weights, by name, in host memory."""
    found = {held.name: held.tensor.detach().cpu() for held in Holdings(twin).search() if not _is_empty(held.tensor)}
    return {name: _compact(tensor) for name, tensor in found.items()}


def is_uniform(tensor: Tensor) -> bool:
    """Whether a tensor is one number throughout."""
    bits = _bits_of(tensor)
    return bool((bits == bits.flatten()[0]).all())


def _compact(tensor: Tensor) -> Tensor:
    return tensor.flatten()[0].clone().expand(tensor.shape) if is_uniform(tensor) else tensor


def _is_empty(tensor: Tensor) -> bool:
    """Whether a tensor has no values: fake ones only say that they are on a device."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return not tensor.numel()
    return tensor.untyped_storage().device.type == "meta" or not has_memory(tensor)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy the bits of many tensors into one for each device and type, which takes few launches."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for bits in map(_bits_of, tensors):
        groups.setdefault((bits.device, bits.dtype), []).append(bits.flatten())
    return list(map(torch.cat, groups.values()))


def _is_whole(tensor: Tensor) -> bool:
    """Whether nothing else is in its storage."""
    return tensor.layout is torch.strided and tensor.nbytes == tensor.untyped_storage().nbytes()


def _bits_of(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_BITS[tensor.itemsize])


def _refusal(held: Held) -> Refusal:
    what = f"keeps `{held.path}` ({TensorMeta.of(held.tensor)}), which may be a copy of weights"
    return Refusal(
        module=held.module or "the model",
        reason=f"{what}, and a refit would not update it",
        remedy="Boot without what makes it, or ask for support",
    )
