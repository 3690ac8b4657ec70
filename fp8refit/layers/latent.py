"""Absorbed copies of latent attention (MLA): what an engine computes from `kv_b_proj` at boot, and multiplies by to decode.

`kv_b_proj` (N * (P + V), L) makes, of one latent of L values, P values of key and V of value for each of N heads. Engines keep
both parts beside it, dequantized, where a write to `kv_b_proj` does not reach them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fp8refit.live import LiveTensor
from fp8refit.slots import Inventory, Refresh


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Absorbed:
    """The absorbed copies of one attention layer."""

    name: str
    """Engine module that owns them."""
    owner: nn.Module
    keys: str
    """Attribute of `owner` that holds (N, P, L), any strides."""
    values: str
    """Attribute of `owner` that holds (N, L, V), any strides."""
    source: Tensor
    """Live weight of `kv_b_proj`."""
    dequantized: Callable[[torch.dtype], Tensor]
    """Gives `kv_b_proj` (N * (P + V), L) as the engine dequantizes it at boot, bit for bit."""

    @property
    def are_views(self) -> bool:
        """Whether they are views of `kv_b_proj` itself, which is not quantized then."""
        held = {copy.untyped_storage().data_ptr() for copy in self._copies}
        return held == {self.source.untyped_storage().data_ptr()}

    @property
    def live(self) -> tuple[LiveTensor, ...]:
        """Those that are neither parameters nor buffers, and may not move either."""
        attributes = vars(self.owner)
        held = ((key, attributes[key]) for key in (self.keys, self.values) if key in attributes)
        return tuple(
            LiveTensor(
                name=f"{self.name}.{key}",
                holder=attributes,
                key=key,
                tensor=tensor,
                data_ptr=tensor.data_ptr(),
                layout=(tensor.shape, tensor.stride(), tensor.dtype),
            )
            for key, tensor in held
        )

    def refresh(self) -> None:
        """Compute them again, into the storage that they have."""
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
    """`inventory` of a model whose attention layers keep absorbed copies: refreshed after each fill, and watched."""
    layers = tuple(layers)
    refreshes = (
        Refresh(name=f"{layer.name}: absorbed copies", run=layer.refresh) for layer in layers if not layer.are_views
    )
    return replace(
        inventory,
        live=(*inventory.live, *(live for layer in layers for live in layer.live)),
        refreshes=(*inventory.refreshes, *refreshes),
    )
