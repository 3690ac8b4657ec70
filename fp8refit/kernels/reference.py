"""The quantizer in torch: the specification that every kernel equals bit for bit."""

from typing import assert_never

import torch
from torch import Tensor

from fp8refit.live.formats import AmaxOver, BlockFormat, Codes, ScaleFormat

E4M3_MAX = 448.0
UE8M0_MANTISSA_464 = 0x680000
"""Mantissa bits of 464 = 1.8125 * 2**8, the largest value that still rounds to 448 in E4M3."""


def block_scales(amax: Tensor, block_format: BlockFormat) -> Tensor:
    """Scales for blocks of E4M3 codes whose largest magnitude is `amax` (float32).

    `fp32`, `fp32_floored` and `fp32_dividing`: `amax / 448`. `fp32_reciprocal`: `amax` times the float32 next to `1 / 448`.
    `ue8m0`: the smallest power of two `s` with `amax / s <= 464`, found from the exponent bits; with 464 instead of 448 vLLM's
    requantization at boot leaves the codes as they are.
    """
    match block_format.codes:
        case Codes.E4M3:
            amax = amax.clamp(min=block_format.scale_format.amax_floor)
        case _:
            assert_never(block_format.codes)
    match block_format.scale_format:
        case ScaleFormat.FP32 | ScaleFormat.FP32_FLOORED | ScaleFormat.FP32_DIVIDING:
            # Divide by a tensor: torch on CUDA turns division by a Python number into multiplication by its reciprocal.
            return amax / torch.full_like(amax, E4M3_MAX)
        case ScaleFormat.FP32_RECIPROCAL:
            return amax * torch.full_like(amax, 1 / E4M3_MAX)
        case ScaleFormat.UE8M0:
            bits = amax.view(torch.int32)
            exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > UE8M0_MANTISSA_464).to(torch.int32)
            return (exponent << 23).view(torch.float32)
        case _:
            assert_never(block_format.scale_format)


def quantize_reference(
    weight: Tensor, block_format: BlockFormat, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `weight` (N, K) in blocks; edges are ragged and padding never takes part.

    Args:
        weight: The matrix.
        block_format: How.
        given: Scales to use instead of the blocks' own, such as those of whole rows of which `weight` is a part.

    Returns:
        Codes (N, K) float8_e4m3fn, scales (ceil(N / block_n), ceil(K / block_k)) float32, and a 0-d bool tensor that
        says whether any value is NaN or Inf (the codes of such a block mean nothing).
    """
    block_n, block_k = _fitted(block_format.block_size, weight)
    (rows, cols), (num_n, num_k) = weight.shape, block_format.scale_shape(weight.shape)
    padded = weight.new_zeros((num_n * block_n, num_k * block_k), dtype=torch.float32)
    padded[:rows, :cols] = weight
    blocks = padded.view(num_n, block_n, num_k, block_k)
    match block_format.amax_over:
        case AmaxOver.OWN_SLICE | AmaxOver.WHOLE_BLOCK:
            amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        case _:
            assert_never(block_format.amax_over)
    scale = block_scales(amax, block_format) if given is None else given.view_as(amax)
    scaled = blocks / scale if block_format.scale_format.divides else blocks * (torch.ones_like(scale) / scale)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(block_format.codes.dtype).view_as(padded)[:rows, :cols]
    return codes.contiguous(), scale.view(num_n, num_k), ~torch.isfinite(amax).all()


def dequantize_reference(codes: Tensor, scale: Tensor, block_size: tuple[int, int]) -> Tensor:
    """`codes * scale` in float32."""
    (rows, cols), (block_n, block_k) = codes.shape, _fitted(block_size, codes)
    expanded = scale.repeat_interleave(block_n, 0)[:rows].repeat_interleave(block_k, 1)[:, :cols]
    return codes.to(torch.float32) * expanded


def _fitted(block_size: tuple[int, int], matrix: Tensor) -> tuple[int, ...]:
    """Return the size of the largest block that a matrix has."""
    return tuple(max(1, min(size, length)) for size, length in zip(block_size, matrix.shape, strict=True))
