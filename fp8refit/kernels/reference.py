"""The quantizer in torch: the specification that every kernel equals bit for bit."""

from typing import assert_never

import torch
from torch import Tensor

from fp8refit.kernels.placement import packed, put_half_codes, put_scales
from fp8refit.live.formats import AmaxOver, BlockFormat, Codes, Placement, ScaleFormat

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_LEAST_SCALE = 2.0**-9
_E2M1_MIDPOINTS = 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0
"""Between neighbors of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Those at odd places round up, to the even code."""
MARLIN_GLOBAL = 2.0**119
"""What Marlin's kernels for BF16 want the scale of a whole weight times (`nvfp4_marlin_process_global_scale` of vLLM)."""
MARLIN_RAISE = 120
"""How much higher the byte of a scale is that Marlin reads with five bits of exponent and no sign."""
MARLIN_LEAST = 2.0**-6
"""Marlin reads smaller scales as zero (`nvfp4_marlin_process_scales` of vLLM)."""
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
        case Codes.E2M1:
            raise AssertionError("has scales of two levels")
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
        case ScaleFormat.NV_E4M3:
            raise AssertionError("has scales of two levels")
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


def global_scale_of(maximum: Tensor, scale_format: ScaleFormat) -> Tensor:
    """The scale of a weight `amax / 2688`, from the largest magnitude (1,) float32 of it and of all that are fused into one."""
    # Divide by a tensor: see `block_scales`.
    return maximum.clamp(min=scale_format.amax_floor) / maximum.new_tensor([E2M1_MAX * E4M3_MAX])


def quantize_two_levels(weight: Tensor, block_format: BlockFormat, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize `weight` (N, K) with scales of two levels, as ModelOpt's `NVFP4QTensor` does on a CPU.

    Scale of a block `s = e4m3(clamp(amax / (6 * g), 2^-9, 448))`, 1 for a block of zeros; code `e2m1(x / (s * g))`, to nearest,
    ties to even, at most 6. Everything in float32. A value whose quotient underflows keeps its sign, but not in ModelOpt's.

    Args:
        weight: The matrix.
        block_format: How.
        global_scale: The scale `g` of the weight (1,) float32.

    Returns:
        Codes (N, K) uint8, one in each byte, and scales (N, ceil(K / block_k)) float8_e4m3fn. They mean nothing if a value is
        NaN or Inf.
    """
    (rows, cols), (_, block_k) = weight.shape, block_format.block_size
    (_, num_k) = block_format.scale_shape(weight.shape)
    padded = weight.new_zeros((rows, num_k * block_k), dtype=torch.float32)
    padded[:, :cols] = weight
    blocks = padded.view(rows, num_k, block_k)
    amax = blocks.abs().amax(dim=2, keepdim=True)
    scale = _small_scales(amax, global_scale)
    scaled = blocks / (scale.to(torch.float32) * global_scale)
    magnitude = scaled.abs().contiguous()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for place, midpoint in enumerate(_E2M1_MIDPOINTS):
        code += magnitude >= midpoint if place % 2 else magnitude > midpoint
    code += (blocks < 0).to(torch.uint8) << 3
    return code.view(rows, -1)[:, :cols].contiguous(), scale.view(rows, num_k)


def _small_scales(amax: Tensor, global_scale: Tensor) -> Tensor:
    """The E4M3 scales of blocks with these largest magnitudes."""
    wanted = amax / (E2M1_MAX * global_scale)
    return torch.where(wanted == 0, 1.0, wanted).clamp(E2M1_LEAST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)


def put_two_levels(
    target: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    quantized: tuple[Tensor, Tensor, Tensor],
    placement: Placement,
    own_maximum: Tensor | None = None,
) -> None:
    """Write a matrix with scales of two levels as its kernel reads it.

    For Marlin, the blocks' scales are raised by the largest power of two with which the largest one stays at most 448, and that
    of the weight is lowered by it (`_nvfp4_compute_scale_factor` of vLLM).

    Args:
        target: Where codes go, two in each byte.
        scale: Where the blocks' scales go, float8_e4m3fn.
        global_scale: Where that of the weight goes.
        quantized: Codes (N, K) uint8, the blocks' scales (N, blocks), and that of the weight (1,).
        placement: How they lie.
        own_maximum: The largest magnitude (1,) float32 of what the rank holds of the weight and of all that are fused into one;
            None if nothing is raised.
    """
    codes, scales, over_all = quantized
    match placement:
        case Placement.ROW_MAJOR:
            target.copy_(packed(codes))
            scale.view(torch.uint8).copy_(scales.view(torch.uint8))
        case Placement.MARLIN:
            more = torch.zeros_like(over_all, dtype=torch.int32)
            if own_maximum is not None:
                largest = _small_scales(own_maximum, over_all).to(torch.float32).view(torch.int32)
                more = (
                    135 - (largest >> 23) - (largest & 0x7FFFFF > 0x600000).to(torch.int32)
                )  # 448 = 1.75 * 2^(135 - 127)
            raised = (scales.to(torch.float32) * 2.0**more).clamp(max=E4M3_MAX)
            as_read = raised.to(torch.float8_e4m3fn).view(torch.uint8) + MARLIN_RAISE
            put_half_codes(target, codes)
            put_scales(scale.view(torch.uint8), torch.where(raised < MARLIN_LEAST, 0, as_read))
            over_all = over_all * MARLIN_GLOBAL / 2.0**more
        case _:
            assert_never(placement)
    global_scale.copy_(over_all.reshape(global_scale.shape))


def dequantize_reference(codes: Tensor, scale: Tensor, block_size: tuple[int, int]) -> Tensor:
    """`codes * scale` in float32."""
    (rows, cols), (block_n, block_k), scale = codes.shape, _fitted(block_size, codes), scale_values(scale)
    expanded = scale.repeat_interleave(block_n, 0)[:rows].repeat_interleave(block_k, 1)[:, :cols]
    return codes.to(torch.float32) * expanded


def _fitted(block_size: tuple[int, int], matrix: Tensor) -> tuple[int, ...]:
    """Return the size of the largest block that a matrix has."""
    return tuple(max(1, min(size, length)) for size, length in zip(block_size, matrix.shape, strict=True))
