"""Quantizes the input of a block-FP8 product as the engines' kernels do."""

import torch
from torch import Tensor
from torch.nn import functional

from fp8refit.kernels.reference import E4M3_MAX
from fp8refit.live.formats import BlockFormat

AMAX_FLOOR = 1e-10
"""Smallest maximum of a group: `eps` of vLLM's and SGLang's `per_token_group_quant_fp8`."""


def quantize_activations(x_MK: Tensor, weight_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Quantize each row in groups along K, as wide as the blocks of the weight; the last group may be short.

    `scale = amax / 448`, for `ue8m0` rounded up to a power of two (`2 ** ceil(log2(amax / 448))`, unlike for weights), and
    `code = e4m3(clamp(x / scale, -448, 448))`, as in `per_token_group_quant_fp8` of vLLM and SGLang. Plain torch, so that
    `torch.compile` can fuse it.

    Args:
        x_MK: (M, K), any floating dtype.
        weight_format: Format of the weight; kernels take the same codes and scales for both operands.

    Returns:
        Codes (M, K) float8_e4m3fn and scales (M, ceil(K / block_k)) float32.
    """
    (rows, cols), (_, group_size) = x_MK.shape, weight_format.block_size
    group_size = max(1, min(group_size, cols))
    groups = -(-cols // group_size)
    x_MGk = functional.pad(x_MK.to(torch.float32), (0, groups * group_size - cols)).view(rows, groups, group_size)
    amax = x_MGk.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    # Divide by a tensor: torch on CUDA turns division by a Python number into multiplication by its reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    if weight_format.scale_format.has_powers_of_two:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).to(torch.int32)
        scale = (exponent << 23).view(torch.float32)
    codes = (x_MGk / scale).clamp(-E4M3_MAX, E4M3_MAX).to(weight_format.codes.dtype)
    return codes.view(rows, groups * group_size)[:, :cols], scale.view(rows, groups)
