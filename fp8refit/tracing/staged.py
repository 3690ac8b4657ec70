"""Weights that are not plain copies of checkpoint tensors: their sources are kept, and they are recomputed after each
fill.

A Mamba layer holds `-exp(A_log)`. Some models order the heads of queries, keys and values differently than their
checkpoints, across blocks. The slots of such weights are the whole sources in BF16, or float32 if the loader computes in
it. A refit repeats the loader's computation and quantizes the result if the engine holds it quantized. The sources stay
in memory between refits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8refit.kernels import Task, compile_table
from fp8refit.live.slots import FP8_DTYPE, Op, Slot, TensorMeta
from fp8refit.tracing.records import Base, Computed, Copy, Recipe

aten = torch.ops.aten

MAX_COMPUTED = 1 << 22
"""Elements of the largest tensor that may be recomputed, rather than only reordered."""
_MOVES = frozenset(
    {aten.cat.default, aten.clone.default, aten.index_select.default, aten.repeat.default, aten.stack.default}
)


@dataclass(kw_only=True, slots=True, eq=False)
class Staged:
    """One live tensor that is computed from sources."""

    weight: Tensor
    copies: Sequence[Copy]
    computed: Sequence[Computed]
    scale: Tensor | None = None
    slot: Mapping[str, Any] = field(default_factory=dict)
    """The format of a tensor with block scales."""
    others: Mapping[Base, Tensor] = field(default_factory=dict)
    """Other live tensors it is computed from."""
    in_order: Callable[[Tensor], Tensor] | None = None
    """Gives a view of it in the order in which it was loaded; None if a kernel has left it in that."""
    values: dict[Base, Tensor] = field(default_factory=dict)

    def slots(self, module: str, sources: Mapping[str, TensorMeta]) -> list[Slot]:
        """Allocate the sources and return their slots."""
        bases = [base for each in self.computed for base in each.recipe.bases() if not base.is_parameter]
        names = dict.fromkeys([copy.source for copy in self.copies if copy.source] + [base.name for base in bases])
        dtype = self.slot_dtype
        if self.scale is None and bases:
            dtype = torch.float32 if all(_begins_in_float32(each) for each in self.computed) else torch.bfloat16
        for name in names:
            room = torch.empty(sources[name].shape, dtype=dtype, device=self.weight.device)
            self.values[Base(name=name, is_parameter=False)] = room
        if self.in_order is not None:  # a source may be kept
            flat = self.in_order(self.weight).reshape(-1)
            for part, room in self._places(flat):
                room.copy_(part)
        return [
            Slot(
                name=base.name,
                full_shape=tuple(room.shape),
                weight=room,
                module=module,
                is_rearranged=self.scale is not None,
            )
            for base, room in self.values.items()
        ]

    def _places(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the loaded tensor, flattened, with what they are copied from."""
        for copy in self.copies:
            if copy.source:
                room = self.values[Base(name=copy.source, is_parameter=False)].view(-1)
                strides = [run.stride for run in copy.runs]
                yield _part(flat, copy), room.as_strided([run.size for run in copy.runs], strides, copy.start)

    @property
    def slot_dtype(self) -> torch.dtype:
        """Of what is quantized, or written."""
        return torch.bfloat16 if self.scale is not None else self.weight.dtype

    @torch.inference_mode()
    def refresh(self) -> None:
        """Recompute the live tensor from the sources."""
        is_last = self.scale is None and self.in_order is None
        into = self.weight if is_last else torch.empty_like(self.weight, dtype=self.slot_dtype)
        flat = into.view(-1)
        values = self.values | {base: tensor.clone() for base, tensor in self.others.items()}
        for copy in self.copies:
            if not copy.source:
                _part(flat, copy).zero_()
        for part, room in self._places(flat):
            part.copy_(room)
        for each in self.computed:
            itself = {base for base in each.recipe.bases() if base.is_parameter and base not in self.others}
            values |= {base: into.clone() for base in itself}
            sizes = [run.size for run in each.into.runs]
            value = each.value.of(values)
            flat.as_strided(sizes, [run.into for run in each.into.runs], each.into.into).copy_(value.reshape(sizes))
        if self.in_order is not None:
            placed = self.in_order(self.weight)
            placed.copy_(into.view(placed.shape))
        if self.scale is not None:
            task = Task(
                op=Op.QUANTIZE, source=into, offset=(0, 0), target=self.weight, scale=self.scale, **dict(self.slot)
            )
            compile_table([task], self.weight.device).launch(check=False)


def _part(flat: Tensor, copy: Copy) -> Tensor:
    """Where a copy goes in a tensor that is flattened."""
    return flat.as_strided([run.size for run in copy.runs], [run.into for run in copy.runs], copy.into)


def fault_of_recipe(computed: Computed, dtype: torch.dtype, numel: int) -> str | None:
    """Say why a computation cannot be repeated into a tensor of `dtype`; None if it can."""
    steps = list(computed.recipe.steps())
    sums = sorted({str(step.func) for step in steps if step.func not in _MOVES and not _is_cast(step)})
    if sums and dtype is FP8_DTYPE:
        return f"is computed ({', '.join(sums)}) before it is quantized"
    if sums and numel > MAX_COMPUTED:
        return f"is computed ({', '.join(sums)}), and is larger than what fp8refit computes"
    return None


def _is_cast(step: Recipe) -> bool:
    return step.func is aten._to_copy.default


def _begins_in_float32(computed: Computed) -> bool:
    """Whether every input is cast to float32 first, so that a float32 source is used as it is."""
    steps = computed.recipe.steps()
    first = [step for step in steps if any(isinstance(view.base, Base) for view in step.views())]
    return all(_is_cast(step) and step.kwargs.get("dtype") is torch.float32 for step in first)
