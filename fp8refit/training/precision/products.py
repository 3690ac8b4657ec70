"""A block-FP8 product and its straight-through gradient.

Forward: `y = x^ w^T`, where `w^` is the dequantized weight and `x^` the input as the engine's kernel quantizes it.
Backward treats quantization as the identity: `dx = dy w^` and `dw = dy^T x^`. If the GPU multiplies 128x128 blocks, all
three are torchao's FP8 products; otherwise operands are dequantized and multiplied in float32.

Legend of shape suffixes: M tokens, N outputs, K inputs, E experts.
"""

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fp8refit.kernels.activations import quantize_activations
from fp8refit.kernels.reference import dequantize_reference
from fp8refit.live.formats import BlockFormat, ScaleFormat

BLOCK = 128
"""The only block size that devices multiply natively."""


@functools.cache
def has_fp8_products(device: torch.device) -> bool:
    """Whether torchao's products run on `device`."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and find_spec("torchao") is not None
    )


class Product(torch.autograd.Function):
    """`x w^T` with the codes and scales of `w`. The gradient goes to `w` itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_NK: Tensor,
        codes_NK: Tensor,
        scale: Tensor,
        block_format: BlockFormat,
        is_native: bool,
    ) -> Tensor:
        """Multiply. `weight_NK` is not read."""
        ctx.save_for_backward(x_MK, codes_NK, scale)
        ctx.how = block_format, is_native
        ctx.weight_dtype = weight_NK.dtype
        return _forward(x_MK, codes_NK, scale, *ctx.how)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the weight."""
        x_MK, codes_NK, scale = ctx.saved_tensors
        dx = _input_gradient(dy_MN, codes_NK, scale, *ctx.how).to(x_MK.dtype) if ctx.needs_input_grad[0] else None
        dw = _weight_gradient(dy_MN, x_MK, *ctx.how).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None, None


class GroupedProduct(torch.autograd.Function):
    """`Product` for runs of tokens with one expert each."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_ENK: Tensor,
        codes_ENK: Tensor,
        scale_E: Tensor,
        counts: list[int],
        block_format: BlockFormat,
        is_native: bool,
    ) -> Tensor:
        """Multiply the first `counts[0]` rows by expert 0, the next `counts[1]` by expert 1, and so on."""
        ctx.save_for_backward(x_MK, codes_ENK, scale_E)
        ctx.counts, ctx.how = counts, (block_format, is_native)
        ctx.weight_shape, ctx.weight_dtype = weight_ENK.shape, weight_ENK.dtype
        y_MN = x_MK.new_empty((x_MK.shape[0], codes_ENK.shape[1]))
        for expert, (x, y) in enumerate(zip(torch.split(x_MK, counts), torch.split(y_MN, counts), strict=True)):
            if len(x):
                y.copy_(_forward(x, codes_ENK[expert], scale_E[expert], *ctx.how))
        return y_MN

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the experts. Experts without tokens get zeros."""
        x_MK, codes_ENK, scale_E = ctx.saved_tensors
        dx = torch.empty_like(x_MK) if ctx.needs_input_grad[0] else None
        dw = dy_MN.new_zeros(ctx.weight_shape, dtype=ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        first = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(first, first + count)
            first += count
            if count and dx is not None:
                dx[rows] = _input_gradient(dy_MN[rows], codes_ENK[expert], scale_E[expert], *ctx.how).to(dx.dtype)
            if count and dw is not None:
                dw[expert] = _weight_gradient(dy_MN[rows], x_MK[rows], *ctx.how).to(dw.dtype)
        return dx, dw, None, None, None, None, None


def _forward(x_MK: Tensor, codes_NK: Tensor, scale: Tensor, block_format: BlockFormat, is_native: bool) -> Tensor:
    if is_native:
        x_codes, x_scale = _quantize_groups(x_MK, block_format.scale_format)
        return _multiply(x_codes, codes_NK.t(), x_scale, scale.t(), x_MK.dtype, is_grid=True)[: len(x_MK)]
    x_codes, x_scale = quantize_activations(x_MK, block_format)
    with torch.autocast(x_MK.device.type, enabled=False):
        x = dequantize_reference(x_codes, x_scale, (1, block_format.block_size[1]))
        return (x @ dequantize_reference(codes_NK, scale, block_format.block_size).t()).to(x_MK.dtype)


def _input_gradient(
    dy_MN: Tensor, codes_NK: Tensor, scale: Tensor, block_format: BlockFormat, is_native: bool
) -> Tensor:
    if is_native:
        dy_codes, dy_scale = _quantize_groups(dy_MN, ScaleFormat.FP32)
        codes_KN = codes_NK.view(torch.uint8).t().contiguous().view(codes_NK.dtype)
        scale_KN = scale.t().contiguous().t()
        return _multiply(dy_codes, codes_KN.t(), dy_scale, scale_KN, dy_MN.dtype, is_grid=True)[: len(dy_MN)]
    with torch.autocast(dy_MN.device.type, enabled=False):
        return dy_MN.float() @ dequantize_reference(codes_NK, scale, block_format.block_size)


def _weight_gradient(dy_MN: Tensor, x_MK: Tensor, block_format: BlockFormat, is_native: bool) -> Tensor:
    if is_native:
        dy_codes, dy_scale = _quantize_groups(dy_MN, ScaleFormat.FP32, is_transposed=True)
        x_codes, x_scale = _quantize_groups(x_MK, ScaleFormat.FP32, is_transposed=True)
        return _multiply(dy_codes, x_codes.t(), dy_scale, x_scale, dy_MN.dtype, is_grid=False)
    x_codes, x_scale = quantize_activations(x_MK, block_format)
    with torch.autocast(dy_MN.device.type, enabled=False):
        return dy_MN.float().t() @ dequantize_reference(x_codes, x_scale, (1, block_format.block_size[1]))


def _quantize_groups(x: Tensor, scale_format: ScaleFormat, *, is_transposed: bool = False) -> tuple[Tensor, Tensor]:
    from fp8refit.kernels.triton_groups import quantize_groups  # Triton does not exist for every device

    return quantize_groups(x, scale_format, is_transposed=is_transposed)


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *, is_grid: bool) -> Tensor:
    """Multiply `a`, in groups of 1x128, by `b`, in blocks of 128x128 if `is_grid` and else in groups of 128x1."""
    from torchao.prototype.blockwise_fp8_training import kernels

    of_a = kernels._scaling_type_value(kernels.BLOCKWISE_1X128_SCALING_TYPE)
    of_b = kernels._scaling_type_value(kernels.BLOCKWISE_128X128_SCALING_TYPE) if is_grid else of_a
    y: Tensor = kernels.blockwise_scaled_mm(a, b, a_scale, of_a, b_scale, of_b, dtype)
    return y
