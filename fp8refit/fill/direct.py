"""Fills slots from the tensors of a stream that are on the engine's device already, where they lie: what comes together in one
launch.

What came together is recognised in the next stream, and its table pointed at the new tensors. So a launch costs the host some
microseconds, and a tensor of a list less than one. Nothing here waits for the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.fill.compare import Comparison, Pair
from fp8refit.fill.kernels import Task, WorkTable, compile_table
from fp8refit.fill.plan import RefitPlan, Step
from fp8refit.fill.row_tasks import cut_to_run
from fp8refit.fill.tasks import bind, split
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import Slot


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lying:
    """A tensor on the engine's device, or a run of rows of one."""

    name: str
    tensor: Tensor
    steps: Sequence[Step]
    first_row: int | None = None
    """Of a run, which cuts no block of what the steps write; None if it is all of the tensor."""

    def __str__(self) -> str:
        return self.name if self.first_row is None else f"{self.name} from row {self.first_row}"


@dataclass(kw_only=True, slots=True)
class _Part:
    """What one launch does, and what to compare after it, if anything is."""

    table: WorkTable
    sources: list[str]
    """What each task of the table reads."""
    pairs: list[list[Pair]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Group:
    """What came together."""

    guard: LayoutGuard
    parts: list[_Part]


class DirectFill:
    """What is kept from one stream to the next of the same plan.

    Args:
        slots: Of the inventory that was planned for.
        device: On which they are.
        config: How to refit.
        comparison: Compares with what slots hold instead of writing to them.
    """

    def __init__(
        self, slots: Sequence[Slot], device: torch.device, config: RefitConfig, comparison: Comparison | None = None
    ) -> None:
        self.device, self.config = device, config
        self.comparison = comparison
        self._slots = slots
        self._check = config.validate_values != "off"
        self._groups: list[_Group] = []
        self._plan: RefitPlan | None = None
        self._num_filled = 0
        self._unread: list[_Part] = []

    def begin(self, plan: RefitPlan | None) -> None:
        """Nothing has come yet. What an earlier stream flagged, and nobody asked for, is forgotten.

        Args:
            plan: Of what will come; None if it is still to be made. Another one may have other steps for what is known.
        """
        self.bad_sources()
        self._num_filled = 0
        if plan is None or plan is not self._plan:
            self.forget()
        self._plan = plan

    def end(self, plan: RefitPlan) -> None:
        """This was the plan of what came."""
        self._plan = plan

    def forget(self) -> None:
        """Recognise nothing."""
        self._groups.clear()

    def fill_known(self, names: Sequence[str], tensors: Sequence[Tensor]) -> bool:
        """Fill from what comes next if it is laid out as what came then in the last stream; False, and nothing done, if not."""
        group = self._groups[self._num_filled] if self._num_filled < len(self._groups) else None
        if group is None or not group.guard.holds(names, tensors):
            return False
        if not all(part.table.refresh(tensors, group.guard.addresses) for part in group.parts):
            return False
        self._launch(group)
        return True

    def fill(self, lying: Sequence[Lying], *, is_kept: bool) -> None:
        """Fill from what comes next.

        Args:
            lying: What came together.
            is_kept: Whether the steps are the same if the same comes again.
        """
        group = _Group(guard=LayoutGuard([str(each) for each in lying], [each.tensor for each in lying]), parts=[])
        tasks: list[Task] = []
        sources: list[str] = []
        places: list[int] = []
        num_bytes = 0
        for place, each in enumerate(lying):
            for task in self._tasks(each):
                if self.comparison is not None and tasks and num_bytes + task.target.nbytes > self.config.bucket_bytes:
                    group.parts.append(self._compile(tasks, sources, places))
                    tasks, sources, places, num_bytes = [], [], [], 0
                tasks.append(task)
                sources.append(each.name)
                places.append(place)
                num_bytes += task.target.nbytes
        group.parts.append(self._compile(tasks, sources, places))
        del self._groups[self._num_filled :]
        if is_kept:
            self._groups.append(group)
        self._launch(group)

    def _tasks(self, lying: Lying) -> Iterator[Task]:
        for step in lying.steps:
            task: Task | None = bind(step, self._slots[step.slot], lying.tensor, self.config)
            assert task is not None, "bound"
            if lying.first_row is not None:
                task = cut_to_run(task, lying.first_row, lying.tensor.shape[0])
            if task is not None and self.comparison is None:
                yield task
            elif task is not None:
                yield from split(task, self.config.bucket_bytes)

    def _compile(self, tasks: Sequence[Task], sources: list[str], places: Sequence[int]) -> _Part:
        pairs: list[list[Pair]] = []
        if self.comparison is not None:
            tasks, pairs = self.comparison.redirect(tasks)
        return _Part(table=compile_table(tasks, self.device, places), sources=sources, pairs=pairs)

    def bad_sources(self) -> list[str]:
        """Wait for everything, and name the tensors that were flagged."""
        unread, self._unread = self._unread, []
        return sorted({part.sources[index] for part in unread for index in part.table.bad_tasks()})

    @property
    def num_device_bytes(self) -> int:
        """Device memory held between streams."""
        return sum(part.table.num_device_bytes for group in self._groups for part in group.parts)

    def _launch(self, group: _Group) -> None:
        for part in group.parts:
            part.table.launch(check=self._check)
            part.table.release()
            if self.comparison is not None:
                self.comparison.compare(part.sources, part.pairs)
            self._unread.append(part)
        self._num_filled += 1
