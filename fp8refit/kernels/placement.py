"""Where Marlin's kernels look for codes and scales, as views of their memory in the order of rows and columns.

A tile of Marlin holds 64 rows and 16 columns. The place of a code in it has ten bits, which are those of row and column in
another order: `r2 r1 r0 c2 c1 r5 r4 r3 c0 c3`, the highest first; of a code of half a byte `r2 r1 r0 c2 c1 r5 r4 c0 r3 c3`. The
place of a scale among those of 64 rows has six: `r2 r1 r0 r5 r3 r4`. So each is a view with a dimension per run of bits.
(`gptq_marlin_repack`, `marlin_permute_scales`, `mxfp8_marlin_process_scales` and `nvfp4_marlin_process_scales` of vLLM.)
"""

from math import prod

import torch
from torch import Tensor

CODE_BITS = (8, 4, 4, 2, 2, 2)
"""Sizes of the runs of bits of a code's place: `r2..r0`, `c2 c1`, `r5 r4`, then `r3`, `c0`, `c3`, or `c0`, `r3`, `c3`."""
SCALE_BITS = (8, 2, 2, 2)
"""Those of a scale's place: `r2..r0`, `r5`, `r3`, `r4`."""
BIAS_BITS = (4, 4, 2)
"""Those of a bias's place among 32: `r2 r1`, `r4 r3`, `r0`."""


def codes_in_order(tiles: Tensor) -> Tensor:
    """A view of codes in tiles (..., K / 16, N / 64, 1024) by the bits of rows, then of columns:
    (..., N / 64, 4, 2, 8, K / 16, 2, 4, 2).
    """
    return _ordered(_split(tiles, CODE_BITS), (1, 4, 5, 2, 0, 7, 3, 6))


def half_codes_in_order(halves: Tensor) -> Tensor:
    """The same of codes of half a byte, each in a byte."""
    return _ordered(_split(halves, CODE_BITS), (1, 4, 6, 2, 0, 7, 3, 5))


def packed(halves: Tensor) -> Tensor:
    """Codes of half a byte, two in each byte of the result, the first in its low half."""
    return halves[..., ::2] | halves[..., 1::2] << 4


def unpacked(codes: Tensor) -> Tensor:
    """Undo `packed`."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def put_half_codes(tiles: Tensor, halves: Tensor) -> None:
    """Write codes of half a byte (N, K), each in a byte, to their places (K / 16, N / 64, 512)."""
    placed = halves.new_empty(*tiles.shape[:-1], 2 * tiles.shape[-1])
    into = half_codes_in_order(placed)
    into.copy_(halves.reshape(into.shape))
    tiles.copy_(packed(placed))


def scales_in_order(tiles: Tensor) -> Tensor:
    """A view of scales (..., blocks, N / 64, 64) by the bits of rows, then by block: (..., N / 64, 2, 2, 2, 8, blocks)."""
    return _ordered(_split(tiles, SCALE_BITS), (1, 3, 5, 4, 2, 0))


def _ordered(split: Tensor, order: tuple[int, ...]) -> Tensor:
    num_stacked = split.ndim - len(order)
    return split.permute(*range(num_stacked), *(num_stacked + place for place in order))


def _split(tiles: Tensor, bits: tuple[int, ...]) -> Tensor:
    return tiles.view(*tiles.shape[:-1], *bits)


def put_codes(tiles: Tensor, codes: Tensor) -> None:
    """Write codes (N, K) to their places."""
    into = codes_in_order(tiles)
    into.copy_(codes.reshape(into.shape))


def put_scales(tiles: Tensor, scales: Tensor) -> None:
    """Write scales (N, blocks) to their places."""
    into = scales_in_order(tiles)
    into.copy_(scales.reshape(into.shape))


def bias_in_order(placed: Tensor) -> Tensor:
    """A view of a bias (N,) in the order of rows (`marlin_permute_bias` of vLLM): (N / 32, 4, 4, 2)."""
    return placed.view(-1, *BIAS_BITS).transpose(1, 2)


def codes_in_rows(tiles: Tensor) -> Tensor:
    """A copy of codes in tiles as a matrix (N, K), or as a stack of them."""
    in_order = codes_in_order(tiles.view(torch.uint8))
    return in_order.reshape(*in_order.shape[:-8], prod(in_order.shape[-8:-4]), -1).view(tiles.dtype)


def scales_in_rows(tiles: Tensor) -> Tensor:
    """A copy of scales in tiles as a matrix (N, blocks), or as a stack of them."""
    in_order = scales_in_order(tiles)
    return in_order.reshape(*in_order.shape[:-6], prod(in_order.shape[-6:-1]), -1)
