"""The quantizer in torch: the specification that every kernel equals bit for bit."""

from typing import assert_never

import torch
from torch import Tensor

from fp8refit.live.formats import AmaxOver, BlockFormat, Codes, ScaleFormat

E4M3_MAX = 448.0
_LEAST_POWER = 0x400000
"""Bits of 2**-127, the only power of two in E8M0 that is denormal as float32."""


def block_scales(amax: Tensor, block_format: BlockFormat) -> Tensor:
    """Scales for blocks of E4M3 codes whose largest magnitude is `amax` (float32).

    `fp32`, `fp32_floored` and `fp32_dividing`: `amax / 448`. `fp32_reciprocal`: `amax` times the float32 next to `1 / 448`.
    `ue8m0`: the smallest power of two `s` with `amax / s <= 464`, found from the exponent bits; with 464 instead of 448 vLLM's
    requantization at boot leaves the codes as they are. `mx_...`: see `ScaleFormat.power`; at least 2**-127.
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
        case ScaleFormat.UE8M0 | ScaleFormat.MX_CEIL | ScaleFormat.MX_FLOOR | ScaleFormat.MX_UNIT:
            assert block_format.scale_format.power is not None, f"{block_format=}"
            less, limit = block_format.scale_format.power
            bits = amax.view(torch.int32)
            exponent = (bits >> 23) - less + ((bits & 0x7FFFFF) > limit).to(torch.int32)
            return torch.where(exponent > 0, exponent.clamp(max=254) << 23, _LEAST_POWER).view(torch.float32)
        case _:
            assert_never(block_format.scale_format)


def stored_scales(scales: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Float32 scales in the dtype in which they are stored."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8) if scale_format.has_exponents else scales


def scale_values(stored: Tensor) -> Tensor:
    """The float32 scales of stored ones."""
    if stored.dtype is not torch.uint8:
        return stored
    return torch.where(stored > 0, stored.to(torch.int32) << 23, _LEAST_POWER).view(torch.float32)


def quantize_reference(
    weight: Tensor, block_format: BlockFormat, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `weight` (N, K) in blocks; edges are ragged and padding never takes part.

    Args:
        weight: The matrix.
        block_format: How.
        given: Scales to use instead of the blocks' own, such as those of whole rows of which `weight` is a part.

    Returns:
        Codes (N, K) float8_e4m3fn, scales (ceil(N / block_n), ceil(K / block_k)) as they are stored, and a 0-d bool tensor
        that says whether any value is NaN or Inf (the codes of such a block mean nothing).
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
    stored = stored_scales(scale, block_format.scale_format)
    return codes.contiguous(), stored.view(num_n, num_k), ~torch.isfinite(amax).all()


def dequantize_reference(codes: Tensor, scale: Tensor, block_size: tuple[int, int]) -> Tensor:
    """`codes * scale` in float32."""
    (rows, cols), (block_n, block_k), scale = codes.shape, _fitted(block_size, codes), scale_values(scale)
    expanded = scale.repeat_interleave(block_n, 0)[:rows].repeat_interleave(block_k, 1)[:, :cols]
    return codes.to(torch.float32) * expanded


def _fitted(block_size: tuple[int, int], matrix: Tensor) -> tuple[int, ...]:
    """Return the size of the largest block that a matrix has."""
    return tuple(max(1, min(size, length)) for size, length in zip(block_size, matrix.shape, strict=True))
