"""A linear layer with block-FP8 weights and dynamically quantized activations, for inference.

Both operands are E4M3: the weight in blocks, the input in groups along K with one scale per token and group. It uses
the device's block-scaled product if there is one, and otherwise multiplies dequantized operands in float32. A
dequantized weight exists only during one forward, so the FP8 bytes are the only copy.

Legend of shape suffixes: M tokens, N outputs, K inputs, G groups of K.
"""

import functools
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8refit import dequantize_blockwise, quantize_blockwise
from fp8refit.kernels import quantize_activations
from fp8refit.live.formats import BlockFormat

DEVICE_BLOCK = 128
"""The only block length that devices support natively."""


class BlockFp8Linear(nn.Module):
    """`y = x W^T + b` with W (N, K) as E4M3 codes and block scales. No gradient flows through it.

    Args:
        weight: (N, K) float8_e4m3fn.
        weight_scale_inv: (ceil(N / block_n), ceil(K / block_k)) float32, the factors that dequantize.
        bias: (N,), or None.
        block_format: That of the weight. Input groups are as long as its blocks have columns, with scales of the same format,
            as in DeepGEMM.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale_inv: Tensor,
        bias: Tensor | None = None,
        *,
        block_format: BlockFormat,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format = block_format
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight_scale_inv, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, block_format: BlockFormat) -> Self:
        """Quantize `linear`. A float32 weight is rounded to BF16 first, as `Refitter` does by default.

        Raises:
            NonFiniteError: The weight holds NaN or Inf.
        """
        weight = linear.weight
        if weight.dtype is torch.float32:
            weight = weight.to(torch.bfloat16)
        codes, scale = quantize_blockwise(weight, format=block_format)
        layer = cls(codes, scale, linear.bias, block_format=block_format)
        return layer.train(linear.training)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` (..., K); returns (..., N) in the dtype of `x`."""
        x_MK = x.reshape(-1, self.in_features)
        codes_MK, scale_MG = quantize_activations(x_MK, self.format)
        y_MN = self._multiply(codes_MK, scale_MG, x.dtype).to(x.dtype)
        if self.bias is not None:
            y_MN = y_MN + self.bias.to(x.dtype)  # after rounding, as in vLLM and SGLang
        return y_MN.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to the model's device; codes and scales keep their dtypes when the model is converted."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            if tensor is not self.weight and tensor is not self.weight_scale_inv:
                return fn(tensor)
            bytes_of = tensor.detach().view(torch.uint8)
            return fn(bytes_of).view(tensor.dtype)

        super()._apply(keep_dtype, recurse)
        return self

    def extra_repr(self) -> str:
        """Shapes and format, for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size={self.format.block_size}, scale_format={self.format.scale_format}"
        )

    def _multiply(self, codes_MK: Tensor, scale_MG: Tensor, dtype: torch.dtype) -> Tensor:
        device = self.weight.device
        if self._fits_device_blocks() and has_block_scaled_product(device, dtype):
            return block_scaled_product(codes_MK, scale_MG, self.weight, self.weight_scale_inv, dtype)
        x_MK = dequantize_blockwise(codes_MK, scale_MG, block_size=(1, self.format.block_size[1]))
        w_NK = dequantize_blockwise(self.weight, self.weight_scale_inv, block_size=self.format.block_size)
        return x_MK @ w_NK.t()

    def _fits_device_blocks(self) -> bool:
        return (
            self.weight.is_cuda
            and self.format.block_size == (DEVICE_BLOCK, DEVICE_BLOCK)
            and self.in_features % DEVICE_BLOCK == 0
            and self.out_features % DEVICE_BLOCK == 0
        )


def block_scaled_product(
    codes_MK: Tensor, scale_MG: Tensor, weight_NK: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply E4M3 operands with the device's own 1x128 by 128x128 scaled product (cuBLASLt).

    It needs a multiple of four tokens, input scales that are contiguous along tokens, and weight scales padded to a
    multiple of four along K. Without that padding its result is silently wrong (pytorch/pytorch#166752).

    Args:
        codes_MK: (M, K) float8_e4m3fn.
        scale_MG: (M, K / 128) float32.
        weight_NK: (N, K) float8_e4m3fn.
        weight_scale: (N / 128, K / 128) float32.
        dtype: bfloat16 or float32.

    Returns:
        (M, N) in `dtype`.
    """
    num_tokens, num_groups = scale_MG.shape
    missing_tokens = -num_tokens % 4
    codes_MK = functional.pad(codes_MK.view(torch.uint8), (0, 0, 0, missing_tokens)).view(codes_MK.dtype)
    scale_MG = functional.pad(scale_MG, (0, 0, 0, missing_tokens)).t().contiguous().t()
    padded_scale = functional.pad(weight_scale, (0, -num_groups % 4))
    product = functional.scaled_mm(
        codes_MK,
        weight_NK.t(),
        scale_MG,
        functional.ScalingType.BlockWise1x128,
        padded_scale.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return product[:num_tokens]


@functools.cache
def has_block_scaled_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `block_scaled_product` works on `device`, found by checking one small product."""
    if device.type != "cuda" or not hasattr(functional, "scaled_mm"):
        return False
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(rows, 640, generator=generator, device=device) for rows in (3, 256))
    codes, scale = quantize_activations(x, BlockFormat())
    weight, weight_scale = quantize_blockwise(w)
    try:
        product = block_scaled_product(codes, scale, weight, weight_scale, dtype)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    x = dequantize_blockwise(codes, scale, block_size=(1, DEVICE_BLOCK))
    w = dequantize_blockwise(weight, weight_scale)
    return torch.allclose(product.float(), x @ w.t(), rtol=1e-2, atol=0.05)
