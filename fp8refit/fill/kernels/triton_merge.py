"""Merged weights on a GPU, one or many in a launch, in which every tile of a weight is read once and written once.

`torch.addmm` copies the weight first and adds to the copy: twice the memory traffic.
"""

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8refit.fill.kernels.merge import Product

_TILE_N = 128
_TILE_K = 128
_LEAST_RANK, _MOST_RANK_BYTES = 16, 128
"""Of one step along the rank: what a product of tiles takes at least, and at most without spilling registers."""
_NUM_WARPS = 8
_ALIGNED = 16
"""Bytes of an address, and elements of a row, for the widest loads and stores."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_MOST_PRODUCTS = 1 << 15
"""In one launch; a grid has at most 65535 programs in its second dimension."""


def add_product_triton(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """See `fp8refit.fill.kernels.merge.add_product`. All are of one dtype."""
    rows, cols, rank = *weight.shape, up.shape[1]
    num_tiles = -(-rows // _TILE_N) * -(-cols // _TILE_K)
    if not num_tiles:
        return out
    step = _step(rank, weight.dtype)
    # Triton launches on the current device.
    with torch.cuda.device(weight.device if weight.is_cuda else -1):
        _add_product[num_tiles,](
            out, weight, up, down, scale, rows, cols, rank,
            out.stride(0), *weight.stride(), *up.stride(), *down.stride(),
            TILE_N=_TILE_N, TILE_K=_TILE_K, STEP=step, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def add_products_triton(products: Sequence[Product]) -> list[Product]:
    """Add all products that are laid out as usual, in one launch per device, combination of dtypes, and rank. Returns the
    others.
    """
    shared: dict[tuple[torch.device, torch.dtype, torch.dtype, int, bool], list[Product]] = {}
    others: list[Product] = []
    for each in products:
        if _is_usual(each):
            rank = each.up.shape[1]
            is_rank_aligned = not (rank | each.up.stride(0) | each.up.data_ptr()) % _ALIGNED
            step = _step(rank, each.weight.dtype)
            key = each.weight.device, each.weight.dtype, each.up.dtype, step, is_rank_aligned
            shared.setdefault(key, []).append(each)
        else:
            others.append(each)
    for (device, dtype, low_dtype, step, is_rank_aligned), members in shared.items():
        for first in range(0, len(members), _MOST_PRODUCTS):
            part = members[first : first + _MOST_PRODUCTS]
            table = torch.tensor([_row(each) for each in part], dtype=torch.int64).to(device, non_blocking=True)
            most_tiles = max(
                -(-rows // _TILE_N) * -(-cols // _TILE_K) for rows, cols in (each.weight.shape for each in part)
            )
            with torch.cuda.device(device if device.type == "cuda" else -1):
                _add_products[most_tiles, len(part)](
                    table, DTYPE=_DTYPES[dtype], LOW_DTYPE=_DTYPES[low_dtype], IS_RANK_ALIGNED=is_rank_aligned,
                    NUM_FIELDS=table.shape[1], TILE_N=_TILE_N, TILE_K=_TILE_K, STEP=step, num_warps=_NUM_WARPS, num_stages=1,
                )  # fmt: skip
    return others


def _step(rank: int, dtype: torch.dtype) -> int:
    return int(min(max(triton.next_power_of_2(rank), _LEAST_RANK), _MOST_RANK_BYTES // dtype.itemsize))


def _is_usual(product: Product) -> bool:
    """Whether everything has dense rows, and what is large is aligned."""
    weight, up, down, out = product.weight, product.up, product.down, product.out
    large = weight, down, out
    return (
        weight.numel() > 0
        and weight.dtype in _DTYPES
        and up.dtype in _DTYPES
        and down.dtype is up.dtype
        and weight.device == up.device == down.device
        and weight.shape[1] % _ALIGNED == 0
        and up.stride(1) == 1
        and all(each.stride(1) == 1 and not (each.stride(0) | each.data_ptr()) % _ALIGNED for each in large)
    )


def _row(product: Product) -> list[int]:
    """What `_add_products` reads of a product."""
    weight, up, down, out = product.weight, product.up, product.down, product.out
    addresses = [each.data_ptr() for each in (out, weight, up, down)]
    strides = [each.stride(0) for each in (out, weight, up, down)]
    (scale,) = struct.unpack("i", struct.pack("f", product.scale))
    return [*addresses, *strides, *weight.shape, up.shape[1], scale]


@triton.jit
def _add_products(
    table, DTYPE: tl.constexpr, LOW_DTYPE: tl.constexpr, IS_RANK_ALIGNED: tl.constexpr, NUM_FIELDS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`_add_product` for row `program_id(1)` of the table; programs beyond its last tile do nothing."""
    row = table + tl.program_id(1).to(tl.int64) * NUM_FIELDS
    num_rows = tl.load(row + 8)
    num_cols = tl.multiple_of(tl.load(row + 9), 16)
    tiles_per_row = tl.cdiv(num_cols, TILE_K)
    if tl.program_id(0) < tl.cdiv(num_rows, TILE_N) * tiles_per_row:
        out = tl.multiple_of(tl.load(row + 0).to(tl.pointer_type(DTYPE)), 16)
        weight = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(DTYPE)), 16)
        up = tl.load(row + 2).to(tl.pointer_type(LOW_DTYPE))
        down = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(LOW_DTYPE)), 16)
        out_row = tl.multiple_of(tl.load(row + 4), 16)
        weight_row = tl.multiple_of(tl.load(row + 5), 16)
        up_row = tl.load(row + 6)
        down_row = tl.multiple_of(tl.load(row + 7), 16)
        rank = tl.load(row + 10).to(tl.int32)
        scale = tl.load(row + 11).to(tl.int32).to(tl.float32, bitcast=True)
        if IS_RANK_ALIGNED:
            up, up_row, rank = tl.multiple_of(up, 16), tl.multiple_of(up_row, 16), tl.multiple_of(rank, 16)
        n = tl.program_id(0) // tiles_per_row * TILE_N + tl.arange(0, TILE_N)
        k = tl.program_id(0) % tiles_per_row * TILE_K + tl.arange(0, TILE_K)
        r = tl.arange(0, STEP)
        is_row, is_col = n < num_rows, k < num_cols
        total = tl.zeros((TILE_N, TILE_K), dtype=tl.float32)
        for first in range(0, rank, STEP):
            is_rank = first + r < rank
            a = tl.load(
                up + n[:, None] * up_row + (first + r)[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0
            )
            b = tl.load(
                down + (first + r)[:, None] * down_row + k[None, :],
                mask=is_rank[:, None] & is_col[None, :],
                other=0.0,
            )
            total = tl.dot(a.to(DTYPE), b.to(DTYPE), acc=total, input_precision="ieee")
        mask = is_row[:, None] & is_col[None, :]
        held = tl.load(weight + n[:, None] * weight_row + k[None, :], mask=mask, other=0.0)
        merged = held.to(tl.float32) + scale * total
        tl.store(out + n[:, None] * out_row + k[None, :], merged.to(DTYPE), mask=mask)


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
