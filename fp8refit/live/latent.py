"""Absorbed copies of latent attention (MLA): tensors that an engine computes from `kv_b_proj` at boot and uses to decode.

`kv_b_proj` (N * (P + V), L) turns one latent of L values into P key values and V value values for each of N heads.
Engines also keep both parts dequantized; writing `kv_b_proj` does not update them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fp8refit.live.parameters import LiveTensor
from fp8refit.live.slots import Inventory, Refresh


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Absorbed:
    """The absorbed copies of one attention layer."""

    name: str
    """Engine module they belong to."""
    owner: nn.Module
    keys: str
    """Attribute of `owner` that holds (N, P, L), with any strides."""
    values: str
    """Attribute of `owner` that holds (N, L, V), with any strides."""
    source: Tensor
    """Live weight of `kv_b_proj`."""
    dequantized: Callable[[torch.dtype], Tensor]
    """Returns `kv_b_proj` (N * (P + V), L) as the engine dequantizes it at boot, bit for bit."""

    @property
    def are_views(self) -> bool:
        """Whether the copies are views of `kv_b_proj`, which is then not quantized."""
        held = {copy.untyped_storage().data_ptr() for copy in self._copies}
        return held == {self.source.untyped_storage().data_ptr()}

    @property
    def live(self) -> tuple[LiveTensor, ...]:
        """The copies that are neither parameters nor buffers. They must not move either."""
        attributes = vars(self.owner)
        held = (key for key in (self.keys, self.values) if key in attributes)
        return tuple(LiveTensor.of(f"{self.name}.{key}", attributes, key, attributes[key]) for key in held)

    def refresh(self) -> None:
        """Compute the copies again, in place."""
        keys_NPL, values_NLV = self._copies
        weight = self.dequantized(keys_NPL.dtype)
        num_heads, num_key_rows, _ = keys_NPL.shape
        heads = weight.view(num_heads, -1, weight.shape[1])
        keys_NPL.copy_(heads[:, :num_key_rows])
        values_NLV.copy_(heads[:, num_key_rows:].transpose(1, 2))

    @property
    def _copies(self) -> tuple[Tensor, Tensor]:
        return getattr(self.owner, self.keys).detach(), getattr(self.owner, self.values).detach()


def with_absorbed(inventory: Inventory, layers: Iterable[Absorbed]) -> Inventory:
    """Return `inventory` with absorbed copies added: refreshed after each fill, and watched."""
    layers = tuple(layers)
    refreshes = (
        Refresh(name=f"{layer.name}: absorbed copies", run=layer.refresh) for layer in layers if not layer.are_views
    )
    return replace(
        inventory,
        live=(*inventory.live, *(live for layer in layers for live in layer.live)),
        refreshes=(*inventory.refreshes, *refreshes),
    )
