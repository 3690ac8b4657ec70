"""Keeps tensors of a stream whose slots share a scale, until all of them are there: only then it is known."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from fp8refit.fill.plan import Step
from fp8refit.live.slots import Op, Slot

ItemT = TypeVar("ItemT")


def share_scales(steps: Iterable[Step]) -> bool:
    """Whether a tensor goes to slots that may share a scale with others."""
    return any(step.op is Op.MAXIMUM for step in steps)


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiting(Generic[ItemT]):
    item: ItemT
    number: int
    groups: set[tuple[int, int]]
    """Those that lack others."""


class Together(Generic[ItemT]):
    """Tensors that wait for others.

    Args:
        slots: The slots of the planned inventory.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._waiting: dict[tuple[int, int], list[_Waiting[ItemT]]] = {}
        self._new: list[_Waiting[ItemT]] = []
        self._num_added = 0

    @cached_property
    def _lacking(self) -> dict[tuple[int, int], set[int]]:
        """The slots of each group whose tensors have not come. Most engines have no group, and need not be searched."""
        lacking: dict[tuple[int, int], set[int]] = {}
        for index, slot in enumerate(self._slots):
            if slot.group is not None:
                lacking.setdefault(slot.group, set()).add(index)
        return lacking

    def add(self, item: ItemT, steps: Sequence[Step]) -> list[ItemT]:
        """Add a tensor with its steps. Returns those that lack nothing any more, in the order in which they came."""
        groups = set(self._groups(steps))
        for group in groups:
            self._lacking[group] -= {step.slot for step in steps}
        self._num_added += 1
        added = _Waiting(item=item, number=self._num_added, groups={group for group in groups if self._lacking[group]})
        touched = [added]
        for group in groups - added.groups:
            for each in self._waiting.pop(group, ()):
                each.groups.discard(group)
                touched.append(each)
        for group in added.groups:
            self._waiting.setdefault(group, []).append(added)
        if added.groups:
            self._new.append(added)
        return [each.item for each in sorted(touched, key=lambda each: each.number) if not each.groups]

    def take_new(self) -> list[ItemT]:
        """Return what has come since the last call and still waits."""
        new, self._new = self._new, []
        return [each.item for each in new if each.groups]

    def forget(self) -> None:
        """Let go of what waits."""
        self._waiting.clear()
        self._new.clear()

    def _groups(self, steps: Iterable[Step]) -> Iterator[tuple[int, int]]:
        for step in steps:
            if (group := self._slots[step.slot].group) is not None:
                yield group
