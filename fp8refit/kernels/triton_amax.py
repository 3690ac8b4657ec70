"""Maxima on a GPU: one launch walks the tiles of up to three tensors, and every program raises one place.

The bits of |x| are compared as integers. For non-negative floats the order is the same, with NaN above Inf, and an atomic
maximum of integers keeps NaN, unlike one of floats.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8refit.live.slots import SOURCE_DTYPES

_TENSORS_A_LAUNCH = 3
_TILE_N = 32
_TILE_C = 256
_NUM_WARPS = 4


def raise_maxima_triton(bits: Tensor, first_place: int, tensors: Sequence[Tensor | None]) -> None:
    """Raise the maxima from `first_place` on to those of `tensors`, in few launches."""
    for start in range(0, len(tensors), _TENSORS_A_LAUNCH):
        _launch(bits, first_place + start, tensors[start : start + _TENSORS_A_LAUNCH])


def _launch(bits: Tensor, first_place: int, tensors: Sequence[Tensor | None]) -> None:
    matrices = [_as_matrix(tensor) if tensor is not None and tensor.numel() else None for tensor in tensors]
    present = [matrix for matrix in matrices if matrix is not None]
    if not present:
        return
    absent = (present[0][0], 0, 0, 0)  # no rows: no program reads it
    arguments = [argument for matrix in matrices for argument in (absent if matrix is None else matrix)]
    arguments += absent * (_TENSORS_A_LAUNCH - len(matrices))
    num_tiles = sum(-(-rows // _TILE_N) * -(-cols // _TILE_C) for _, rows, cols, _ in present)
    # Triton launches on the current device.
    with torch.cuda.device(bits.device if bits.is_cuda else -1):
        _raise_maxima[num_tiles,](bits, first_place, *arguments, TILE_N=_TILE_N, TILE_C=_TILE_C, num_warps=_NUM_WARPS)


def _as_matrix(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    """Rows, columns and row stride of `tensor` as a matrix with dense rows, or of a copy if its rows are not dense.

    No view is made: that would take the host as long as the rest of a launch.
    """
    assert tensor.dtype in SOURCE_DTYPES, f"{tensor.dtype=}"
    cols = 1
    for size, step in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if size != 1 and step != cols:
            return _as_matrix(tensor.contiguous())
        cols *= size
    return tensor, tensor.shape[0], cols, tensor.stride(0)


@triton.jit
def _largest_bits(x):
    """float32 bits of the largest |x|. 16-bit values are compared in 16 bits, which takes half the registers."""
    if x.dtype.primitive_bitwidth == 16:
        largest = tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int16)
        return largest.to(x.dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _tile_bits(source, num_rows, num_cols, source_row, tile, TILE_N: tl.constexpr, TILE_C: tl.constexpr):
    """`_largest_bits` of one tile of one matrix."""
    tiles_per_row = tl.cdiv(num_cols, TILE_C)
    n = tl.arange(0, TILE_N)
    c = tile % tiles_per_row * TILE_C + tl.arange(0, TILE_C)
    first_n = tile // tiles_per_row * TILE_N
    mask = (first_n + n < num_rows)[:, None] & (c < num_cols)[None, :]
    source += first_n.to(tl.int64) * source_row
    return _largest_bits(tl.load(source + n[:, None] * source_row + c[None, :], mask=mask, other=0.0))


# Strides, columns and addresses stay specialized: Triton then knows which rows start on multiples of 16 bytes.
@triton.jit(do_not_specialize=["first_place", "rows_0", "rows_1", "rows_2"])
def _raise_maxima(
    bits, first_place,
    source_0, rows_0, cols_0, row_0,
    source_1, rows_1, cols_1, row_1,
    source_2, rows_2, cols_2, row_2,
    TILE_N: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """One program reads one tile. The tiles of a matrix are numbered after those of the matrix before it."""
    tile = tl.program_id(0)
    end_0 = tl.cdiv(rows_0, TILE_N) * tl.cdiv(cols_0, TILE_C)
    end_1 = end_0 + tl.cdiv(rows_1, TILE_N) * tl.cdiv(cols_1, TILE_C)
    if tile < end_0:
        largest = _tile_bits(source_0, rows_0, cols_0, row_0, tile, TILE_N, TILE_C)
        place = first_place
    elif tile < end_1:
        largest = _tile_bits(source_1, rows_1, cols_1, row_1, tile - end_0, TILE_N, TILE_C)
        place = first_place + 1
    else:
        largest = _tile_bits(source_2, rows_2, cols_2, row_2, tile - end_1, TILE_N, TILE_C)
        place = first_place + 2
    tl.atomic_max(bits + place, largest, sem="relaxed")
