"""The kernel that quantizes with scales of two levels (NVFP4); the bits are those of `reference.quantize_two_levels`."""

import triton
import triton.language as tl

from fp8refit.kernels.triton_parts import add_count, put_groups, tile_of_groups


@triton.jit(do_not_specialize=["shift", "first_tile", "num_tiles"])
def quantize_levels(
    matrix, tile_rows, status, differs, products, shift: tl.int64, first_tile, num_tiles,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, IS_MARLIN: tl.constexpr, AMAX_FLOOR: tl.constexpr, ROUND_TO_BF16: tl.constexpr,
    IS_ALIGNED: tl.constexpr, CHECK: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """One program quantizes `TILE_K` columns of `TILE_N` rows, with a scale per `GROUP` columns. Another launch has found the
    largest magnitudes, and flagged NaN and Inf.

    Two codes share a byte: neighbors in rows; those 8 columns apart in Marlin's tiles of 64 rows and 16 columns, see
    `placement`. So the values are taken in two halves, from the start on.
    """
    row, source_at, source_row, source_col, target, target_row, block_n, first_k, is_row, num_cols = tile_of_groups(
        matrix, tile_rows, shift, first_tile, SOURCE, tl.int8, NUM_FIELDS, TILE_N, TILE_K, IS_ALIGNED
    )  # fmt: skip
    if WRITE or COMPARE:  # begun before the values are read
        maximum = tl.load(tl.load(row + 14).to(tl.pointer_type(tl.float32)))
        if IS_MARLIN:
            own_at = tl.load(row + 16)
            own = tl.load(own_at.to(tl.pointer_type(tl.float32)), mask=own_at != 0, other=0.0)
    GROUPS: tl.constexpr = TILE_K // GROUP
    HALF: tl.constexpr = TILE_K // 2
    VALUES: tl.constexpr = tl.bfloat16 if ROUND_TO_BF16 else SOURCE
    source_at += tl.arange(0, TILE_N)[:, None] * source_row
    if IS_MARLIN:  # both halves of 16 columns lie in one sector
        half = tl.arange(0, HALF)
        k = half // 8 * 16 + half % 8
        mask = is_row[:, None] & (first_k + k < num_cols)[None, :]
        x = tl.load(source_at + k[None, :] * source_col, mask=mask, other=0.0).to(VALUES).to(tl.float32)
        y = tl.load(source_at + (k + 8)[None, :] * source_col, mask=mask, other=0.0).to(VALUES).to(tl.float32)
    else:
        k = tl.arange(0, TILE_K)
        mask = is_row[:, None] & (first_k + k < num_cols)[None, :]
        both = tl.load(source_at + k[None, :] * source_col, mask=mask, other=0.0).to(VALUES).to(tl.float32)
        x, y = tl.split(tl.reshape(both, (TILE_N, HALF, 2)))
    if WRITE or COMPARE:
        amax = tl.max(tl.reshape(tl.maximum(tl.abs(x), tl.abs(y)), (TILE_N, GROUPS, GROUP // 2)), axis=2)
        over_all = tl.div_rn(tl.maximum(maximum, AMAX_FLOOR), 2688.0)
        small = _small_scale_of(amax, over_all)
        factor = 1.0
        if IS_MARLIN:
            factor = tl.where(own_at != 0, _factor_of(own, over_all), 1.0)
        if block_n + first_k == 0:
            at = tl.load(row + 15).to(tl.pointer_type(tl.int32))
            _put_global(differs, tl.load(row + 11), at, over_all, factor, IS_MARLIN, WRITE, COMPARE)

        scale = small.to(tl.float32) * over_all
        inverse = tl.div_rn(1.0, scale)
        low = _raised_code_of(x, scale, inverse, TILE_N, GROUPS, GROUP // 2)
        high = _raised_code_of(y, scale, inverse, TILE_N, GROUPS, GROUP // 2)
        pairs = (low + (high << 4)).to(tl.int8)
        stored = _placed_small_scale(small, factor, IS_MARLIN)
        if IS_MARLIN:
            bits = tl.reshape(pairs, (4, 2, 8, TILE_K // 16, 4, 2))
            codes = tl.reshape(tl.permute(bits, (3, 2, 4, 0, 5, 1)), (TILE_K // 16, 512))
        else:
            codes = tl.reshape(pairs, (TILE_N, HALF))
        put_groups(
            codes, stored, row, differs, target, target_row, block_n, first_k, is_row, num_cols, tl.uint8, 2, GROUP, TILE_N,
            TILE_K, IS_MARLIN, WRITE, COMPARE,
        )  # fmt: skip


@triton.jit
def _raised_code_of(x, scale, inverse, TILE_N: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr):
    """The codes of half of the values of each group, `(TILE_N, GROUPS, SIDE)`, plus a multiple of 256.

    The quotient is that of `div_rn`, by Newton's step, as scales are no denormal numbers. Codes have steps of 0.5 below 2, of 1
    below 4, and of 2 from there: the code of a magnitude m is the least of 2m, m + 2, m/2 + 4 and 7. Beside 2^23, float32 has
    steps of 1, so that each is rounded once, to nearest, ties to even, and shows in the lowest byte.
    """
    values = tl.reshape(x, (TILE_N, GROUPS, SIDE))
    per_value = tl.broadcast_to(tl.expand_dims(inverse, 2), values.shape)
    magnitude = tl.abs(values)
    first = magnitude * per_value
    rest = tl.fma(first, tl.broadcast_to(tl.expand_dims(-scale, 2), values.shape), magnitude)
    quotient = tl.fma(rest, per_value, first)
    doubled = tl.fma(quotient, tl.full(values.shape, 2.0, tl.float32), tl.full(values.shape, 8388608.0, tl.float32))
    halved = tl.fma(quotient, tl.full(values.shape, 0.5, tl.float32), tl.full(values.shape, 8388612.0, tl.float32))
    small = tl.minimum(doubled.to(tl.int32, bitcast=True), (quotient + 8388610.0).to(tl.int32, bitcast=True))
    large = tl.minimum(halved.to(tl.int32, bitcast=True), 0x4B000007)
    code = tl.minimum(small, large)
    is_negative = values.to(tl.uint32, bitcast=True) > 0x80000000
    return tl.where(is_negative, code + 8, code)


@triton.jit
def _small_scale_of(amax, over_all):
    """The E4M3 scales of blocks with these largest magnitudes, beside the scale of the weight."""
    wanted = tl.div_rn(amax, tl.broadcast_to(6.0 * over_all, amax.shape))
    return tl.where(wanted == 0, 1.0, tl.minimum(tl.maximum(wanted, 0.001953125), 448.0)).to(tl.float8e4nv)


@triton.jit
def _factor_of(own, over_all):
    """The power of two by which Marlin's scales are raised; see `reference.put_two_levels`."""
    largest = _small_scale_of(tl.full((1,), own, tl.float32), over_all).to(tl.float32).to(tl.int32, bitcast=True)
    more = 135 - (largest >> 23) - ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.max(((127 + more) << 23).to(tl.float32, bitcast=True), axis=0)


@triton.jit
def _placed_small_scale(small, factor, IS_MARLIN: tl.constexpr):
    """Their bytes, as `reference.put_two_levels` has them."""
    if IS_MARLIN:
        raised = tl.minimum(small.to(tl.float32) * factor, 448.0)
        as_read = raised.to(tl.float8e4nv).to(tl.int8, bitcast=True).to(tl.int32) + 120
        stored = tl.where(raised < 0.015625, 0, as_read)
    else:
        stored = small.to(tl.int8, bitcast=True).to(tl.int32)
    return stored.to(tl.uint8)


@triton.jit
def _put_global(
    differs, task, bits_at, over_all, factor, IS_MARLIN: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr
):
    """Store the scale of a weight, which all programs that quantize parts of it do, and count whether another one was there."""
    if IS_MARLIN:
        over_all = tl.div_rn(over_all * 6.646139978924579e35, factor)  # 2^119; see `reference.MARLIN_GLOBAL`
    new = over_all.to(tl.int32, bitcast=True)
    if COMPARE:
        held = tl.atomic_xchg(bits_at, new, sem="relaxed") if WRITE else tl.load(bits_at)
        add_count(differs, task, 1, (held != new).to(tl.int32))
    elif WRITE:
        tl.store(bits_at, new)
