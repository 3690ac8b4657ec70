"""Fills slots from stream tensors that are already on the engine's device, in place: tensors that arrive together share
a launch.

The next stream's groups are recognized, and their tables pointed at the new tensors. A launch then costs the host some
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
    """First row, if this is a run of rows (which never cuts a block of the steps); None for the whole tensor."""

    def __str__(self) -> str:
        return self.name if self.first_row is None else f"{self.name} from row {self.first_row}"


@dataclass(kw_only=True, slots=True)
class _Part:
    """One launch, and what to compare after it."""

    table: WorkTable
    sources: list[str]
    """The source tensor of each task of the table."""
    pairs: list[list[Pair]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Group:
    """Tensors that arrived together."""

    guard: LayoutGuard
    parts: list[_Part]


class DirectFill:
    """Fills from tensors on the engine's device, and keeps compiled tables from one stream to the next.

    Args:
        slots: The slots of the planned inventory.
        device: The slots' device.
        config: Options of the refit.
        comparison: If given, compare with the slots instead of writing to them.
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
        """Start a new stream. Flags of earlier streams that nobody has read are dropped.

        Args:
            plan: The plan; None if it is not made yet. If it differs from the last one, nothing is recognized.
        """
        self.bad_sources()
        self._num_filled = 0
        if plan is None or plan is not self._plan:
            self.forget()
        self._plan = plan

    def end(self, plan: RefitPlan) -> None:
        """End the stream, and note its plan."""
        self._plan = plan

    def forget(self) -> None:
        """Drop everything compiled."""
        self._groups.clear()

    def fill_known(self, names: Sequence[str], tensors: Sequence[Tensor]) -> bool:
        """Fill from the next tensors if they have the same layout as at this point of the last stream; otherwise return
        False.
        """
        group = self._groups[self._num_filled] if self._num_filled < len(self._groups) else None
        if group is None or not group.guard.holds(names, tensors):
            return False
        if not all(part.table.refresh(tensors, group.guard.addresses) for part in group.parts):
            return False
        self._launch(group)
        return True

    def fill(self, lying: Sequence[Lying], *, is_kept: bool) -> None:
        """Fill from the next tensors.

        Args:
            lying: Tensors that arrived together.
            is_kept: Whether the same tensors would have the same steps in the next stream, so that the table can be
                kept.
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
        """Wait for everything, and return the names of flagged tensors."""
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
