"""Finds which elements of checkpoint tensors an engine's loader reads. Together, the ranks must read them all.

An engine that skips part of a tensor does not hold the trainer's model, so the refit is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import TypeAlias

from fp8refit.live.names import is_not_a_weight
from fp8refit.live.slots import PartlyRead, Refusal, TensorMeta
from fp8refit.tracing.boxes import Range, are_whole, corner_of, count_cover, ranges_of, written_by
from fp8refit.tracing.patterns import row_major
from fp8refit.tracing.records import Copy, Traced
from fp8refit.tracing.used import used_by

_MOST_BOXES = 1 << 14
"""Up to this many boxes of a tensor are compared one by one."""
_NOT_DESCRIBED = "is read in a pattern that fp8refit cannot describe"
Box: TypeAlias = tuple[Range, ...]
"""One range per dimension."""


def partly_read(traced: Traced, sources: Mapping[str, TensorMeta]) -> dict[str, PartlyRead]:
    """Return what one rank's loader reads of the tensors that it does not read whole.

    Args:
        traced: What the loader did.
        sources: The checkpoint's tensors.
    """
    reads: dict[str, list[Copy]] = {}
    for copy in traced.copies:
        if copy.source:
            reads.setdefault(copy.source, []).append(copy)
    for read in used_by(traced.computed, sources):
        reads.setdefault(read.source, []).append(read)
    reasons = {objection.source: objection.reason for objection in traced.objections}
    known: dict[object, tuple[tuple[Box, ...] | None, str]] = {}
    found: dict[str, PartlyRead] = {}
    for name, meta in sources.items():
        mine = reads.get(name, [])
        if any(not read.start and are_whole(read.runs, meta.shape) for read in mine):
            continue
        key = meta.shape, tuple((read.start, read.runs) for read in mine)
        if key not in known:
            known[key] = _boxes_of(mine, meta.shape)
        boxes, unknown = known[key]
        if boxes is not None:
            found[name] = PartlyRead(shape=meta.shape, boxes=boxes, reason=reasons.get(name, unknown))
    return found


def refusals_of(ranks: Iterable[Mapping[str, PartlyRead]]) -> list[Refusal]:
    """Return a refusal for each tensor that the ranks of an engine together do not read whole.

    Args:
        ranks: The result of `partly_read` for each rank.
    """
    first, *others = ranks
    refusals = []
    for name, read in first.items():
        parts = [read, *(other[name] for other in others if name in other)]
        if len(parts) <= len(others) or is_not_a_weight(name):
            continue  # a rank that does not list the tensor reads all of it
        boxes = dict.fromkeys(box for part in parts for box in part.boxes)
        num_bare = count_cover(list(boxes), read.shape)[0]
        if num_bare:
            reason = f"{num_bare} of its {prod(read.shape)} elements are read by no rank"
            said = next((part.reason for part in parts if part.reason), "")
            remedy = (
                "The engine would not serve the trainer's model; remove the tensor from the model, or ask for support"
            )
            refusals.append(Refusal(module=name, reason=f"{reason}: it {said}" if said else reason, remedy=remedy))
    return refusals


def _boxes_of(reads: Sequence[Copy], shape: tuple[int, ...]) -> tuple[tuple[Box, ...] | None, str]:
    """Return the boxes of a tensor that are read, None if they cover it; and why there may be more, or nothing.

    A read that no boxes describe counts as none. Beyond `_MOST_BOXES`, the numbers of elements are compared instead.
    """
    found: dict[Box, None] = {}
    unknown = ""
    for read in reads:
        boxes = _read_boxes(read, shape)
        unknown = unknown if boxes else _NOT_DESCRIBED
        found |= dict.fromkeys(boxes)
        if len(found) > _MOST_BOXES:
            elements = {(each.start, each.runs): prod(run.size for run in each.runs if run.stride) for each in reads}
            return (None, "") if sum(elements.values()) == prod(shape) else ((), _NOT_DESCRIBED)
    return (tuple(found) if count_cover(list(found), shape)[0] else None), unknown


def _read_boxes(read: Copy, shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes that a read consists of; none if there are too many."""
    runs = tuple(run._replace(into=run.stride) for run in read.runs if run.stride)
    boxes = written_by(read._replace(into=read.start, runs=runs), shape)
    return _crossed(read, shape) if boxes is None else boxes


def _crossed(read: Copy, shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes of a read that takes the same columns of each of its rows, such as every second one."""
    places = [[place] for place in corner_of(read.start, shape)]
    strides = row_major(shape)
    for run in read.runs:
        size, stride = run.size, run.stride
        while size > 1 and stride:
            dim = next((dim for dim, found in enumerate(strides) if shape[dim] > 1 and stride % found == 0), None)
            if dim is None:
                return []
            step = stride // strides[dim]
            # A run may cross dimensions that it reads whole.
            taken = min(size, -(-(shape[dim] - max(places[dim])) // step))
            if taken < size and (size % taken or step * taken != shape[dim]):
                return []
            places[dim] = [place + step * index for place in places[dim] for index in range(taken)]
            size, stride = size // taken, stride * taken
    ranges = [ranges_of(sorted(set(each))) for each in places]
    return list(product(*ranges)) if prod(map(len, ranges)) <= _MOST_BOXES else []
