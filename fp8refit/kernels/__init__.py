"""Plain functions over the kernels. Nothing above this package knows Triton; CPU tensors take the torch reference."""

import torch
from torch import Tensor

from fp8refit.errors import NonFiniteError
from fp8refit.kernels.amax import Maxima
from fp8refit.kernels.reference import dequantize_reference
from fp8refit.kernels.table import Task, WorkTable, compile_table, fits_scale_format
from fp8refit.slots import FP8_DTYPE, SOURCE_DTYPES, Op, ScaleFormat

__all__ = [
    "Maxima",
    "Task",
    "WorkTable",
    "compile_table",
    "dequantize_blockwise",
    "fits_scale_format",
    "quantize_blockwise",
]


def quantize_blockwise(
    weight: Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    scale_format: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to block FP8 with the arithmetic that `refit` uses.

    For each block, edges ragged: `amax = max(|x|)`; scale `s = amax / 448` for `fp32`, or the smallest power of two with
    `amax / s <= 464` for `ue8m0` (464 is the largest value that rounds to 448, so that vLLM's own requantization at boot
    changes nothing); code `e4m3(clamp(x * (1 / s), -448, 448))`, rounded to nearest even. A block of zeros gets zero
    codes and a small positive scale. CPU and GPU give the same bits.

    Args:
        weight: (N, K), bfloat16, float16 or float32, any strides, CPU or CUDA. float32 is quantized as it is.
        block_size: Rows and columns of one block.
        scale_format: `"fp32"` or `"ue8m0"`.

    Returns:
        Codes (N, K) float8_e4m3fn and scales (ceil(N / block_n), ceil(K / block_k)) float32, the multipliers that
        dequantize (`weight_scale_inv` in a checkpoint).

    Raises:
        ValueError: Wrong shape, dtype, block size or format.
        NonFiniteError: `weight` holds NaN or Inf.

    Example:
        >>> codes, scale = quantize_blockwise(torch.full((128, 256), 896.0))
        >>> scale
        tensor([[2., 2.]])
    """
    if weight.ndim != 2 or weight.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"weight is {weight.dtype} with shape {list(weight.shape)}; "
            "quantize_blockwise takes a matrix of bfloat16, float16 or float32"
        )
    block_n, block_k = block_size
    if block_n < 1 or block_k < 1:
        raise ValueError(f"block_size is {block_size}; both sides must be at least 1")
    rows, cols = weight.shape
    codes = torch.empty((rows, cols), dtype=FP8_DTYPE, device=weight.device)
    scale = torch.empty((-(-rows // block_n), -(-cols // block_k)), dtype=torch.float32, device=weight.device)
    task = Task(
        op=Op.QUANTIZE,
        source=weight.detach(),
        offset=(0, 0),
        target=codes,
        scale=scale,
        block_size=(block_n, block_k),
        scale_format=ScaleFormat(scale_format),
        round_to_bf16=False,
    )
    table = compile_table([task], weight.device)
    table.launch(check=True)
    if table.bad_tasks():
        raise NonFiniteError(["weight"], written=False)
    return codes, scale


def dequantize_blockwise(
    codes: Tensor,
    scale: Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Undo `quantize_blockwise`: `codes * scale`, computed in float32 and rounded once to `dtype`.

    Args:
        codes: (N, K) float8_e4m3fn.
        scale: (ceil(N / block_n), ceil(K / block_k)) float32.
        block_size: Rows and columns of one block.
        dtype: dtype of the result.

    Returns:
        (N, K) in `dtype`.

    Raises:
        ValueError: The shapes do not belong together.
    """
    expected = tuple(-(-length // size) for length, size in zip(codes.shape, block_size, strict=True))
    if codes.ndim != 2 or tuple(scale.shape) != expected:
        raise ValueError(
            f"codes {list(codes.shape)} in blocks of {block_size} need scales {list(expected)}, got {list(scale.shape)}"
        )
    return dequantize_reference(codes, scale, block_size).to(dtype)
