"""Which ranks need the same of a policy, and what that is: pure, on layouts alone.

A rank of tensor parallelism holds some rows or columns of a matrix, one of pipeline parallelism some layers, one of expert
parallelism some experts. The same rank of every replica holds the same: they form a section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.transport.collective.buckets import Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """Who gets what. None at all if nobody can do with less than everything."""

    of_rank: tuple[int, ...] = ()
    """In which section each rank is."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """What of a tensor goes to each section, by its checkpoint name; what is not named goes to all."""

    @property
    def num_sections(self) -> int:
        """How many there are."""
        return len(set(self.of_rank))


def find_sections(layouts: Sequence[EngineLayout]) -> Sections:
    """Put ranks that hold the same boxes of the same tensors together.

    A tensor is cut if its parts for all sections together are no larger than it is: the trainer, which sends each of them, then
    sends no more than if all got everything. Vectors are not, they are small.

    Args:
        layouts: Of every rank of every engine.
    """
    numbers: dict[frozenset[tuple[object, ...]], int] = {}
    of_rank = []
    held: list[EngineLayout] = []
    for layout in layouts:
        boxes = frozenset((slot.name, slot.full_shape, slot.offset, slot.shape) for slot in layout.slots)
        if boxes not in numbers:
            held.append(layout)
        of_rank.append(numbers.setdefault(boxes, len(numbers)))
    slots: dict[str, dict[int, list[SlotLayout]]] = {}
    for section, layout in enumerate(held):
        for slot in layout.slots:
            slots.setdefault(slot.name, {}).setdefault(section, []).append(slot)
    if len(held) < 2:
        return Sections()
    cuts = {name: cut for name, of_section in slots.items() if (cut := _cut(of_section, len(held))) is not None}
    return Sections(of_rank=tuple(of_rank), cuts=cuts) if cuts else Sections()


def _cut(of_section: Mapping[int, Sequence[SlotLayout]], num_sections: int) -> Cut | None:
    """How to cut one tensor, if it is worth it."""
    shapes = {slot.full_shape for slots in of_section.values() for slot in slots}
    full_shape = shapes.pop()
    if shapes or len(full_shape) < 2:
        return None
    found = [
        tuple(_span(of_section.get(section, ()), dim) for section in range(num_sections))
        for dim in range(len(full_shape))
    ]
    lengths = [
        sum(count for _, count in spans) / size if size else 1 for spans, size in zip(found, full_shape, strict=True)
    ]
    dim = lengths.index(min(lengths))
    return _cut_of(dim, found[dim]) if lengths[dim] <= 1 else None


@lru_cache(maxsize=1 << 12)
def _cut_of(dim: int, spans: tuple[tuple[int, int], ...]) -> Cut:
    """Tensors that are cut alike share a cut."""
    return Cut(dim=dim, spans=spans)


def _span(slots: Sequence[SlotLayout], dim: int) -> tuple[int, int]:
    """What of one dimension the slots of a rank hold together: the first, and how many."""
    first = min((slot.offset[dim] for slot in slots), default=0)
    return first, max((slot.offset[dim] + slot.shape[dim] for slot in slots), default=0) - first
