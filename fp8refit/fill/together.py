"""Keeps tensors of a stream whose slots share a scale, until all of them are there: only then it is known."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

from fp8refit.fill.plan import Step
from fp8refit.live.slots import Slot

ItemT = TypeVar("ItemT")
Group: TypeAlias = tuple[int, int]


def share_scales(steps: Iterable[Step]) -> bool:
    """Whether a tensor goes to slots that may share a scale with others."""
    return any(step.op.finds_maximum for step in steps)


class Together(Generic[ItemT]):
    """Tensors that wait for others.

    Args:
        slots: The slots of the planned inventory.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._lacking: dict[Group, set[int]] | None = None
        """The slots of each group whose tensors have not come. Most engines have no group, and need not be searched."""
        self._joined: dict[Group, Group] = {}
        """The group to which another was joined, since one tensor goes to both: their maxima are known together."""
        self._waiting: dict[Group, list[tuple[int, ItemT]]] = {}
        self._new: list[tuple[Group, ItemT]] = []
        self._num_added = 0

    def add(self, item: ItemT, steps: Sequence[Step]) -> list[ItemT]:
        """Add a tensor with its steps. Returns those that lack nothing any more, in the order in which they came."""
        if self._lacking is None:
            self._lacking = _members(self._slots)
        groups = {self._last(group) for step in steps if (group := self._slots[step.slot].group) is not None}
        if not groups:
            return [item]
        group, *others = groups
        lacking, waiting = self._lacking[group], self._waiting.setdefault(group, [])
        for other in others:
            self._joined[other] = group
            lacking |= self._lacking.pop(other)
            waiting += self._waiting.pop(other, [])
        lacking.difference_update(step.slot for step in steps)
        self._num_added += 1
        waiting.append((self._num_added, item))
        if lacking:
            self._new.append((group, item))
            return []
        return [each for _, each in sorted(self._waiting.pop(group), key=lambda pair: pair[0])]

    def take_new(self) -> list[ItemT]:
        """Return what has come since the last call and still waits."""
        new, self._new = self._new, []
        return [item for group, item in new if self._lacking and self._lacking[self._last(group)]]

    def forget(self) -> None:
        """Let go of what waits."""
        self._waiting.clear()
        self._new.clear()

    def _last(self, group: Group) -> Group:
        while group in self._joined:
            group = self._joined[group]
        return group


def _members(slots: Sequence[Slot]) -> dict[Group, set[int]]:
    members: dict[Group, set[int]] = {}
    for index, slot in enumerate(slots):
        if slot.group is not None:
            members.setdefault(slot.group, set()).add(index)
    return members
