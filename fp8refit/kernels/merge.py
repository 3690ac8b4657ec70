"""Adds low-rank products to weights, as in LoRA, reading and writing each element once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class Product:
    """The arguments of `add_product`. Not frozen: a frozen dataclass takes the host three times as long to make."""

    weight: Tensor
    up: Tensor
    down: Tensor
    scale: float
    out: Tensor


def add_products(products: Sequence[Product]) -> None:
    """Apply `add_product` to each. On a GPU, those with usual layouts share launches. None may read what another writes."""
    rest = [each for each in products if not each.weight.is_cuda]
    if len(rest) < len(products):
        from fp8refit.kernels.triton_merge import add_products_triton

        rest += add_products_triton([each for each in products if each.weight.is_cuda])
    for each in rest:
        add_product(each.weight, each.up, each.down, each.scale, out=each.out)


@torch.no_grad()
def add_product(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """Write `weight + scale * up @ down` to `out`, summed in float32 and rounded once. Does not wait for the device.

    Args:
        weight: (N, K), floating dtype.
        up: (N, R), any floating dtype, which is not rounded.
        down: (R, K), likewise.
        scale: Factor of the product.
        out: (N, K), dtype and device of `weight`, with dense rows; may be `weight` itself.
    """
    if up.dtype is not down.dtype:
        up, down = up.float(), down.float()
    if not weight.is_cuda or not {weight.dtype, up.dtype} <= {torch.bfloat16, torch.float16, torch.float32}:
        return add_product_reference(weight, up, down, scale, out=out)
    from fp8refit.kernels.triton_merge import add_product_triton

    return add_product_triton(weight, up, down, scale, out=out)


def add_product_reference(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """The specification, except for the last bit: the order of summation is not defined."""
    if up.dtype is weight.dtype is down.dtype:
        return torch.addmm(weight, up, down, alpha=scale, out=out)
    wide = torch.promote_types(weight.dtype, torch.float32)
    return out.copy_(torch.addmm(weight.to(wide), up.to(wide), down.to(wide), alpha=scale))
