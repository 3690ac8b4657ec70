"""Plain functions over the kernels. Nothing outside this package uses Triton; CPU tensors take the torch reference."""

from dataclasses import replace

import torch
from torch import Tensor

from fp8refit.errors import NonFiniteError
from fp8refit.kernels.activations import quantize_activations
from fp8refit.kernels.amax import Maxima
from fp8refit.kernels.reference import dequantize_reference
from fp8refit.kernels.reference_table import fits_scale_format
from fp8refit.kernels.table import compile_table, join_tables
from fp8refit.kernels.work import Action, Task, WorkTable
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat
from fp8refit.live.slots import FP8_DTYPE, SOURCE_DTYPES, Op
from fp8refit.live.storage import why_unreadable

__all__ = [
    "Action",
    "Maxima",
    "Task",
    "WorkTable",
    "compile_table",
    "dequantize_blockwise",
    "fits_scale_format",
    "join_tables",
    "quantize_activations",
    "quantize_blockwise",
]

_SCALE_DTYPES = torch.float32, torch.uint8


def quantize_blockwise(
    weight: Tensor,
    *,
    format: BlockFormat | None = None,
    block_size: tuple[int, int] = (128, 128),
    scale_format: str = "fp32",
) -> tuple[Tensor, ...]:
    """Quantize a matrix with the arithmetic that `refit` uses.

    For each block (blocks at the edges may be smaller): `amax = max(|x|)`; scale `s = amax / 448` for `fp32`, or the
    smallest power of two with `amax / s <= 464` for `ue8m0` (464 is the largest value that rounds to 448, so that vLLM's own
    requantization at boot changes nothing); code `e4m3(clamp(x * (1 / s), -448, 448))`, rounded to nearest even. A block of
    zeros gets zero codes and a small positive scale: `amax` is at least 1e-10 for `fp32`, and 1e-4 otherwise. CPU and GPU
    give the same bits. vLLM's own quantizer (`fp8_per_block`) computes `amax / 448` on a CPU (`fp32_floored`), and
    `amax * (1 / 448)` on a GPU (`fp32_reciprocal`). Its quantizer of rows (`fp8_per_channel`) divides by the scale, with a
    floor of 1/512 (`fp32_dividing` in blocks of `(1, K)`).

    Args:
        weight: (N, K), bfloat16, float16 or float32, any strides, CPU or CUDA. float32 is quantized as it is.
        format: `PER_ROW`, `PER_TENSOR`, `MXFP8` or `NVFP4` of `fp8refit.live.formats`, or another of its `BlockFormat`, in
            place of the next two.
        block_size: Rows and columns of one block.
        scale_format: `"fp32"`, `"ue8m0"`, `"fp32_floored"`, `"fp32_reciprocal"` or `"fp32_dividing"`.

    Returns:
        Codes (N, K) float8_e4m3fn and scales (ceil(N / block_n), ceil(K / block_k)) float32, the multipliers that
        dequantize (`weight_scale_inv` in a checkpoint). Scales of `MXFP8` are uint8: the exponent plus 127. `NVFP4`: codes
        (N, K / 2) uint8, two in each byte; scales (N, K / 16) float8_e4m3fn; and the scale of the whole weight (1,) float32.

    Raises:
        TypeError: `weight` is not a tensor.
        ValueError: Wrong shape, dtype, block size or format, or a tensor without bytes.
        NonFiniteError: `weight` holds NaN or Inf.

    Examples:
        >>> codes, scale = quantize_blockwise(torch.full((128, 256), 896.0))
        >>> scale
        tensor([[2., 2.]])
    """
    if scale_format not in FLOAT_SCALES:
        raise ValueError(f"scale_format is {scale_format!r}; use one of {', '.join(map(repr, map(str, FLOAT_SCALES)))}")
    block_format = format or BlockFormat(scale_format=ScaleFormat(scale_format), block_size=block_size)
    _check_matrix("weight", weight)
    if weight.shape[1] % block_format.block_size[1] and block_format.scale_format.has_two_levels:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; NVFP4 needs rows of whole blocks of {block_format.block}"
        )
    if problem := why_unreadable(weight):
        raise ValueError(f"weight {problem}")
    if weight.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"weight is {weight.dtype} with shape {list(weight.shape)}; "
            "quantize_blockwise takes a matrix of bfloat16, float16 or float32"
        )
    return quantized(weight.detach(), block_format)


def quantized(weight: Tensor, block_format: BlockFormat, maximum: float | None = None) -> tuple[Tensor, ...]:
    """Quantize a matrix that was checked, as `quantize_blockwise` does.

    Args:
        weight: The matrix.
        block_format: How.
        maximum: The largest magnitude of it and of all that share a scale with it, if there are others.

    Raises:
        NonFiniteError: `weight` holds NaN or Inf.
    """
    (rows, columns), in_one = weight.shape, block_format.codes.per_element
    codes = torch.empty((rows, -(-columns // in_one)), dtype=block_format.codes.dtype, device=weight.device)
    scale_shape = block_format.scale_shape(weight.shape)
    scale = torch.empty(scale_shape, dtype=block_format.scale_format.dtype, device=weight.device)
    over_all = torch.zeros(1, dtype=torch.float32, device=weight.device)
    has_two = block_format.scale_format.has_two_levels
    task = Task(
        op=Op.QUANTIZE,
        source=weight,
        offset=(0, 0),
        target=codes,
        scale=scale,
        global_scale=over_all if has_two else None,
        format=block_format,
        round_to_bf16=False,
    )
    tasks = [task]
    if block_format.needs_maximum:
        found = torch.full((1,), maximum or 0.0, dtype=torch.float32, device=weight.device)
        raised = replace(
            task, op=Op.MAXIMUM, target=found, scale=None, global_scale=None, box_shape=tuple(weight.shape)
        )
        tasks = [raised, replace(task, maximum=found, own_maximum=found)]
    table = compile_table(tasks, weight.device)
    table.launch(check=True)
    if table.bad_tasks():
        raise NonFiniteError(["weight"], written=False)
    return (codes, scale, over_all) if has_two else (codes, scale)


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
        scale: (ceil(N / block_n), ceil(K / block_k)) float32, or uint8 with the bits of E8M0 (MXFP8).
        block_size: Rows and columns of one block.
        dtype: dtype of the result.

    Returns:
        (N, K) in `dtype`.

    Raises:
        TypeError: `codes` or `scale` is not a tensor, or `dtype` is not a dtype.
        ValueError: Shapes do not match, dtypes or block size are wrong, devices differ, or a tensor has no bytes.
    """
    _check_matrix("codes", codes)
    _check_matrix("scale", scale)
    if codes.dtype != FP8_DTYPE or scale.dtype not in _SCALE_DTYPES or codes.device != scale.device:
        raise ValueError(
            f"codes are {codes.dtype} on {codes.device}, scales {scale.dtype} on {scale.device}; they must be {FP8_DTYPE} and "
            "torch.float32, or torch.uint8 (E8M0), on one device"
        )
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; pass a torch.dtype, such as torch.bfloat16")
    expected = BlockFormat(block_size=block_size).scale_shape(codes.shape)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"codes {list(codes.shape)} in blocks of {block_size} need scales {list(expected)}, got {list(scale.shape)}"
        )
    return dequantize_reference(codes, scale, block_size).to(dtype)


def _check_matrix(name: str, value: object) -> None:
    """Check that a value is a readable matrix.

    Raises:
        TypeError: It is not a tensor.
        ValueError: It is not a matrix, or has no bytes.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is of type {type(value).__name__}; pass a tensor")
    if value.is_nested or value.layout is not torch.strided or value.is_meta:
        kind = "a nested tensor" if value.is_nested else "on the meta device" if value.is_meta else str(value.layout)
        raise ValueError(f"{name} is {kind}; pass a dense matrix that has bytes")
    if value.ndim != 2:
        raise ValueError(f"{name} has shape {list(value.shape)}; pass a matrix")
