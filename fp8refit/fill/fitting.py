"""Whether a source tensor fits a slot: which part of it goes there and how, or why it cannot.

A tensor fills one slot, or it is a stack with a matrix for every expert. Then a slot's tensor is a range of rows of its
expert's matrix.
"""

from dataclasses import replace
from typing import NamedTuple, assert_never

import torch

from fp8refit.live.formats import AmaxOver
from fp8refit.live.slots import FP8_DTYPE, SOURCE_DTYPES, Op, Slot, Stacked, TensorMeta, dtype_name


class Fit(NamedTuple):
    """The part of a source tensor, or of one matrix of a stack, that goes to a slot."""

    op: Op
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_transposed: bool = False


def fit_weight(meta: TensorMeta, slot: Slot, stack: Stacked | None = None, first_row: int = 0) -> Fit | str:
    """Return how a weight fits `slot`; or why it does not.

    Args:
        meta: Its shape and dtype.
        slot: Where it goes.
        stack: Set if the weight is a stack of experts.
        first_row: Where the slot's tensor starts in the expert's matrix.
    """
    is_transposed = stack.is_transposed_in(meta.shape) if stack is not None else False
    if stack is not None and stack.shape == meta.shape and is_transposed is None:
        return (
            "has as many rows as columns, and checkpoints and state dicts of this model differ in which is which; "
            "send it expert by expert"
        )
    if stack is not None and is_transposed is None:
        return f"has shape {list(meta.shape)}, this engine's is {list(stack.shape)}, or with rows and columns swapped"
    if stack is None and slot.is_optional and not meta.shape:
        slot = replace(slot, full_shape=(), weight=slot.weight[0])
    if stack is None and meta.shape != slot.full_shape:
        return f"has shape {list(meta.shape)}, this engine's is {list(slot.full_shape)}"
    op = _weight_op(meta, slot)
    if not isinstance(op, Op):
        return op
    if op is Op.COPY_CODES and is_transposed:
        return "is FP8 with rows and columns swapped; send it unquantized, or expert by expert"
    offset, shape = _down(slot.origin, first_row), slot.shape
    if op is Op.QUANTIZE and slot.format is not None and not slot.format.is_shared:
        first, length = slot.format.columns_read(offset[-1], shape[-1], slot.full_shape[-1])
        offset, shape = (*offset[:-1], first), (*shape[:-1], length)
    return Fit(op, offset, shape, bool(is_transposed))


def fit_maxima(fit: Fit, slot: Slot, first_row: int = 0, *, is_cut: bool = False) -> list[Fit]:
    """Return the parts of a weight whose largest magnitudes count for the scale of `slot`, and maybe of others. Empty if only
    the slot's own blocks count.

    Args:
        fit: What `fit_weight` returned.
        slot: Where the weight goes.
        first_row: Where the slot's tensor starts in the expert's matrix.
        is_cut: Whether the rank holds only parts of the matrices that share the scale.
    """
    if fit.op is not Op.QUANTIZE or slot.format is None or not slot.format.needs_maximum:
        return []
    own = fit._replace(op=Op.MAXIMUM)
    match slot.format.amax_over:
        case AmaxOver.OWN_SLICE:
            return [own]
        case AmaxOver.WHOLE_BLOCK:
            whole = own._replace(offset=(first_row, 0), shape=slot.full_shape)
            return [whole, own._replace(op=Op.OWN_MAXIMUM)] if slot.format.needs_own_maximum and is_cut else [whole]
        case _:
            assert_never(slot.format.amax_over)


def fit_scale(meta: TensorMeta, slot: Slot, stack: Stacked | None = None, first_row: int = 0) -> Fit | str:
    """Return how the scales of a tensor that is already FP8 fit `slot`, as `fit_weight` does."""
    if slot.scale is None or slot.format is None:
        return f"is a scale, but this engine holds {slot.name} as {dtype_name(slot.weight.dtype)}; leave it out"
    experts, matrix = ((), slot.full_shape) if stack is None else (stack.shape[:1], stack.shape[1:])
    block, expected = slot.format.block, slot.format.scale_shape((*experts, *matrix))
    if meta.dtype is torch.int32:
        return (
            "is int32: scales packed for DeepGEMM, with four UE8M0 exponents in each; send them as they were before, one "
            f"float32 per block of {block}, or send the weight unquantized"
        )
    if meta.shape != expected:
        return f"has shape {list(meta.shape)}, blocks of {block} need {list(expected)}"
    if meta.dtype not in SOURCE_DTYPES:
        return f"has dtype {dtype_name(meta.dtype)}; send block scales as float32, bfloat16 or float16"
    origin = _down(slot.origin, first_row)
    offset = slot.format.block_at(origin)
    if offset is None:
        return f"this rank's slice starts at {list(origin)}, off the {block} grid of the scales; send the tensor unquantized"
    return Fit(Op.COPY_SCALES, offset, tuple(slot.scale.shape))


def _weight_op(meta: TensorMeta, slot: Slot) -> Op | str:
    """The operation for a tensor, which may already be quantized; or why there is none."""
    if meta.dtype == FP8_DTYPE:
        if slot.format is None or slot.format.codes.dtype != meta.dtype:
            held = "NVFP4" if slot.global_scale is not None else dtype_name(slot.weight.dtype)
            return f"is FP8, but this engine holds it as {held}; send it unquantized"
        if slot.format.scale_format.has_exponents:
            return "is FP8, but this engine holds it as MXFP8; send it unquantized"
        if slot.format.is_shared:
            return "is FP8, but this engine holds it with one scale, maybe also for others; send it unquantized"
        return Op.COPY_CODES
    if meta.dtype in SOURCE_DTYPES:
        return Op.QUANTIZE if slot.is_quantized else Op.COPY
    return f"has dtype {dtype_name(meta.dtype)}; send bfloat16, float16, float32, or float8_e4m3fn with its scales"


def _down(origin: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
    """Move an origin down by some rows."""
    return (origin[0] + num_rows, *origin[1:]) if num_rows else origin
