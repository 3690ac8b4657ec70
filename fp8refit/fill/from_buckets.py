"""Writes live slots from the buckets of a broadcast.

Buckets arrive in the same few buffers in every refit, so each bucket's table is compiled once and replayed unchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, StagingMemoryError, TransportError
from fp8refit.fill.arrivals import by_source
from fp8refit.fill.fill import Arriving, Fill
from fp8refit.fill.plan import RefitPlan, Step
from fp8refit.fill.program import Flags, Launched, Program
from fp8refit.fill.row_tasks import cut_to_run
from fp8refit.fill.scratch import place_spans
from fp8refit.fill.tasks import Maxima, bind
from fp8refit.fill.together import Together, share_scales
from fp8refit.kernels import Action, Task
from fp8refit.live.slots import Op, Slot, TensorMeta
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
        maxima: Those that slots share.

    Raises:
        TransportError: This rank is not sent everything it holds.
    """

    plan: RefitPlan

    def __init__(
        self,
        plan: RefitPlan,
        slots: Sequence[Slot],
        source: ReceivedSource,
        device: torch.device,
        config: RefitConfig,
        maxima: Maxima,
    ) -> None:
        self.plan, self.is_first = plan, True
        self._source, self._config, self._maxima = source, config, maxima
        lacking = {step: prod(step.shape) for step in plan.steps}
        seconds = frozenset(plan.seconds)
        steps = by_source((*plan.steps, *plan.seconds))
        kept = _Kept(source, {name: found for name, found in steps.items() if share_scales(found)}, slots, device)
        self._kept = kept
        self._work: list[list[tuple[Action, Program]]] = []
        """The programs of each bucket, in order. What came under another name is compared; what is written to slots is counted,
        if that is asked.
        """
        for ordinal, bucket in enumerate(source.buckets):
            # In the order in which they run: what is compared is what the bucket itself may have brought.
            tasks: dict[Action, list[tuple[str, Task]]] = {Action.WRITE: [], Action.COUNT: [], Action.COMPARE: []}
            portions = bucket.portions(source.buffer(ordinal))
            placed = ((source.tensors[run.tensor], each) for run in bucket.runs for each in run.placements)
            for tensor, part, portion in (
                (tensor, part, portions[each.portion]) for tensor, each in placed for part in each.parts
            ):
                view = part.view(portion)
                if part.name in kept.tensors:
                    tasks[Action.WRITE].append((_blamed(tensor, part), kept.copy(part, view)))
                elif part.name in kept.spans:
                    kept.tensors_here[part.name] = view
                for step in () if part.name in kept.names else steps.get(part.name, ()):
                    task = _cut(bind(step, slots[step.slot], view, config), part)
                    if task is None:
                        continue
                    action = Action.COMPARE if step in seconds else Action.COUNT
                    tasks[action].append((_blamed(tensor, part), task))
                    if action.writes:
                        lacking[step] -= prod(task.shape)
            work = [(action, Program.compile(found, device)) for action, found in tasks.items() if found]
            if ready := kept.ready(ordinal):
                whole: list[tuple[str, Task]] = []
                for name in ready:
                    for step in steps[name]:
                        task = bind(step, slots[step.slot], kept.tensor(name), config, maxima)
                        whole.append((kept.blamed[name], task))
                        lacking[step] -= prod(step.shape)
                work.append((Action.COUNT, Program.compile(whole, device)))
            self._work.append(work)
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
    def compile(self) -> None:
        for planned, program in chain.from_iterable(self._work):
            check, action = self._done_as(planned)
            program.table.compile(check=check, action=action)

    def _done_as(self, planned: Action) -> tuple[bool, Action]:
        """Whether values are checked, and what is done: changes are counted only if that is asked."""
        is_counted = planned is not Action.COUNT or self._config.count_changes
        return self._config.validate_values != "off", planned if is_counted else Action.WRITE

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Start. Nothing has arrived yet."""
        self._launched.forget()
        self._maxima.clear()
        self._num_filled = 0
        if begun is not None:
            begun.record()

    def take(self, tensors: Iterable[Arriving] = (), *, drain: bool = False) -> None:
        """Write the next bucket, which has arrived in its buffer. Later work on the current stream may overwrite it.

        Takes no tensors.
        """
        for planned, program in self._work[self._num_filled]:
            self._launched.add(program)
            check, action = self._done_as(planned)
            program.table.launch(check=check, action=action)
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
        bad, differing, changed = self._launched.read_flags()
        return Flags(bad - {""}, differing - {""}, changed)

    @property
    def num_device_bytes(self) -> int:
        """Device memory held between refits: tables and buffers."""
        tables = sum(program.table.num_device_bytes for work in self._work for _, program in work)
        return tables + sum(buffer.nbytes for buffer in self._source.buffers) + self._kept.num_bytes


class _Kept:
    """Tensors whose slots may share scales, from the bucket in which each begins to the one with the last of those that share.

    One that is whole in the only bucket for which it is kept is read there.

    Args:
        source: The policy.
        steps: The steps of these tensors.
        slots: The slots of the planned inventory.
        device: Device of slots and buffers.
    """

    def __init__(
        self, source: ReceivedSource, steps: Mapping[str, Sequence[Step]], slots: Sequence[Slot], device: torch.device
    ) -> None:
        self.names = steps.keys()
        together, firsts, rows = Together[str](slots), dict[str, int](), dict[str, int]()
        self._ready: dict[int, list[str]] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.blamed: dict[str, str] = {}
        """The tensor to blame if one is flagged."""
        metas, in_parts = dict[str, TensorMeta](), set[str]()
        for ordinal, bucket in enumerate(source.buckets):
            placed = ((source.tensors[run.tensor], each) for run in bucket.runs for each in run.placements)
            for tensor, part in (
                (tensor, part) for tensor, each in placed for part in each.parts if part.name in steps
            ):
                firsts.setdefault(part.name, ordinal)
                self.blamed[part.name], metas[part.name] = _blamed(tensor, part), tensor.metas[part.name]
                rows[part.name] = rows.get(part.name, 0) + part.shape[0]
                in_parts |= {part.name} if part.shape != metas[part.name].shape else set()
                if rows[part.name] == metas[part.name].shape[0]:
                    self._ready.setdefault(ordinal, []).extend(together.add(part.name, steps[part.name]))
        for ordinal, names in self._ready.items():
            self.spans |= {name: (firsts[name], ordinal) for name in names}
        longer = {name: span for name, span in self.spans.items() if span[0] < span[1] or name in in_parts}
        starts, self.num_bytes = place_spans(longer, {name: metas[name].num_bytes for name in longer})
        try:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise StagingMemoryError(
                f"no room for {self.num_bytes >> 20} MiB on {device}, in which tensors wait for those with which they share a "
                "scale; leave the engine less memory. Nothing was written"
            ) from error
        self.tensors = {
            name: memory[start : start + metas[name].num_bytes].view(metas[name].dtype).view(metas[name].shape)
            for name, start in starts.items()
        }
        self.tensors_here: dict[str, Tensor] = {}
        """Those that are whole in their bucket."""

    def ready(self, ordinal: int) -> list[str]:
        """The tensors of which nothing is lacking any more with a bucket."""
        return self._ready.get(ordinal, [])

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.tensors[name] if name in self.tensors else self.tensors_here[name]

    def copy(self, part: Part, view: Tensor) -> Task:
        """Keep a part of a tensor."""
        target = self.tensors[part.name].narrow(0, part.start[0], part.shape[0])
        return Task(op=Op.COPY, source=view, offset=(0,) * view.ndim, target=target)


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
