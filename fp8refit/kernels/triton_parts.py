"""What several kernels of tables do alike."""

import triton
import triton.language as tl


@triton.jit
def row_of(row, shift, SOURCE: tl.constexpr, TARGET: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Of a row of the table: source, target, columns, strides of the source's rows and columns, stride of the target's rows."""
    source = (tl.load(row + 0) + shift).to(tl.pointer_type(SOURCE))
    target = tl.load(row + 1).to(tl.pointer_type(TARGET))
    num_cols = tl.load(row + 4)
    source_row = tl.load(row + 5)
    source_col = tl.load(row + 6)
    target_row = tl.load(row + 7)
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        num_cols = tl.multiple_of(num_cols, 16)
        source_row = tl.multiple_of(source_row, 16)
        target_row = tl.multiple_of(target_row, 16)
        source_col = 1
    return source, target, num_cols, source_row, source_col, target_row


@triton.jit
def magnitude_bits(x):
    """float32 bits of |x|, which sort like the magnitudes, with Inf and NaN above every finite value."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def bits_to_compare(x):
    """Bits of |x| that sort like the magnitudes, in as many bits as `x` has."""
    is_short: tl.constexpr = x.dtype.primitive_bitwidth == 16
    return (x.to(tl.int16, bitcast=True) & 0x7FFF) if is_short else magnitude_bits(x)


@triton.jit
def bits_of(x):
    """The bits of values of any dtype."""
    if x.dtype.primitive_bitwidth == 8:
        bits = x.to(tl.int8, bitcast=True)
    elif x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True)
    elif x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
    else:
        bits = x.to(tl.int64, bitcast=True)
    return bits


@triton.jit
def put_codes(code, target_at, mask, WRITE: tl.constexpr, COMPARE: tl.constexpr):
    """Count the codes that are not there, and store them."""
    num_other = 0
    if COMPARE:
        bytes_at = target_at.to(tl.pointer_type(tl.int8), bitcast=True)
        held = tl.load(bytes_at, mask=mask, other=0)
        new = code.to(tl.int8, bitcast=True)
        if WRITE:  # ptxas of CUDA 12.8 compares other registers than those that it stores, so they are read again
            tl.store(bytes_at, new, mask=mask)
            tl.debug_barrier()
            new = tl.load(bytes_at, mask=mask, other=0, volatile=True)
        is_other = (new != held) & mask
        # Not a sum of integers: ptxas of CUDA 12.8 to 13.0 dies of what Triton 3.6 and 3.7 make of it beside the store.
        num_other = tl.sum(tl.sum(tl.where(is_other, 1.0, 0.0), axis=1), axis=0).to(tl.int32)
    elif WRITE:
        tl.store(target_at, code, mask=mask)
    return num_other


@triton.jit
def tile_of_groups(
    matrix, tile_rows, shift, first_tile, SOURCE: tl.constexpr, TARGET: tl.constexpr, NUM_FIELDS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Of a program's tile of `TILE_N` rows and `TILE_K` columns: its row of the table; its first value and the strides; the
    target and the stride of its rows; the number of the tile down the rows, its first column; which rows exist, and how many
    columns.
    """
    tile = first_tile + tl.program_id(0)
    row = matrix + tl.load(tile_rows + tile).to(tl.int64) * NUM_FIELDS
    source, target, num_cols, source_row, source_col, target_row = row_of(row, shift, SOURCE, TARGET, IS_ALIGNED)
    num_cols = num_cols.to(tl.int32)
    num_rows = tl.load(row + 3).to(tl.int32)
    local = (tile - tl.load(row + 9)).to(tl.int32)
    tiles_per_row = tl.load(row + 10).to(tl.int32)
    block_n = (local // tiles_per_row).to(tl.int64)
    first_k = local % tiles_per_row * TILE_K
    is_row = block_n * TILE_N + tl.arange(0, TILE_N) < num_rows
    source_at = source + block_n * TILE_N * source_row + first_k.to(tl.int64) * source_col
    return row, source_at, source_row, source_col, target, target_row, block_n, first_k, is_row, num_cols


@triton.jit
def put_groups(
    codes, scales, row, differs, target, target_row, block_n, first_k, is_row, num_cols, SCALE: tl.constexpr,
    CODES_PER_BYTE: tl.constexpr, GROUP: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    IS_MARLIN: tl.constexpr, WRITE: tl.constexpr, COMPARE: tl.constexpr,
):  # fmt: skip
    """Store a tile's codes, `(TILE_N, bytes)` or `(tiles of Marlin, bytes)`, and its scales, `(TILE_N, groups)`.

    A tile of Marlin holds 64 rows and 16 columns; see `placement`.
    """
    GROUPS: tl.constexpr = TILE_K // GROUP
    BYTES: tl.constexpr = TILE_K // CODES_PER_BYTE
    n, group = tl.arange(0, TILE_N), tl.arange(0, GROUPS)
    scale = tl.load(row + 2).to(tl.pointer_type(SCALE))
    scale_row = tl.load(row + 8)
    first_group = first_k // GROUP
    is_group = (first_k + group * GROUP) < num_cols
    if IS_MARLIN:
        SIZE: tl.constexpr = 1024 // CODES_PER_BYTE
        at, place, place_of_scale = tl.arange(0, TILE_K // 16), tl.arange(0, SIZE), tl.arange(0, 64)
        target_at = target + (first_k // 16 + at)[:, None] * target_row + block_n * SIZE + place[None, :]
        mask = (first_k + at * 16 < num_cols)[:, None] & (place >= 0)[None, :]
        placed = tl.reshape(tl.permute(tl.reshape(scales, (2, 2, 2, 8, GROUPS)), (4, 3, 0, 2, 1)), (GROUPS, 64))
        scale_at = scale + (first_group + group)[:, None] * scale_row + block_n * 64 + place_of_scale[None, :]
        is_scale = is_group[:, None] & (place_of_scale >= 0)[None, :]
    else:
        place = tl.arange(0, BYTES)
        target_at = target + (block_n * TILE_N + n[:, None]) * target_row + first_k // CODES_PER_BYTE + place[None, :]
        mask = is_row[:, None] & (first_k + CODES_PER_BYTE * place < num_cols)[None, :]
        placed = scales
        scale_at = scale + (block_n * TILE_N + n)[:, None] * scale_row + (first_group + group)[None, :]
        is_scale = is_row[:, None] & is_group[None, :]
    num_other = put_codes(codes, target_at, mask, WRITE, COMPARE)
    if COMPARE:
        held = tl.load(scale_at, mask=is_scale, other=0)
        num_scales = tl.sum(tl.sum(((bits_of(held) != bits_of(placed)) & is_scale).to(tl.int32), axis=1), axis=0)
        add_count(differs, tl.load(row + 11), 0, num_other)
        add_count(differs, tl.load(row + 11), 1, num_scales)
    if WRITE:
        tl.store(scale_at, placed, mask=is_scale)


@triton.jit
def add_count(differs, task, of_scales: tl.constexpr, count):
    """Add to a task's count of elements, or of scales, that differ."""
    tl.atomic_add(differs + 2 * task + of_scales, count, mask=count > 0, sem="relaxed")
