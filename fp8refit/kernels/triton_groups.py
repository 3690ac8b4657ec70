"""A matrix quantized on a GPU in groups of 128 values, along its rows or along its columns, in one launch.

The bits are those of `quantize_activations`. Nothing is tuned automatically: a search would compile dozens of variants for
every width, in every process, before the first step of a training run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8refit.kernels.activations import AMAX_FLOOR
from fp8refit.live.formats import ScaleFormat
from fp8refit.live.slots import FP8_DTYPE

GROUP = 128
_TILE_ROWS = 64
_NUM_WARPS = 8


def quantize_groups(x: Tensor, scale_format: ScaleFormat, *, is_transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize `x` (M, K), or its transpose, in groups of 128 along each row of the result.

    Args:
        x: (M, K), any floating dtype.
        scale_format: Of the scales.
        is_transposed: Quantize the transpose (K, M) instead. No copy of it is made.

    Returns:
        Codes (R, C) float8_e4m3fn, row-major, and scales (R, C / 128) float32, column-major: what block-scaled products take.
        R and C are M and K, or K and M, rounded up to whole groups. What lies beyond `x` counts as zeros.
    """
    is_ue8m0 = scale_format.has_powers_of_two
    if _IS_INTERPRETED:
        codes, scale = _launch(_quantize_tile, x, is_ue8m0, is_transposed)
    else:
        codes, scale = _quantize(x, is_ue8m0, is_transposed)
    return codes, scale.t()


@torch.library.triton_op("fp8refit::quantize_groups", mutates_args=())
def _quantize(x: Tensor, is_ue8m0: bool, is_transposed: bool) -> tuple[Tensor, Tensor]:
    return _launch(torch.library.wrap_triton(_quantize_tile), x, is_ue8m0, is_transposed)


def _launch(kernel: Any, x: Tensor, is_ue8m0: bool, is_transposed: bool) -> tuple[Tensor, Tensor]:
    seen = x.t() if is_transposed else x
    rows, cols = seen.shape
    padded_rows, padded_cols = (-(-size // GROUP) * GROUP for size in (rows, cols))
    codes = torch.empty((padded_rows, padded_cols), dtype=FP8_DTYPE, device=x.device)
    scale = torch.empty((padded_cols // GROUP, padded_rows), dtype=torch.float32, device=x.device)
    # Triton launches on the current device.
    with torch.cuda.device(x.device if x.is_cuda else -1):
        kernel[padded_rows // _TILE_ROWS, padded_cols // GROUP](
            x,
            codes,
            scale,
            rows,
            cols,
            *seen.stride(),
            padded_rows,
            padded_cols,
            IS_UE8M0=is_ue8m0,
            FLOOR=AMAX_FLOOR,
            TILE_ROWS=_TILE_ROWS,
            GROUP=GROUP,
            num_warps=_NUM_WARPS,
        )
    return codes, scale


@triton.jit
def _quantize_tile(
    x_ptr, codes_ptr, scale_ptr, rows, cols, stride_row, stride_col, padded_rows, padded_cols,
    IS_UE8M0: tl.constexpr, FLOOR: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program quantizes one group of each of `TILE_ROWS` rows."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    group = tl.program_id(1).to(tl.int64)
    col = group * GROUP + tl.arange(0, GROUP)
    is_inside = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_row + col[None, :] * stride_col, mask=is_inside, other=0.0).to(tl.float32)
    # Bits of magnitudes are ordered as the magnitudes are, and those of a NaN come last, which `tl.max` of floats would drop.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    least = tl.full((TILE_ROWS,), FLOOR, tl.float32).to(tl.int32, bitcast=True)
    amax = tl.maximum(tl.max(magnitude, axis=1), least).to(tl.float32, bitcast=True)
    s = tl.div_rn(amax, tl.full((TILE_ROWS,), 448.0, tl.float32))
    if IS_UE8M0:
        bits = s.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).to(tl.int32)
        s = (exponent << 23).to(tl.float32, bitcast=True)
    code = tl.div_rn(x, tl.broadcast_to(s[:, None], (TILE_ROWS, GROUP)))
    code = tl.where(code == code, tl.minimum(tl.maximum(code, -448.0), 448.0), code)
    tl.store(codes_ptr + row[:, None] * padded_cols + col[None, :], code.to(tl.float8e4nv))
    tl.store(scale_ptr + group * padded_rows + row, s)


_IS_INTERPRETED = not isinstance(_quantize_tile, triton.JITFunction)
"""Whether Triton's interpreter runs the kernel. `torch.library` does not accept an interpreted kernel."""
