"""The product of two low-rank matrices in a tile, as all kernels compute it: the order of its sums decides the last bit."""

from typing import Any

import torch
import triton
import triton.language as tl

from fp8refit.kernels.products import NUM_PRODUCT_FIELDS, ProductKind

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_NUM_FIELDS = tl.constexpr(NUM_PRODUCT_FIELDS)


def constants_of(product: ProductKind | None) -> dict[str, Any]:
    """Return the constants of kernels that add products of a kind. For kernels that add none, `STEP` is 0."""
    if product is None:
        return {"LOW_DTYPE": None, "STEP": 0, "IS_ONE_STEP": True, "IS_RANK_ALIGNED": False}
    return {
        "LOW_DTYPE": TRITON_DTYPES[product.low_dtype],
        "STEP": product.step,
        "IS_ONE_STEP": product.is_one_step,
        "IS_RANK_ALIGNED": product.is_rank_aligned,
    }


@triton.jit
def product_of_block(
    products, number, n, k, is_row, is_col, DTYPE: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    LOW_DTYPE: tl.constexpr, STEP: tl.constexpr, IS_ONE_STEP: tl.constexpr, IS_RANK_ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of the product in a row of the table, and its factor."""
    row = products + number * _NUM_FIELDS
    up = tl.load(row + 0).to(tl.pointer_type(LOW_DTYPE))
    down = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(LOW_DTYPE)), 16)
    up_row = tl.load(row + 2)
    down_row = tl.multiple_of(tl.load(row + 3), 16)
    rank = tl.load(row + 4).to(tl.int32)
    factor = tl.load(row + 5).to(tl.int32).to(tl.float32, bitcast=True)
    if IS_RANK_ALIGNED:
        up, up_row, rank = tl.multiple_of(up, 16), tl.multiple_of(up_row, 16), tl.multiple_of(rank, 16)
    total = product_of_tile(
        up, down, n, k, up_row, down_row, is_row, is_col, rank, DTYPE, TILE_N, TILE_K, STEP, IS_ONE_STEP
    )
    return total, factor


@triton.jit
def product_of_tile(
    up, down, n, k, up_row, down_row, is_row, is_col, rank, DTYPE: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, STEP: tl.constexpr, IS_ONE_STEP: tl.constexpr,
):  # fmt: skip
    """The rows `n` of `up` times the columns `k` of `down`, summed in float32."""
    r = tl.arange(0, STEP)
    total = tl.zeros((TILE_N, TILE_K), dtype=tl.float32)
    if IS_ONE_STEP:
        total = _add_step(total, up, down, n, k, r, up_row, down_row, is_row, is_col, rank, DTYPE)
    else:
        for first in range(0, rank, STEP):
            total = _add_step(total, up, down, n, k, first + r, up_row, down_row, is_row, is_col, rank, DTYPE)
    return total


@triton.jit
def _add_step(total, up, down, n, k, r, up_row, down_row, is_row, is_col, rank, DTYPE: tl.constexpr):
    """Add the product of the columns `r` of `up` and the rows `r` of `down`."""
    is_rank = r < rank
    a = tl.load(up + n[:, None] * up_row + r[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
    b = tl.load(down + r[:, None] * down_row + k[None, :], mask=is_rank[:, None] & is_col[None, :], other=0.0)
    return dot_of(a, b, total, DTYPE)


@triton.jit
def dot_of(a, b, total, DTYPE: tl.constexpr):
    """Add `a @ b`, of one dtype. For weights of fewer bits, fp32 is taken as the sum of two TF32: 21 bits, on tensor cores."""
    IS_EXACT: tl.constexpr = a.dtype != tl.float32 or a.dtype == DTYPE
    return tl.dot(a, b, acc=total, input_precision="ieee" if IS_EXACT else "tf32x3")
