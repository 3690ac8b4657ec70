"""Writes live slots from the buckets of a broadcast.

Buckets arrive in the same few buffers in every refit, so each bucket's table is compiled once and replayed unchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, TransportError
from fp8refit.fill.arrivals import by_source
from fp8refit.fill.fill import Arriving, Fill
from fp8refit.fill.plan import RefitPlan
from fp8refit.fill.program import Flags, Launched, Program
from fp8refit.fill.row_tasks import cut_to_run
from fp8refit.fill.tasks import bind
from fp8refit.kernels import Action, Task
from fp8refit.live.slots import Slot
from fp8refit.sources.source import PushedSource
from fp8refit.transport.collective.buckets import BucketLayout, Part, WireTensor


class ReceivedSource(PushedSource):
    """A policy that arrives in buckets. The trainer has already checked what it can.

    Args:
        tensors: All announced tensors.
        buckets: Layout of the buckets that this rank receives.
        buffers: uint8, on the engine's device; buckets arrive in them in turn.
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
        """The buffer in which a bucket arrives."""
        return self.buffers[ordinal % len(self.buffers)][: self.buckets[ordinal].num_bytes]


class ReceivedFill(Fill):
    """Carries out a plan bucket by bucket.

    Args:
        plan: The plan.
        slots: The slots of the planned inventory.
        source: The policy.
        device: Device of slots and buffers.
        config: Options of the refit.

    Raises:
        TransportError: This rank is not sent everything it holds.
    """

    plan: RefitPlan

    def __init__(
        self, plan: RefitPlan, slots: Sequence[Slot], source: ReceivedSource, device: torch.device, config: RefitConfig
    ) -> None:
        self.plan, self.is_first = plan, True
        self._source, self._config = source, config
        lacking = {step: prod(step.shape) for step in plan.steps}
        seconds = frozenset(plan.seconds)
        steps = by_source((*plan.steps, *plan.seconds))
        self._work: list[dict[Action, Program]] = []
        """The programs of each bucket. What came under another name is compared."""
        for ordinal, bucket in enumerate(source.buckets):
            tasks: dict[Action, list[tuple[str, Task]]] = {Action.WRITE: []}
            portions = bucket.portions(source.buffer(ordinal))
            placed = ((source.tensors[run.tensor], each) for run in bucket.runs for each in run.placements)
            for tensor, part, portion in (
                (tensor, part, portions[each.portion]) for tensor, each in placed for part in each.parts
            ):
                for step in steps.get(part.name, ()):
                    task = _cut(bind(step, slots[step.slot], part.view(portion), config, None), part)
                    if task is None:
                        continue
                    action = Action.COMPARE if step in seconds else Action.WRITE
                    tasks.setdefault(action, []).append((_blamed(tensor, part), task))
                    if action is Action.WRITE:
                        lacking[step] -= prod(task.shape)
            self._work.append({action: Program.compile(found, device) for action, found in tasks.items()})
        absent = sorted({step.source for step, count in lacking.items() if count})
        if absent:
            raise TransportError(
                f"the broadcast omits parts of {absent[0]} and of {len(absent) - 1} other tensor(s) that this rank holds: the "
                "engine has changed since it joined; refit again"
            )
        self._launched = Launched()
        self._num_filled = 0

    def renew(self, source: ReceivedSource, config: RefitConfig) -> bool:
        """Prepare for another refit; False if the source is not the one this was made for.

        `config` may differ in nothing that tables depend on.
        """
        self.is_first, self._config = False, config
        return source is self._source

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Start. Nothing has arrived yet."""
        self._launched.forget()
        self._num_filled = 0
        if begun is not None:
            begun.record()

    def take(self, tensors: Iterable[Arriving] = (), *, drain: bool = False) -> None:
        """Write the next bucket, which has arrived in its buffer. Later work on the current stream may overwrite it.

        Takes no tensors.
        """
        for action, program in self._work[self._num_filled].items():
            self._launched.add(program)
            program.table.launch(check=self._config.validate_values != "off", action=action)
        self._num_filled += 1

    @override
    def finish(self) -> None:
        if self._num_filled < len(self._work):
            raise InvalidSourceError(["source: ended before everything that was announced had arrived"])

    @override
    def read_flags(self) -> Flags:
        """Wait for everything, and return what was flagged by the trainer's names, including tensors that overflow only in
        this engine's dtype.
        """
        bad, differing = self._launched.read_flags()
        return Flags(bad - {""}, differing - {""})

    @property
    def num_device_bytes(self) -> int:
        """Device memory held between refits: tables and buffers."""
        return sum(program.table.num_device_bytes for work in self._work for program in work.values()) + sum(
            buffer.nbytes for buffer in self._source.buffers
        )


def _blamed(tensor: WireTensor, part: Part) -> str:
    """The tensor to blame if a part is flagged; empty for scales that the trainer computed, since their codes are
    flagged too.
    """
    if tensor.format is not None and part.name != tensor.name:
        return ""
    return tensor.part_of or part.name


def _cut(task: Task, part: Part) -> Task | None:
    """Cut a task to what a part of a bucket holds, which is the task's source; None if it holds nothing for the task."""
    if not part.shape or not task.target.ndim:
        return task
    cut = cut_to_run(task, part.start[0], part.shape[0])
    if cut is None or cut.select:
        return cut
    offset = tuple(own - first for own, first in zip(cut.offset[1:], part.start[1:], strict=True))
    ends = (own + count for own, count in zip(offset, cut.shape[1:], strict=True))
    is_there = all(own >= 0 for own in offset) and all(
        end <= size for end, size in zip(ends, part.shape[1:], strict=True)
    )
    return replace(cut, offset=(cut.offset[0], *offset)) if is_there else None
