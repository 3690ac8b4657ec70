"""Groups ranks that need the same parts of a policy into sections, from their layouts.

A tensor-parallel rank holds some rows or columns of a matrix, a pipeline-parallel rank some layers, an expert-parallel
rank some experts. Equal ranks of all replicas hold the same, and form a section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from fp8refit.live.layout import EngineLayout, SlotLayout
from fp8refit.transport.collective.buckets import Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """The section of each rank, and what each section gets. Empty if every rank needs the whole policy."""

    of_rank: tuple[int, ...] = ()
    """The section of each rank."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """What each section gets of a tensor, by checkpoint name. Other tensors go to all."""

    @property
    def num_sections(self) -> int:
        """Number of sections."""
        return len(set(self.of_rank))


def find_sections(layouts: Sequence[EngineLayout]) -> Sections:
    """Find ranks that hold the same boxes of the same tensors.

    A matrix is cut if the parts for all sections together are no larger than the whole, so that the trainer does not
    send more than in one broadcast to all. Vectors are small and never cut.

    Args:
        layouts: The layouts of every rank of every engine.
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
    """How to cut one tensor; None if cutting saves nothing."""
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
    """The cut, shared by all tensors that are cut alike."""
    return Cut(dim=dim, spans=spans)


def _span(slots: Sequence[SlotLayout], dim: int) -> tuple[int, int]:
    """The range of one dimension that the slots of a rank cover: start and length."""
    first = min((slot.offset[dim] for slot in slots), default=0)
    return first, max((slot.offset[dim] + slot.shape[dim] for slot in slots), default=0) - first
