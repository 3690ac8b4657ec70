"""Writes live slots from the buckets of a broadcast, which lie in a few buffers at the same place in every refit.

So a bucket's table is compiled once and replayed, and no address in it changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, TransportError
from fp8refit.fill.fill import Arriving, Fill
from fp8refit.fill.kernels import Task, WorkTable, compile_table
from fp8refit.fill.plan import RefitPlan, Step
from fp8refit.fill.row_tasks import cut_to_run
from fp8refit.fill.tasks import bind
from fp8refit.live.slots import Slot
from fp8refit.sources.source import PushedSource
from fp8refit.transport.collective.buckets import BucketLayout, Part, WireTensor


class ReceivedSource(PushedSource):
    """A policy that arrives in buckets. What could be judged by the trainer was judged there.

    Args:
        tensors: Everything that is announced.
        buckets: How it is laid out, as far as it comes to this rank.
        buffers: uint8, on the engine's device, in which buckets arrive in turn.
        **found: See `PushedSource`.
    """

    def __init__(
        self,
        tensors: Sequence[WireTensor],
        buckets: Sequence[BucketLayout],
        buffers: Sequence[Tensor],
        *,
        problems: Sequence[str] = (),
        odd_scales: Sequence[str] = (),
        unfit: Mapping[str, str] | None = None,
    ) -> None:
        metadata = {name: meta for tensor in tensors for name, meta in tensor.metas.items()}
        super().__init__(metadata, problems=problems, odd_scales=odd_scales, unfit=unfit)
        self.tensors = tuple(tensors)
        self.buckets = tuple(buckets)
        self.buffers = tuple(buffers)

    def buffer(self, ordinal: int) -> Tensor:
        """Where a bucket arrives."""
        return self.buffers[ordinal % len(self.buffers)][: self.buckets[ordinal].num_bytes]


class ReceivedFill(Fill):
    """The steps of a plan, bucket by bucket.

    Args:
        plan: What is read from where.
        slots: Of the inventory that was planned for.
        source: The policy; a fill serves it alone.
        device: Of slots and buffers.
        config: How to refit.

    Raises:
        TransportError: Something is not sent to this rank that it holds.
    """

    def __init__(
        self, plan: RefitPlan, slots: Sequence[Slot], source: ReceivedSource, device: torch.device, config: RefitConfig
    ) -> None:
        self._plan, self._source, self._config = plan, source, config
        self.is_first = True
        steps: dict[str, list[Step]] = {}
        for step in plan.steps:
            steps.setdefault(step.source, []).append(step)
        lacking = {step: prod(step.shape) for step in plan.steps}
        self._tables: list[WorkTable] = []
        self._names: list[list[str]] = []
        for ordinal, bucket in enumerate(source.buckets):
            tasks, names = [], []
            portions = bucket.portions(source.buffer(ordinal))
            placed = ((source.tensors[run.tensor], each) for run in bucket.runs for each in run.placements)
            for tensor, part, portion in (
                (tensor, part, portions[each.portion]) for tensor, each in placed for part in each.parts
            ):
                for step in steps.get(part.name, ()):
                    task = _cut(bind(step, slots[step.slot], part.view(portion), config), part)
                    if task is not None:
                        tasks.append(task)
                        names.append(_blamed(tensor, part))
                        lacking[step] -= task.target.numel()
            self._tables.append(compile_table(tasks, device))
            self._names.append(names)
        absent = sorted({step.source for step, count in lacking.items() if count})
        if absent:
            raise TransportError(
                f"this rank is not sent all that it holds of {absent[0]} and of {len(absent) - 1} other tensor(s): the engine "
                "is not what it was when it joined; refit again"
            )
        self._unread: list[tuple[WorkTable, list[str]]] = []
        """What was launched, and what each of its tasks reads: whether it was flagged was not asked yet."""
        self._num_filled = 0

    def renew(self, source: ReceivedSource, config: RefitConfig) -> bool:
        """Whether `source` lies in its buffers as the one before; then it is filled from next."""
        self.is_first = False
        return source is self._source and config == self._config

    @property
    @override
    def plan(self) -> RefitPlan:
        return self._plan

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Nothing has arrived yet. What an earlier refit flagged, and nobody asked for, is forgotten."""
        self.bad_sources()
        self._num_filled = 0
        if begun is not None:
            begun.record()

    def take(self, tensors: Iterable[Arriving] = (), *, drain: bool = False) -> None:
        """Write what the next bucket holds, which has arrived in its buffer, on the current stream: what comes after it there
        may overwrite the bucket. Nothing else is taken.
        """
        table = self._tables[self._num_filled]
        table.launch(check=self._config.validate_values != "off")
        self._unread.append((table, self._names[self._num_filled]))
        self._num_filled += 1

    @override
    def finish(self) -> None:
        if self._num_filled < len(self._tables):
            raise InvalidSourceError(["source: ended before everything came that was announced"])

    @override
    def look(self) -> list[str]:
        """The trainer looked."""
        return []

    def bad_sources(self) -> list[str]:
        """Wait for all that was written, and name the tensors that were flagged, as the trainer calls them: also those that
        overflow in this engine's dtype alone.
        """
        unread, self._unread = self._unread, []
        return sorted({names[index] for table, names in unread for index in table.bad_tasks()} - {""})

    @property
    def num_device_bytes(self) -> int:
        """Device memory held between refits: tables and buffers."""
        return sum(table.num_device_bytes for table in self._tables) + sum(
            buffer.nbytes for buffer in self._source.buffers
        )


def _blamed(tensor: WireTensor, part: Part) -> str:
    """The tensor to name if a part is flagged. Nothing for scales of the trainer's making: their codes are flagged too."""
    if tensor.block_size is not None and part.name != tensor.name:
        return ""
    return tensor.part_of or part.name


def _cut(task: Task, part: Part) -> Task | None:
    """What of a task can be done with a part of a bucket; None if nothing. The task's source is the part already."""
    if not part.shape or not task.target.ndim:
        return task
    cut = cut_to_run(task, part.start[0], part.shape[0])
    if cut is None or cut.select:
        return cut
    offset = tuple(own - first for own, first in zip(cut.offset[1:], part.start[1:], strict=True))
    ends = (own + count for own, count in zip(offset, cut.target.shape[1:], strict=True))
    is_there = all(own >= 0 for own in offset) and all(
        end <= size for end, size in zip(ends, part.shape[1:], strict=True)
    )
    return replace(cut, offset=(cut.offset[0], *offset)) if is_there else None
