"""A merged weight on a GPU: one launch, in which every tile of the weight is read once and written once.

`torch.addmm` copies the weight first and adds to the copy: twice the memory traffic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_N = 128
_TILE_K = 128
_LEAST_RANK, _MOST_RANK_BYTES = 16, 128
"""Of one step along the rank: what a product of tiles takes at least, and at most without spilling registers."""
_NUM_WARPS = 8


def add_product_triton(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """See `fp8refit.fill.kernels.merge.add_product`. All are of one dtype."""
    rows, cols, rank = *weight.shape, up.shape[1]
    num_tiles = -(-rows // _TILE_N) * -(-cols // _TILE_K)
    if not num_tiles:
        return out
    step = min(max(triton.next_power_of_2(rank), _LEAST_RANK), _MOST_RANK_BYTES // weight.itemsize)
    # Triton launches on the current device.
    with torch.cuda.device(weight.device if weight.is_cuda else -1):
        _add_product[num_tiles,](
            out, weight, up, down, scale, rows, cols, rank,
            out.stride(0), *weight.stride(), *up.stride(), *down.stride(),
            TILE_N=_TILE_N, TILE_K=_TILE_K, STEP=step, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rank"])
def _add_product(
    out, weight, up, down, scale, num_rows, num_cols, rank,
    out_row, weight_row, weight_col, up_row, up_col, down_row, down_col,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program makes one tile; those of a row of tiles follow each other."""
    tiles_per_row = tl.cdiv(num_cols, TILE_K)
    # Places times strides are wider than int32 in large tensors.
    n = (tl.program_id(0) // tiles_per_row * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    k = (tl.program_id(0) % tiles_per_row * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    r = tl.arange(0, STEP).to(tl.int64)
    is_row, is_col = n < num_rows, k < num_cols
    total = tl.zeros((TILE_N, TILE_K), dtype=tl.float32)
    for first in range(0, rank, STEP):
        is_rank = first + r < rank
        a = tl.load(
            up + n[:, None] * up_row + (first + r)[None, :] * up_col, mask=is_row[:, None] & is_rank[None, :], other=0.0
        )
        b = tl.load(
            down + (first + r)[:, None] * down_row + k[None, :] * down_col,
            mask=is_rank[:, None] & is_col[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, acc=total, input_precision="ieee")
    mask = is_row[:, None] & is_col[None, :]
    held = tl.load(weight + n[:, None] * weight_row + k[None, :] * weight_col, mask=mask, other=0.0)
    merged = held.to(tl.float32) + scale * total
    tl.store(out + n[:, None] * out_row + k[None, :], merged.to(held.dtype), mask=mask)
