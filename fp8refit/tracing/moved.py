"""Follows experts that an engine moves after it has loaded them: what each row of a layer's stacks holds now."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import nn

from fp8refit.tracing.reading import twin_name
from fp8refit.tracing.records import Copy, Objection
from fp8refit.tracing.twin import Twin

_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_NOT_ONE_BY_ONE = "is not loaded expert by expert, and the engine moves experts"


def with_experts(twin: Twin, model: nn.Module, held: Mapping[nn.Module, Sequence[int]]) -> Twin:
    """Return a twin as if its loader had put other experts into the rows of the stacks of some layers.

    Args:
        twin: What the loader of the model's twin did.
        model: The live model.
        held: Layers of experts, and the number of the expert in each of this rank's rows.
    """
    rows = {twin_name(prefix, ""): held[module] for prefix, module in model.named_modules() if module in held}
    if not rows:
        return twin
    traced, copies, odd = twin.traced, list[Copy](), dict[str, None]()
    odd |= {each.parameter: None for each in traced.computed if _layer(each.parameter) in rows}
    for copy in traced.copies:
        experts = rows.get(_layer(copy.parameter))
        if experts is None or not copy.source:
            copies.append(copy)
            continue
        size = prod(twin.tensors[copy.parameter].shape[1:])
        last = copy.into + sum((run.size - 1) * run.into for run in copy.runs)
        row = copy.into // size
        source, count = _NUMBER.subn(str(experts[row]), copy.source)
        copies.append(copy._replace(source=source))
        if not count or last // size != row or source not in twin.naming.tensors:
            odd[copy.parameter] = None
    faults = tuple(Objection(source="", parameter=name, reason=_NOT_ONE_BY_ONE) for name in odd)
    return replace(twin, traced=replace(traced, copies=tuple(copies), objections=(*faults, *traced.objections)))


def _layer(parameter: str) -> str:
    return parameter[: parameter.rfind(".") + 1]
