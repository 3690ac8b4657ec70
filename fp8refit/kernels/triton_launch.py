"""The kernels that walk a table, and how they are launched."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import cache
from typing import Any, assert_never

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8refit.kernels.rows import COPY_TILE, NUM_FIELDS, Kind
from fp8refit.kernels.triton_levels import quantize_levels
from fp8refit.kernels.triton_parts import (
    add_count,
    bits_of,
    bits_to_compare,
    magnitude_bits,
    put_codes,
    put_groups,
    row_of,
    tile_of_groups,
)
from fp8refit.kernels.triton_products import TRITON_DTYPES, constants_of, product_of_block
from fp8refit.kernels.work import Action
from fp8refit.live.formats import AmaxOver, BlockFormat, Codes, ScaleFormat
from fp8refit.live.slots import Op

_QUANTIZE_WARPS = 4
_BLOCKS_PER_PROGRAM = {2: 2}
"""Blocks per program, by bytes of a source element; 1 if it is wider. The second is loaded while the first is computed."""
_MERGE_WARPS = 8
_BLOCKS_PER_MERGE = 2
"""Blocks per program if it adds a product first."""
_ELEMENTS_PER_ROW_WARP = 1 << 10
_COPY_WARPS = 4
_NO_POWER = -1
"""In place of `ScaleFormat.power`, if scales are no powers of two."""
_TRITON_DTYPES = TRITON_DTYPES | {
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.uint8,
    torch.float8_e8m0fnu: tl.uint8,
    torch.uint8: tl.uint8,
}


class Check(IntEnum):
    """What a copy flags."""

    FINITE = 0
    CODES = 1
    SCALES = 2
    POWERS_OF_TWO = 3


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which Triton launches."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


class Launch:
    """A kernel with its constants.

    After the first launch, the compiled kernel is launched directly, in a tenth of the host time of Triton's dispatch. So
    all launches use what was compiled for the first arguments: no number may be specialized, and all pointers need the same
    alignment.

    Args:
        kernel: The kernel, whose last parameters are constants.
        constants: Their values.
        tiles_per_program: How many tiles of a table one program takes.
        options: Options for Triton's compiler.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], tiles_per_program: int = 1, **options: int) -> None:
        self._kernel, self._options, self._tiles_per_program = kernel, options, tiles_per_program
        self._compiled: Any = None
        self._constants = tuple(constants[name] for name in kernel.arg_names[-len(constants) :])

    def launch(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on the current stream of the current device, which must hold the arguments."""
        if self._compiled is not None:
            self._compiled[grid](*arguments, *self._constants)
        else:
            self._compiled = self._kernel[grid](*arguments, *self._constants, **self._options)

    def compile_for_tiles(self, arrays: tuple[Tensor, ...]) -> None:
        """Compile the kernel for the arrays that `launch_tiles` gets, and load it, if that was not done yet."""
        if self._compiled is None and isinstance(self._kernel, triton.JITFunction):
            compiled = self._kernel.warmup(*arrays, 0, 0, 1, *self._constants, grid=(1, 1, 1), **self._options)
            if compiled is not None:
                compiled[1, 1, 1]  # loads it: launches nothing, but may find no room
                self._compiled = compiled

    def launch_tiles(self, arrays: tuple[Tensor, ...], shift: int, first_tile: int, num_tiles: int) -> None:
        """Launch some tiles of a table, as `launch` does.

        The arrays are the matrix, the row of each tile, both flags, and the products.
        """
        self.launch((-(-num_tiles // self._tiles_per_program), 1, 1), *arrays, shift, first_tile, num_tiles)


@cache
def launch_of(kind: Kind, device: torch.device, *, check: bool, action: Action) -> Launch:
    """Return the launch of a kind. Each device has its own, because a compiled kernel is loaded on one device."""
    common = {
        "SOURCE": _TRITON_DTYPES[kind.source_dtype],
        "TARGET": _TRITON_DTYPES[kind.target_dtype],
        "NUM_FIELDS": NUM_FIELDS,
        "IS_ALIGNED": kind.is_aligned,
        "CHECK": check,
        "WRITE": action.writes,
        "COMPARE": action.compares,
    }
    saturates = isinstance(_quantize_tiles, triton.JITFunction)
    if kind.row_tile is not None:
        assert kind.format is not None, f"{kind=}"
        tile = kind.row_tile
        others = {
            "TILE_N": tile.rows,
            "TILE_K": tile.cols,
            "ROUND_TO_BF16": kind.round_to_bf16,
            "SATURATES": saturates,
            "NUM_PARTS": tile.parts,
        }
        num_warps = max(tile.rows * tile.cols // _ELEMENTS_PER_ROW_WARP, _QUANTIZE_WARPS)
        return Launch(_quantize_rows, common | others | _arithmetic(kind.format), num_warps=num_warps)
    if kind.has_groups and kind.format is not None and kind.format.scale_format.has_two_levels:
        tile_n, tile_k = kind.tile
        levels: dict[str, Any] = {
            "TILE_N": tile_n,
            "TILE_K": tile_k,
            "GROUP": kind.format.block_size[1],
            "IS_MARLIN": kind.format.is_tiled,
            "AMAX_FLOOR": kind.format.scale_format.amax_floor,
            "ROUND_TO_BF16": kind.round_to_bf16,
        }
        return Launch(quantize_levels, common | levels, num_warps=_QUANTIZE_WARPS)
    if kind.has_groups:
        assert kind.format is not None, f"{kind=}"
        tile_n, tile_k = kind.tile
        others = {
            "TILE_N": tile_n,
            "TILE_K": tile_k,
            "GROUP": kind.format.block_size[1],
            "HAS_EXPONENTS": kind.format.scale_format.has_exponents,
            "IS_MARLIN": kind.format.is_tiled,
            "ROUND_TO_BF16": kind.round_to_bf16,
            "SATURATES": saturates,
        }
        return Launch(_quantize_groups, common | others | _arithmetic(kind.format), num_warps=_QUANTIZE_WARPS)
    if kind.op in (Op.QUANTIZE, Op.MAXIMUM):
        assert kind.format is not None, f"{kind=}"
        block_n, block_k = kind.tile
        merges = kind.product is not None
        num_blocks = _BLOCKS_PER_MERGE if merges else _BLOCKS_PER_PROGRAM.get(kind.source_dtype.itemsize, 1)
        constants = (
            common
            | constants_of(kind.product)
            | {
                "NUM_BLOCKS": num_blocks,
                "BLOCK_N": block_n,
                "BLOCK_K": block_k,
                "TILE_N": triton.next_power_of_2(block_n),
                "TILE_K": triton.next_power_of_2(block_k),
                **_arithmetic(kind.format),
                "ROUND_TO_BF16": kind.round_to_bf16,
                "SATURATES": saturates,
                "RAISES": kind.op is Op.MAXIMUM,
                "IS_SHARED": kind.has_shared_scale,
            }
        )
        if merges:
            return Launch(_quantize_tiles, constants, num_blocks, num_warps=_MERGE_WARPS, num_stages=1)
        return Launch(_quantize_tiles, constants, num_blocks, num_warps=_QUANTIZE_WARPS)
    rule = Check.CODES if kind.op is Op.COPY_CODES else Check.FINITE
    if kind.op is Op.COPY_SCALES and kind.format is not None:
        rule = Check.POWERS_OF_TWO if kind.format.scale_format.has_powers_of_two else Check.SCALES
    constants = common | {"TILE": COPY_TILE, "RULE": int(rule)}
    return Launch(_copy_tiles, constants, num_warps=_COPY_WARPS)


def _arithmetic(block_format: BlockFormat) -> dict[str, Any]:
    """The constants by which `_quantize_tiles` computes scales, each from one block of a slice, and codes."""
    match block_format.codes:
        case Codes.E4M3 | Codes.E2M1:
            pass
        case _:
            assert_never(block_format.codes)
    match block_format.amax_over:
        case AmaxOver.OWN_SLICE | AmaxOver.WHOLE_BLOCK:
            pass
        case _:
            assert_never(block_format.amax_over)
    scale_format = block_format.scale_format
    match scale_format:
        case ScaleFormat.FP32 | ScaleFormat.FP32_FLOORED | ScaleFormat.FP32_DIVIDING:
            is_reciprocal = False
        case ScaleFormat.FP32_RECIPROCAL:
            is_reciprocal = True
        case ScaleFormat.UE8M0 | ScaleFormat.MX_CEIL | ScaleFormat.MX_FLOOR | ScaleFormat.MX_UNIT | ScaleFormat.NV_E4M3:
            is_reciprocal = False
        case _:
            assert_never(scale_format)
    less, limit = scale_format.power or (_NO_POWER, 0)
    return {
        "LESS": less,
        "LIMIT": limit,
        "IS_RECIPROCAL": is_reciprocal,
        "AMAX_FLOOR": scale_format.amax_floor,
        "DIVIDES": scale_format.divides,
    }


@triton.jit
def _amax_bits(x):
    """`magnitude_bits` of a block's largest magnitude. 16-bit values are compared in 16 bits: half the registers."""
    if x.dtype.primitive_bitwidth == 16:
        largest = tl.max(tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF, axis=1), axis=0).to(tl.int16)
        return magnitude_bits(largest.to(x.dtype, bitcast=True))
    return tl.max(tl.max(magnitude_bits(x), axis=1), axis=0)


@triton.jit
def _scale_of(
    amax_bits, LESS: tl.constexpr, LIMIT: tl.constexpr, IS_RECIPROCAL: tl.constexpr, AMAX_FLOOR: tl.constexpr
):
    """The scale for a largest magnitude, or for several, as `reference.block_scales` computes it."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), AMAX_FLOOR)
    if LESS >= 0:
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - LESS + ((bits & 0x7FFFFF) > LIMIT).to(tl.int32)
        s = tl.where(exponent > 0, tl.minimum(exponent, 254) << 23, 0x400000).to(tl.float32, bitcast=True)
    elif IS_RECIPROCAL:
        s = amax * (1 / 448)
    else:
        s = tl.div_rn(amax, 448.0)
    return s


@triton.jit
def _code_of(x, s, DIVIDES: tl.constexpr, SATURATES: tl.constexpr):
    """The codes of float32 values whose scale is `s`, or whose scales have the shape of `s`."""
    inverse = tl.div_rn(1.0, s)
    code = x * inverse
    if (
        DIVIDES
    ):  # Newton's step: as `div_rn(x, s)` rounds (seen for all mantissas of `s` and quotients near a tie), but faster
        rest = tl.fma(-code, tl.broadcast_to(s, code.shape), x)
        code = tl.where(code == 0, code, tl.fma(rest, tl.broadcast_to(inverse, code.shape), code))
    if not SATURATES:  # a GPU's cast does: cvt.rn.satfinite.e4m3x2
        code = tl.minimum(tl.maximum(code, -448.0), 448.0)
    return code.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def _quantize_tiles(
    matrix, tile_rows, status, differs, products, shift: tl.int64, first_tile, num_tiles, NUM_BLOCKS: tl.constexpr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    LESS: tl.constexpr, LIMIT: tl.constexpr, IS_RECIPROCAL: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVIDES: tl.constexpr,
    ROUND_TO_BF16: tl.constexpr, RAISES: tl.constexpr, IS_SHARED: tl.constexpr,
    SATURATES: tl.constexpr, IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
    LOW_DTYPE: tl.constexpr, STEP: tl.constexpr, IS_ONE_STEP: tl.constexpr, IS_RANK_ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program quantizes `NUM_BLOCKS` blocks."""
    first = tl.program_id(0) * NUM_BLOCKS
    for index in tl.static_range(NUM_BLOCKS):
        if first + index < num_tiles:
            _quantize_tile(
                matrix, tile_rows, status, differs, products, shift, first_tile + first + index, SOURCE, TARGET, NUM_FIELDS,
                BLOCK_N, BLOCK_K, TILE_N, TILE_K, LESS, LIMIT, IS_RECIPROCAL, AMAX_FLOOR, DIVIDES, ROUND_TO_BF16, RAISES,
                IS_SHARED, SATURATES, IS_ALIGNED, CHECK, WRITE, COMPARE, LOW_DTYPE, STEP, IS_ONE_STEP, IS_RANK_ALIGNED,
            )  # fmt: skip


@triton.jit
def _quantize_tile(
    matrix, tile_rows, status, differs, products, shift, tile,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    LESS: tl.constexpr, LIMIT: tl.constexpr, IS_RECIPROCAL: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVIDES: tl.constexpr,
    ROUND_TO_BF16: tl.constexpr, RAISES: tl.constexpr, IS_SHARED: tl.constexpr,
    SATURATES: tl.constexpr, IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
    LOW_DTYPE: tl.constexpr, STEP: tl.constexpr, IS_ONE_STEP: tl.constexpr, IS_RANK_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Quantize one block; the arithmetic is `reference.quantize_reference`, bit for bit. If there is a `STEP` along the rank, a
    product is added first, and the sum rounded as `triton_merge` rounds it. If the scale is shared, a launch that `RAISES` has
    found the maximum.
    """
    number = tl.load(tile_rows + tile).to(tl.int64)
    row = matrix + number * NUM_FIELDS
    source, target, num_cols, source_row, source_col, target_row = row_of(row, shift, SOURCE, tl.float8e4nv, IS_ALIGNED)
    num_cols = num_cols.to(tl.int32)
    scale = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    num_rows = tl.load(row + 3).to(tl.int32)
    scale_row = tl.load(row + 8)
    local = (tile - tl.load(row + 9)).to(tl.int32)
    tiles_per_row = tl.load(row + 10).to(tl.int32)
    block_n, block_k = local // tiles_per_row, local % tiles_per_row

    n = tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    first_n, first_k = block_n * BLOCK_N, block_k * BLOCK_K
    mask = (first_n + n < num_rows)[:, None] & (first_k + k < num_cols)[None, :]
    if TILE_N != BLOCK_N:
        mask = mask & (n < BLOCK_N)[:, None]
    if TILE_K != BLOCK_K:
        mask = mask & (k < BLOCK_K)[None, :]
    source_at = source + first_n.to(tl.int64) * source_row + first_k.to(tl.int64) * source_col
    if STEP:  # before the block is loaded, which would take up registers meanwhile
        is_row, is_col = first_n + n < num_rows, first_k + k < num_cols
        total, factor = product_of_block(
            products, number, first_n + n, first_k + k, is_row, is_col, SOURCE, TILE_N, TILE_K, LOW_DTYPE, STEP, IS_ONE_STEP,
            IS_RANK_ALIGNED,
        )  # fmt: skip
    x = tl.load(source_at + n[:, None] * source_row + k[None, :] * source_col, mask=mask, other=0.0)
    if STEP:
        x = (x.to(tl.float32) + factor * total).to(SOURCE)
    if ROUND_TO_BF16:
        x = x.to(tl.bfloat16)
    amax_bits = _amax_bits(x)
    x = x.to(tl.float32)
    if CHECK and (RAISES or not IS_SHARED):
        tl.store(status + tl.load(row + 11), 1, mask=amax_bits >= 0x7F800000)
    if RAISES:
        tl.atomic_max(tl.load(row + 1).to(tl.pointer_type(tl.int32)), amax_bits, sem="relaxed")
    elif WRITE or COMPARE:
        if IS_SHARED:
            amax_bits = tl.load(tl.load(row + 14).to(tl.pointer_type(tl.int32)))
        s = _scale_of(amax_bits, LESS, LIMIT, IS_RECIPROCAL, AMAX_FLOOR)
        code = _code_of(x, s, DIVIDES, SATURATES)
        target_at = target + first_n.to(tl.int64) * target_row + first_k
        target_at += n[:, None] * target_row + k[None, :]
        scale_at = scale if IS_SHARED else scale + block_n * scale_row + block_k
        num_other = put_codes(code, target_at, mask, WRITE, COMPARE)
        if COMPARE:
            s_bits, bits_at = s.to(tl.int32, bitcast=True), scale_at.to(tl.pointer_type(tl.int32))
            # Many write a shared scale: the first one sees what was there.
            held = tl.atomic_xchg(bits_at, s_bits, sem="relaxed") if IS_SHARED and WRITE else tl.load(bits_at)
            add_count(differs, tl.load(row + 11), 0, num_other)
            add_count(differs, tl.load(row + 11), 1, (held != s_bits).to(tl.int32))
        if WRITE and not (IS_SHARED and COMPARE):
            tl.store(scale_at, s)


@triton.jit
def _part_of_rows(source_at, first_k, source_col, is_row, k, end, VALUES: tl.constexpr):
    """The values of some rows from column `first_k` on, and zeros from column `end` on."""
    return tl.load(source_at + first_k * source_col, mask=is_row & (first_k + k < end)[None, :], other=0.0).to(VALUES)


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def _quantize_rows(
    matrix, tile_rows, status, differs, products, shift: tl.int64, first_tile, num_tiles,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    LESS: tl.constexpr, LIMIT: tl.constexpr, IS_RECIPROCAL: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVIDES: tl.constexpr,
    ROUND_TO_BF16: tl.constexpr, SATURATES: tl.constexpr, IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr,
    WRITE: tl.constexpr, COMPARE: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """One program quantizes `TILE_N` rows, each with one scale. It holds them in `NUM_PARTS`, or reads them twice."""
    tile = first_tile + tl.program_id(0)
    row = matrix + tl.load(tile_rows + tile).to(tl.int64) * NUM_FIELDS
    source, target, num_cols, source_row, source_col, target_row = row_of(row, shift, SOURCE, tl.float8e4nv, IS_ALIGNED)
    num_cols = num_cols.to(tl.int32)
    scale = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    num_rows = tl.load(row + 3).to(tl.int32)
    scale_row = tl.load(row + 8)
    first_n = (tile - tl.load(row + 9)).to(tl.int32) * TILE_N
    first_col = tl.load(row + 12).to(tl.int32)
    target_cols = tl.load(row + 13).to(tl.int32)
    if IS_ALIGNED:
        first_col = tl.multiple_of(first_col, 16)
        target_cols = tl.multiple_of(target_cols, 16)

    n = tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    is_row = (first_n + n < num_rows)[:, None]
    source_at = source + first_n.to(tl.int64) * source_row + n[:, None] * source_row + k[None, :] * source_col
    VALUES: tl.constexpr = tl.bfloat16 if ROUND_TO_BF16 else SOURCE
    is_short: tl.constexpr = VALUES.primitive_bitwidth == 16
    largest = tl.zeros((TILE_N, TILE_K), tl.int16 if is_short else tl.int32)
    parts = tl.tuple([])
    if NUM_PARTS:
        for part in tl.static_range(NUM_PARTS):
            x = _part_of_rows(source_at, part * TILE_K, source_col, is_row, k, num_cols, VALUES)
            largest = tl.maximum(largest, bits_to_compare(x))
            parts = parts + (x,)  # noqa: RUF005 Triton knows no star
    else:
        for first_k in range(0, num_cols, TILE_K):
            x = _part_of_rows(source_at, first_k, source_col, is_row, k, num_cols, VALUES)
            largest = tl.maximum(largest, bits_to_compare(x))
    most = tl.max(largest, axis=1)
    amax_bits = magnitude_bits(most.to(tl.int16).to(VALUES, bitcast=True)) if is_short else most
    if CHECK:
        tl.store(status + tl.load(row + 11), 1, mask=tl.max(amax_bits, axis=0) >= 0x7F800000)
    if WRITE or COMPARE:
        s = _scale_of(amax_bits, LESS, LIMIT, IS_RECIPROCAL, AMAX_FLOOR)
        scale_at = scale + (first_n + n) * scale_row
        num_other, num_scales = 0, 0
        if COMPARE:
            held = tl.load(scale_at, mask=first_n + n < num_rows, other=1.0).to(tl.int32, bitcast=True)
            is_other = (held != s.to(tl.int32, bitcast=True)) & (first_n + n < num_rows)
            num_scales = tl.sum(is_other.to(tl.int32), axis=0)
        if WRITE:
            tl.store(scale_at, s, mask=first_n + n < num_rows)
        target_at = target + first_n.to(tl.int64) * target_row + n[:, None] * target_row + k[None, :]
        if NUM_PARTS:
            for part in tl.static_range(NUM_PARTS):
                code = _code_of(parts[part].to(tl.float32), s[:, None], DIVIDES, SATURATES)
                at = part * TILE_K - first_col
                mask = is_row & ((at + k >= 0) & (at + k < target_cols))[None, :]
                num_other += put_codes(code, target_at + at, mask, WRITE, COMPARE)
        else:
            for first_k in range(0, target_cols, TILE_K):
                x = _part_of_rows(
                    source_at, first_col + first_k, source_col, is_row, k, first_col + target_cols, VALUES
                )
                code = _code_of(x.to(tl.float32), s[:, None], DIVIDES, SATURATES)
                mask = is_row & (first_k + k < target_cols)[None, :]
                num_other += put_codes(code, target_at + first_k, mask, WRITE, COMPARE)
        if COMPARE:
            add_count(differs, tl.load(row + 11), 0, num_other)
            add_count(differs, tl.load(row + 11), 1, num_scales)


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def _quantize_groups(
    matrix, tile_rows, status, differs, products, shift: tl.int64, first_tile, num_tiles,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, HAS_EXPONENTS: tl.constexpr, IS_MARLIN: tl.constexpr,
    LESS: tl.constexpr, LIMIT: tl.constexpr, IS_RECIPROCAL: tl.constexpr, AMAX_FLOOR: tl.constexpr, DIVIDES: tl.constexpr,
    ROUND_TO_BF16: tl.constexpr, SATURATES: tl.constexpr, IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr,
    WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """One program quantizes `TILE_K` columns of `TILE_N` rows, with a scale per `GROUP` columns."""
    row, source_at, source_row, source_col, target, target_row, block_n, first_k, is_row, num_cols = tile_of_groups(
        matrix, tile_rows, shift, first_tile, SOURCE, tl.float8e4nv, NUM_FIELDS, TILE_N, TILE_K, IS_ALIGNED
    )  # fmt: skip
    GROUPS: tl.constexpr = TILE_K // GROUP
    VALUES: tl.constexpr = tl.bfloat16 if ROUND_TO_BF16 else SOURCE
    n, k = tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    mask = is_row[:, None] & (first_k + k < num_cols)[None, :]
    x = tl.load(source_at + n[:, None] * source_row + k[None, :] * source_col, mask=mask, other=0.0).to(VALUES)
    most = tl.max(tl.reshape(bits_to_compare(x), (TILE_N, GROUPS, GROUP)), axis=2)
    is_short: tl.constexpr = VALUES.primitive_bitwidth == 16
    amax_bits = magnitude_bits(most.to(tl.int16).to(VALUES, bitcast=True)) if is_short else most
    if CHECK:
        tl.store(status + tl.load(row + 11), 1, mask=tl.max(tl.max(amax_bits, axis=1), axis=0) >= 0x7F800000)
    if WRITE or COMPARE:
        s = _scale_of(amax_bits, LESS, LIMIT, IS_RECIPROCAL, AMAX_FLOOR)
        parts = tl.reshape(x.to(tl.float32), (TILE_N, GROUPS, GROUP))
        code = _code_of(parts, tl.expand_dims(s, 2), DIVIDES, SATURATES)
        stored = (s.to(tl.int32, bitcast=True) >> 23).to(tl.uint8) if HAS_EXPONENTS else s
        SCALE: tl.constexpr = tl.uint8 if HAS_EXPONENTS else tl.float32
        if IS_MARLIN:
            bits = tl.reshape(code.to(tl.int8, bitcast=True), (4, 2, 8, TILE_K // 16, 2, 4, 2))
            placed = tl.reshape(tl.permute(bits, (3, 2, 5, 0, 1, 6, 4)), (TILE_K // 16, 1024))
            codes = placed.to(tl.float8e4nv, bitcast=True)
        else:
            codes = tl.reshape(code, (TILE_N, TILE_K))
        put_groups(
            codes, stored, row, differs, target, target_row, block_n, first_k, is_row, num_cols, SCALE, 1, GROUP, TILE_N,
            TILE_K, IS_MARLIN, WRITE, COMPARE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def _copy_tiles(
    matrix, tile_rows, status, differs, products, shift: tl.int64, first_tile, num_tiles,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    TILE: tl.constexpr, RULE: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """One program copies one segment of one row. `RULE` is a `Check`: what to flag."""
    tile = first_tile + tl.program_id(0)
    row = matrix + tl.load(tile_rows + tile).to(tl.int64) * NUM_FIELDS
    source, target, num_cols, source_row, source_col, target_row = row_of(row, shift, SOURCE, TARGET, IS_ALIGNED)
    local = (tile - tl.load(row + 9)).to(tl.int32)
    tiles_per_row = tl.load(row + 10).to(tl.int32)

    n = (local // tiles_per_row).to(tl.int64)
    first_k = (local % tiles_per_row).to(tl.int64) * TILE
    k = tl.arange(0, TILE)
    mask = k < num_cols - first_k
    x = tl.load(source + n * source_row + first_k * source_col + k * source_col, mask=mask, other=0)
    value = x if SOURCE == TARGET else x.to(tl.float32).to(TARGET)
    target_at = target + n * target_row + first_k + k
    if COMPARE:
        is_other = bits_of(tl.load(target_at, mask=mask, other=0)) != bits_of(value)
        add_count(differs, tl.load(row + 11), 0, tl.sum((is_other & mask).to(tl.int32), axis=0))
    if WRITE:
        tl.store(target_at, value, mask=mask)
    if CHECK:
        if RULE == 0:
            is_bad = magnitude_bits(value) >= 0x7F800000
        elif RULE == 1:
            is_bad = (value & 0x7F) == 0x7F
        else:
            bits = value.to(tl.int32, bitcast=True)
            is_bad = (bits <= 0) | (bits > 0x7B800000)  # 2^120; see `fits_scale_format`
            if RULE == 3:
                is_bad = is_bad | ((bits & 0x7FFFFF) != 0)
        num_bad = tl.sum((is_bad & mask).to(tl.int32), axis=0)
        tl.store(status + tl.load(row + 11), 1, mask=num_bad > 0)
