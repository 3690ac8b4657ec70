"""Slots of a layer of experts: the matrices of all experts of one rank, stacked in two live tensors.

Engines of this family keep gate and up projections in `w13_weight` (E, 2 I, H), one above the other, and down projections in
`w2_weight` (E, H, I), with float32 scales of whole blocks beside them. A checkpoint names each expert's matrices apart; what
transformers 5 calls a state dict stacks them again, which is a `Stacked` of the same slots.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8refit.layers.rules import Experts, LayerRules, Why
from fp8refit.slots import FP8_DTYPE, Slot, Stacked, dtype_name

_TENSORS = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")


def is_experts(module: Any) -> bool:
    """Whether `module` holds the matrices of experts."""
    return "w13_weight" in module._parameters


def slots_of_experts(rules: LayerRules, prefix: str, module: Any, *, name: str) -> Iterator[Slot]:
    """Three slots for each expert that this rank holds of the checkpoint's module `name`."""
    experts = rules.experts_of(prefix, module)
    w13, w13_scale, w2, w2_scale = (module._parameters[name].data for name in _TENSORS)
    size, rank = w2.shape[2], experts.ranks[0]
    num_blocks = w13_scale.shape[1] // 2
    full = (experts.intermediate_size, experts.hidden_size)
    common: dict[str, Any] = {
        "scale_format": experts.kernel.scale_format,
        "block_size": experts.block_size,
        "module": prefix,
        "kernel": experts.kernel.name,
    }
    columns: dict[str, Any] = {"full_shape": full, "offset": (rank * size, 0) if rank else ()}
    rows: dict[str, Any] = {"full_shape": full[::-1], "offset": (0, rank * size) if rank else ()}
    upper, lower = (experts.up, experts.gate) if experts.is_up_first else (experts.gate, experts.up)
    for place, expert in enumerate(_names_of(experts, name)):
        for half, part in enumerate((upper, lower)):
            yield Slot(
                name=f"{expert}.{part}.weight",
                weight=w13[place].narrow(0, half * size, size),
                scale=w13_scale[place].narrow(0, half * num_blocks, num_blocks),
                **columns,
                **common,
            )
        yield Slot(name=f"{expert}.{experts.down}.weight", weight=w2[place], scale=w2_scale[place], **rows, **common)


def _names_of(experts: Experts, name: str) -> Iterator[str]:
    """The checkpoint module of the expert in each place."""
    for expert in experts.ids:
        yield f"{name}.{expert}"
    if experts.shared is not None:
        yield f"{name.rpartition('.')[0]}.{experts.shared}"


def stacks_of_experts(rules: LayerRules, prefix: str, module: Any, *, name: str) -> tuple[Stacked, Stacked]:
    """The two tensors in which a source may send all experts of the checkpoint's module `name`."""
    experts = rules.experts_of(prefix, module)
    size, hidden_size = experts.intermediate_size, experts.hidden_size
    first_rows = {experts.gate: 0, experts.up: size}
    gate_up = {f"{name}.{e}.{part}.weight": (e, row) for e in experts.ids for part, row in first_rows.items()}
    down = {f"{name}.{e}.{experts.down}.weight": (e, 0) for e in experts.ids}
    is_transposed = experts.is_stack_transposed
    return (
        Stacked(
            name=f"{name}.gate_up_proj",
            shape=(experts.num_experts, 2 * size, hidden_size),
            parts=gate_up,
            is_transposed=is_transposed,
        ),
        Stacked(
            name=f"{name}.down_proj",
            shape=(experts.num_experts, hidden_size, size),
            parts=down,
            is_transposed=is_transposed,
        ),
    )


def why_not_experts(rules: LayerRules, prefix: str, module: Any, own: dict[str, Tensor]) -> Why:
    """What is against writing a layer of experts in place."""
    if not set(_TENSORS) <= own.keys() or own["w13_weight"].dtype is not FP8_DTYPE:
        held = ", ".join(f"{name} ({dtype_name(tensor.dtype)})" for name, tensor in own.items())
        return f"its experts are not block FP8: {held}", rules.remedies.other_quantization
    others = [name for name in own if name not in _TENSORS]
    if others:
        return (
            f"holds {', '.join(f'`{name}`' for name in others)} beside its experts' matrices",
            "fp8refit does not know where a checkpoint keeps it yet",
        )
    experts = rules.experts_of(prefix, module)
    if not experts.kernel.is_row_major:
        reason = f"its kernel {experts.kernel.name} repacks experts, or is not known to leave them as loaded"
        return reason, experts.kernel.remedy
    return _why_not_shaped(rules, experts, own)


def _why_not_shaped(rules: LayerRules, experts: Experts, own: dict[str, Tensor]) -> Why:
    """What is against the live tensors being whole, equal parts of the checkpoint's matrices."""
    num_ranks = experts.ranks[1]
    size, left_over = divmod(experts.intermediate_size, num_ranks)
    if left_over:
        reason = f"{experts.intermediate_size} rows of an expert are no even split over {num_ranks} ranks"
        return reason, rules.remedies.one_rank
    count = len(experts.ids) + (experts.shared is not None)
    hidden_size, (block_n, block_k) = experts.hidden_size, experts.block_size
    expected = {
        "w13_weight": (count, 2 * size, hidden_size),
        "w2_weight": (count, hidden_size, size),
        "w13_weight_scale_inv": (count, 2 * -(-size // block_n), -(-hidden_size // block_k)),
        "w2_weight_scale_inv": (count, -(-hidden_size // block_n), -(-size // block_k)),
    }
    for name, shape in expected.items():
        tensor, dtype = own[name], torch.float32 if "scale" in name else FP8_DTYPE
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype) or not tensor.is_contiguous():
            found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            # Blocks are finer where rows of a rank are no multiple of them: another kernel has the same.
            remedy = rules.remedies.one_rank if "scale" in name and num_ranks > 1 else experts.kernel.remedy
            return f"its `{name}` is {found}, not row-major {dtype_name(dtype)} {list(shape)}", remedy
    return None
