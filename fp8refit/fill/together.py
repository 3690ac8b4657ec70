"""Keeps tensors of a stream whose slots share a scale, until all of them are there: only then it is known."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from fp8refit.fill.plan import Step
from fp8refit.live.slots import Op, Slot

ItemT = TypeVar("ItemT")


def share_scales(steps: Iterable[Step]) -> bool:
    """Whether a tensor goes to slots that may share a scale with others."""
    return any(step.op is Op.MAXIMUM for step in steps)


class Together(Generic[ItemT]):
    """Tensors that wait for others.

    Args:
        slots: The slots of the planned inventory.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._lacking: dict[tuple[int, int], set[int]] = {}
        """The slots of each group whose tensors have not come."""
        for index, slot in enumerate(slots):
            if slot.group is not None:
                self._lacking.setdefault(slot.group, set()).add(index)
        self._waiting: list[tuple[ItemT, set[tuple[int, int]]]] = []

    def is_last(self, steps: Sequence[Step]) -> bool:
        """Whether a tensor that just came, with these steps, is the only one that its slots need."""
        return not self._waiting and all(
            self._lacking[group] <= {step.slot for step in steps} for group in self._groups(steps)
        )

    def add(self, item: ItemT, steps: Sequence[Step]) -> list[ItemT]:
        """Add a tensor with its steps. Returns those that lack nothing any more, in the order in which they came."""
        groups = set(self._groups(steps))
        for group in groups:
            self._lacking[group] -= {step.slot for step in steps}
        self._waiting.append((item, groups))
        ready = [each for each, needed in self._waiting if not any(map(self._lacking.get, needed))]
        self._waiting = [(each, needed) for each, needed in self._waiting if any(map(self._lacking.get, needed))]
        return ready

    def forget(self) -> None:
        """Let go of what waits."""
        self._waiting.clear()

    def _groups(self, steps: Iterable[Step]) -> Iterator[tuple[int, int]]:
        for step in steps:
            if (group := self._slots[step.slot].group) is not None:
                yield group
