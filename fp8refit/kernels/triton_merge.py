"""Merges weights on a GPU, one or many per launch. Every tile of a weight is read once and written once.

`torch.addmm` copies the weight first and adds to the copy: twice the memory traffic.
"""

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8refit.kernels.merge import Product
from fp8refit.kernels.products import ALIGNED, ProductKind, kind_of, step_of
from fp8refit.kernels.triton_launch import Launch, on_device
from fp8refit.kernels.triton_products import TRITON_DTYPES, constants_of, dot_of, product_of_tile

_TILE_N = 128
_TILE_K = 128
_ONE_STEP_TILE = 64, 256
"""The tile for ranks that take one step: without a loop along the rank, wide tiles are a seventh faster."""
_NUM_WARPS = 8
_MOST_PRODUCTS = 1 << 15
"""The most products of one launch. A grid has at most 65535 programs in its second dimension."""
_MOST_KEPT_BYTES = 64 << 10
"""The largest table that is kept for the next refit."""
_ROW = struct.Struct("=11qf4x")
"""What `_add_products` reads of a product: addresses and strides of `out`, `weight`, `up` and `down`; shape and rank; scale."""
_Kind: TypeAlias = tuple[torch.device, torch.dtype, ProductKind]
"""What the products of one launch have in common: the device and the dtype of their weights, and their kind."""


def add_product_triton(weight: Tensor, up: Tensor, down: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """Compute `weight + scale * up @ down` into `out`, in one launch. `up` and `down` are of one dtype."""
    rows, cols, rank = *weight.shape, up.shape[1]
    num_tiles = -(-rows // _TILE_N) * -(-cols // _TILE_K)
    if not num_tiles:
        return out
    # Triton launches on the current device.
    with torch.cuda.device(weight.device if weight.is_cuda else -1):
        _add_product[num_tiles,](
            out, weight, up, down, scale, rows, cols, rank,
            out.stride(0), *weight.stride(), *up.stride(), *down.stride(),
            TILE_N=_TILE_N, TILE_K=_TILE_K, STEP=step_of(rank, up.dtype), num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def add_products_triton(products: Sequence[Product]) -> list[Product]:
    """Add all products that are laid out as usual, in one launch per device, combination of dtypes, and rank. Returns the
    others.
    """
    shared: dict[_Kind, list[tuple[bytes, int]]] = {}
    others: list[Product] = []
    for each in products:
        described = _describe(each)
        if described is None:
            others.append(each)
        else:
            kind, row, num_tiles = described
            shared.setdefault(kind, []).append((row, num_tiles))
    for kind, members in shared.items():
        device = kind[0]
        with on_device(device):
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            for first in range(0, len(members), _MOST_PRODUCTS):
                part = members[first : first + _MOST_PRODUCTS]
                rows = b"".join([row for row, _ in part])
                upload = _upload if len(rows) <= _MOST_KEPT_BYTES else _upload.__wrapped__
                table = upload(rows, device, stream)
                _launch_of(kind).launch((max([tiles for _, tiles in part]), len(part), 1), table)
    return others


@lru_cache(maxsize=512)
def _upload(rows: bytes, device: torch.device, stream: int) -> Tensor:
    """Upload a table, for one stream only. Cached, as a policy that is not moved has the same table in every refit."""
    return torch.frombuffer(bytearray(rows), dtype=torch.int64).to(device, non_blocking=True)


@cache
def _launch_of(kind: "_Kind") -> Launch:
    """Return the launch of a kind. Each device has its own, because a compiled kernel is loaded on one device."""
    _, dtype, product = kind
    tile_n, tile_k = _tile(product.is_one_step)
    constants = constants_of(product) | {
        "DTYPE": TRITON_DTYPES[dtype],
        "NUM_FIELDS": _ROW.size // 8,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
    }
    return Launch(_add_products, constants, num_warps=_NUM_WARPS, num_stages=1)


def _tile(is_one_step: bool) -> tuple[int, int]:
    return _ONE_STEP_TILE if is_one_step else (_TILE_N, _TILE_K)


def _describe(product: Product) -> tuple["_Kind", bytes, int] | None:
    """Return a product's kind, its row of the table, and its number of tiles; None if its layout is not the usual one."""
    weight, up, down, out = product.weight, product.up, product.down, product.out
    kind = kind_of(weight, up, down)
    (rows, cols), (out_row, out_col), out_at = weight.shape, out.stride(), out.data_ptr()
    if kind is None or not rows * cols or out_col != 1 or (out_row | out_at) % ALIGNED:
        return None
    row = _ROW.pack(
        out_at, weight.data_ptr(), up.data_ptr(), down.data_ptr(), out_row, weight.stride(0), up.stride(0), down.stride(0),
        rows, cols, up.shape[1], product.scale,
    )  # fmt: skip
    tile_n, tile_k = _tile(kind.is_one_step)
    return (weight.device, weight.dtype, kind), row, -(-rows // tile_n) * -(-cols // tile_k)


@triton.jit
def _add_products(
    table, DTYPE: tl.constexpr, LOW_DTYPE: tl.constexpr, IS_RANK_ALIGNED: tl.constexpr, NUM_FIELDS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, STEP: tl.constexpr, IS_ONE_STEP: tl.constexpr,
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
        is_row, is_col = n < num_rows, k < num_cols
        total = product_of_tile(
            up, down, n, k, up_row, down_row, is_row, is_col, rank, DTYPE, TILE_N, TILE_K, STEP, IS_ONE_STEP
        )
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
    # Index times stride overflows int32 in large tensors.
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
        total = dot_of(a, b, total, out.dtype.element_ty)
    mask = is_row[:, None] & is_col[None, :]
    held = tl.load(weight + n[:, None] * weight_row + k[None, :] * weight_col, mask=mask, other=0.0)
    merged = held.to(tl.float32) + scale * total
    tl.store(out + n[:, None] * out_row + k[None, :], merged.to(held.dtype), mask=mask)
