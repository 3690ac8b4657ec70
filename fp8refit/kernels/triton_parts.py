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
def add_count(differs, task, of_scales: tl.constexpr, count):
    """Add to a task's count of elements, or of scales, that differ."""
    tl.atomic_add(differs + 2 * task + of_scales, count, mask=count > 0, sem="relaxed")
