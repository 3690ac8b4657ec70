"""A weight with a product of two small matrices in it, as LoRA adds one: each element is read and written once."""

import torch
from torch import Tensor


@torch.no_grad()
def add_product(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """Write `weight + scale * up @ down` to `out`, added up in float32 and rounded once. Nothing here waits for the device.

    Args:
        weight: (N, K), of a floating dtype.
        up: (N, R), of any; rounded to that of `weight`.
        down: (R, K), likewise.
        scale: Of the product.
        out: (N, K) of `weight`'s dtype and device, with dense rows; `weight` itself, or other memory.
    """
    up, down = up.to(weight.dtype), down.to(weight.dtype)
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return add_product_reference(weight, up, down, scale, out=out)
    from fp8refit.fill.kernels.triton_merge import add_product_triton

    return add_product_triton(weight, up, down, scale, out=out)


def add_product_reference(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """The specification, but for the last bit: in which order products are added up is not said."""
    return torch.addmm(weight, up, down, alpha=scale, out=out)
