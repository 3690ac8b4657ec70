"""The RL frameworks' recipe, as a baseline: block quantization in eager PyTorch, tensor by tensor."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8refit.kernels.placement import packed
from fp8refit.kernels.reference import block_scales, global_scale_of, quantize_two_levels
from fp8refit.live.formats import BlockFormat
from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.live.slots import SCALE_SUFFIX


def eager_quantize(weight: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix as frameworks do: a dozen operations over all of it, in float32.

    Scales and codes are those of `fp8refit.quantize_blockwise`.

    Args:
        weight: (N, K), BF16.
        block_format: Blocks, scales and codes.

    Returns:
        Codes (N, K) float8_e4m3fn and scales (ceil(N / block_n), ceil(K / block_k)) float32.
    """
    (rows, cols), (block_n, block_k) = weight.shape, block_format.block_size
    padded = pad(weight, (0, -cols % block_k, 0, -rows % block_n)).float()
    blocks = padded.view(padded.shape[0] // block_n, block_n, padded.shape[1] // block_k, block_k)
    amax = blocks.abs().amax(dim=(1, 3))
    if block_format.scale_format.has_powers_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(amax.clamp(min=block_format.scale_format.amax_floor) / 464)))
    else:
        scale = block_scales(amax, block_format)
    inverse = torch.ones_like(scale) / scale
    scaled = (
        blocks / scale[:, None, :, None] if block_format.scale_format.divides else blocks * inverse[:, None, :, None]
    )
    codes = scaled.clamp(-448, 448).to(block_format.codes.dtype)
    return codes.view(padded.shape)[:rows, :cols].contiguous(), scale


def eager_checkpoint(layout: EngineLayout, policy: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a block-FP8 or NVFP4 checkpoint, each computed on request."""
    slots: dict[str, SlotLayout] = {slot.name: slot for slot in layout.slots}
    maxima: dict[str, Tensor] = {}
    for name, weight in policy.items():
        slot = slots[name]
        if slot.format is not None and slot.format.scale_format.has_two_levels:
            amax = weight.abs().amax().float().reshape(1)
            maxima[slot.shared_with] = torch.maximum(maxima.get(slot.shared_with, amax), amax)
    for name, weight in policy.items():
        slot = slots[name]
        if slot.format is None:
            yield name, weight
            continue
        if slot.format.scale_format.has_two_levels:
            over_all = global_scale_of(maxima[slot.shared_with], slot.format.scale_format)
            codes, scale = quantize_two_levels(weight, slot.format, over_all)
            yield name, packed(codes)
            yield name + layout.container.scale_suffix(slot.format), scale
            yield name + layout.container.global_suffix, over_all.reshape(())
            continue
        codes, scale = eager_quantize(weight, slot.format)
        yield name, codes
        yield name + SCALE_SUFFIX, scale
