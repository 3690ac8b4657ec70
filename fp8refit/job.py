"""What one prepared refit of one rank holds until it is written: source, plan, tables, staging, and what has arrived."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fp8refit.compare import Comparison
from fp8refit.config import RefitConfig
from fp8refit.direct import DirectFill
from fp8refit.errors import InvalidSourceError
from fp8refit.files import StoredTensor
from fp8refit.fill import ResidentFill, StreamFill
from fp8refit.pieces import InPieces, Piece
from fp8refit.plan import PlanBuilder, RefitPlan, Step, compile_plan
from fp8refit.received import ReceivedFill
from fp8refit.slots import Inventory, TensorMeta
from fp8refit.sources import MappingSource, SafetensorsSource, Source, check_readable

_SMALL_BYTES = 16 << 20
"""To copy so much takes a device about as long as a launch."""
_MOST_COPIED_BYTES = 64 << 20
Arriving: TypeAlias = tuple[str, Tensor] | tuple[str, StoredTensor] | Piece
"""A tensor, one in a file that is still to be read, or some rows of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What came in a stream, and what was done with it."""

    config: RefitConfig
    foreign: frozenset[str]
    metadata: Mapping[str, TensorMeta]
    plan: RefitPlan
    steps: Mapping[str, Sequence[Step]]


@dataclass(kw_only=True, slots=True)
class Job:
    """What one prepare hands to its write."""

    source: Source
    config: RefitConfig
    inventory: Inventory
    foreign: frozenset[str] = frozenset()
    """Names that other ranks hold and this one does not."""
    metadata: Mapping[str, TensorMeta] | None = None
    """What a stream was announced to hold."""
    plan: RefitPlan | None = None
    """None for a one-shot stream without manifest, which is planned while it arrives."""
    resident: ResidentFill | None = None
    received: ReceivedFill | None = None
    stream_steps: dict[str, list[Step]] | None = None
    stream: StreamFill | None = None
    direct: DirectFill | None = None
    """For tensors of a stream that are on the engine's device; None if they are staged too."""
    known: "Known | None" = None
    """What a stream of which nothing is known brought the last time."""
    is_first: bool = False
    comparison: Comparison | None = None
    """What compares with what is held; None if it is written."""

    @property
    def streams(self) -> bool:
        """Whether any tensor goes through staging."""
        return self.received is None and (self.resident is None or bool(self.stream_steps))

    @property
    def is_stable(self) -> bool:
        """Whether tensors keep their bytes until the refit is over."""
        return isinstance(self.source, MappingSource)

    def compile(self, metadata: Mapping[str, TensorMeta], problems: Sequence[str]) -> RefitPlan:
        """Plan what was announced.

        Raises:
            InvalidSourceError: It does not fit; names every problem, `problems` among them.
        """
        inventory = self.inventory
        return compile_plan(
            inventory.slots,
            metadata,
            aliases=inventory.aliases,
            unneeded=self.unneeded,
            stacked=inventory.stacked,
            problems=problems,
            keep=self.config.keep,
        )

    @property
    def unneeded(self) -> frozenset[str]:
        """Names that may come and that this rank has no slot for."""
        return self.foreign.union(self.inventory.unneeded)

    def staged_tensors(self) -> Iterable["Arriving"]:
        """The tensors that go through staging, from the source, or runs of their rows; a list if all of them are there."""
        if isinstance(self.source, InPieces):
            return self.source.pieces(self.config.bucket_bytes)
        if isinstance(self.source, MappingSource):
            tensors = self.source.tensors
            if self.comparison is not None:
                return list(tensors.items())
            return [(name, tensors[name]) for name in self.stream_steps or ()]
        if isinstance(self.source, SafetensorsSource):
            return iter(self.source.stored.items())
        return iter(self.source)


@dataclass(kw_only=True, slots=True)
class _CutTensor:
    """A tensor of which some rows came."""

    name: str
    full_shape: tuple[int, ...]
    steps: Sequence[Step]
    next_row: int = 0

    @property
    def num_rows(self) -> int:
        return self.full_shape[0] if self.full_shape else 0


class Arrivals:
    """Tensors that come one after another, each held against what was announced and staged for its slots."""

    def __init__(self, job: Job, stream: StreamFill) -> None:
        self._job = job
        self._stream = stream
        self._names: set[str] = set()
        self._cut: _CutTensor | None = None
        self._direct = job.direct
        self._waiting: list[tuple[str, Tensor, Sequence[Step]]] = []
        """What lies on the engine's device, and is filled from with the next launch."""
        self._waiting_bytes = 0
        self._known = job.known if job.stream_steps is None else None
        self._builder = self._make_builder() if job.stream_steps is None and self._known is None else None

    def take(self, tensors: Iterable[Arriving]) -> None:
        """Stage what comes, and fill from what is on the engine's device.

        Args:
            tensors: A list, all of which is there; or an iterator, which may overwrite each when it is asked for the next.

        Raises:
            InvalidSourceError: A tensor came twice, in part, without bytes, or otherwise than announced.
        """
        are_together = isinstance(tensors, list)
        if isinstance(tensors, list) and self._take_known(tensors):
            return
        for tensor in tensors:
            if isinstance(tensor, Piece) and not tensor.is_whole:
                self._take_rows(tensor)
                continue
            name, value = (tensor.name, tensor.tensor) if isinstance(tensor, Piece) else tensor
            direct = self._direct
            if direct is None or not isinstance(value, Tensor) or value.device != direct.device:
                self._take_whole(name, value)
            else:
                self._take_where_it_lies(name, value, is_lent=not are_together)
        self._fill_waiting()

    def _take_known(self, tensors: Sequence[Any]) -> bool:
        """Fill from tensors that came together in the last stream too; False, and nothing done, if they did not."""
        if self._direct is None or not all(type(each) is tuple for each in tensors):
            return False
        return self._fill_known([each[0] for each in tensors], [each[1] for each in tensors])

    def _fill_known(self, names: list[str], tensors: list[Tensor]) -> bool:
        assert self._direct is not None, "there"
        if self._builder is not None or self._cut is not None or not self._names.isdisjoint(names):
            return False
        if not self._direct.fill_known(names, tensors):
            return False
        self._names.update(names)
        return True

    def _take_where_it_lies(self, name: str, tensor: Tensor, *, is_lent: bool) -> None:
        """Fill from a tensor of the engine's device without staging it, with the next launch.

        One that is lent may be overwritten after this, and so is read by a launch of its own, unless to copy it is less.
        """
        self._check_is_complete()
        check_readable(name, tensor)
        tensor, steps = tensor.detach(), self._steps_of(name, TensorMeta.of(tensor))
        is_small = is_lent and tensor.nbytes <= _SMALL_BYTES
        self._waiting.append((name, tensor.clone() if is_small else tensor, steps))
        self._waiting_bytes += tensor.nbytes if is_small else 0
        if is_lent and (not is_small or self._waiting_bytes > _MOST_COPIED_BYTES):
            self._fill_waiting()

    def _fill_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        assert self._direct is not None, "they lie on the engine's device"
        names, tensors = [name for name, _, _ in waiting], [tensor for _, tensor, _ in waiting]
        if self._builder is None and self._direct.fill_known(names, tensors):
            return
        # Which of two names for one tensor counts is known when all came.
        aliases = self._job.inventory.aliases
        is_kept = self._builder is None or not any(name in aliases or name in aliases.values() for name in names)
        self._direct.fill(names, tensors, [steps for _, _, steps in waiting], is_kept=is_kept)

    def _take_whole(self, name: str, tensor: Tensor | StoredTensor) -> None:
        self._check_is_complete()
        if isinstance(tensor, StoredTensor):
            for step in self._steps_of(name, TensorMeta.of(tensor.meta)):
                self._stream.add(step, tensor.meta, is_stable=False, read_box=tensor.read_box)
            return
        check_readable(name, tensor)
        for step in self._steps_of(name, TensorMeta.of(tensor)):
            self._stream.add(step, tensor, is_stable=self._job.is_stable)

    def _take_rows(self, piece: Piece) -> None:
        """Stage rows as they come."""
        check_readable(piece.name, piece.tensor)
        cut = self._cut
        if cut is None or piece.name != cut.name:
            self._check_is_complete()
            steps = self._steps_of(piece.name, TensorMeta(shape=piece.full_shape, dtype=piece.tensor.dtype))
            cut = self._cut = _CutTensor(name=piece.name, full_shape=piece.full_shape, steps=steps)
        self._check_follows(piece, cut)
        for step in cut.steps:
            self._stream.add_rows(step, piece.tensor, piece.first_row)
        cut.next_row = piece.end_row
        if cut.next_row == cut.num_rows:
            self._cut = None

    @property
    def names(self) -> Iterable[str]:
        """What came, whole or in part."""
        return self._builder.seen if self._builder is not None else self._names

    def finish(self) -> None:
        """Hold that everything came.

        Raises:
            InvalidSourceError: Something announced did not come, or what came without announcement does not fit.
        """
        self._check_is_complete()
        if self._known is not None and len(self._names) < len(self._known.metadata):
            self._judge_anew()
        if self._builder is not None:
            plan = self._job.plan = self._builder.finish()
            self._job.known = Known(
                config=self._job.config,
                foreign=self._job.foreign,
                metadata=self._builder.seen,
                plan=plan,
                steps=by_source(plan.steps),
            )
            return
        if self._known is not None:
            self._job.plan = self._known.plan
            return
        absent = [name for name in self._job.stream_steps or () if name not in self._names]
        if absent:
            raise InvalidSourceError([f"{name}: was announced but did not come" for name in absent])

    def _check_is_complete(self) -> None:
        """Hold that the last tensor which came in runs of rows came whole.

        Raises:
            InvalidSourceError: It did not.
        """
        cut = self._cut
        if cut is not None:
            raise InvalidSourceError([f"{cut.name}: came up to row {cut.next_row} of {cut.num_rows}"])

    def _check_follows(self, piece: Piece, cut: _CutTensor) -> None:
        """Hold that rows are those after the last.

        Raises:
            InvalidSourceError: They are not.
        """
        came = f"{piece.name}: rows {piece.first_row} to {piece.end_row} of {list(piece.full_shape)} came"
        if (piece.first_row, piece.full_shape) != (cut.next_row, cut.full_shape) or piece.end_row > cut.num_rows:
            raise InvalidSourceError([f"{came} where row {cut.next_row} of {list(cut.full_shape)} belongs"])
        if tuple(piece.tensor.shape[1:]) != cut.full_shape[1:]:
            raise InvalidSourceError([f"{came} with the shape {list(piece.tensor.shape)}"])

    def _steps_of(self, name: str, meta: TensorMeta) -> Sequence[Step]:
        known = self._known
        if known is not None and (name in self._names or known.metadata.get(name) != meta):
            self._judge_anew()
        if self._builder is not None:
            return self._builder.add(name, meta)
        if known is not None:
            self._names.add(name)
            return known.steps.get(name, ())
        job = self._job
        assert job.stream_steps is not None, "announced"
        if name in self._names:
            raise InvalidSourceError([f"{name}: sent twice; send it once"])
        self._names.add(name)
        if job.metadata is not None and job.metadata.get(name) != meta:
            announced = job.metadata.get(name, "nothing of that name")
            raise InvalidSourceError([f"{name}: came as {meta}, announced was {announced}"])
        return job.stream_steps.get(name, ())

    def _judge_anew(self) -> None:
        """What comes is not what came the last time: plan it as what was never seen."""
        known, self._known = self._known, None
        assert known is not None, "nothing else is judged twice"
        self._builder, self._job.is_first = self._make_builder(), True
        if self._direct is not None:
            self._direct.forget()
        for name in self._names:
            self._builder.add(name, known.metadata[name])

    def _make_builder(self) -> PlanBuilder:
        job, inventory = self._job, self._job.inventory
        return PlanBuilder(
            inventory.slots,
            aliases=inventory.aliases,
            unneeded=job.unneeded,
            stacked=inventory.stacked,
            keep=job.config.keep,
        )


@dataclass(kw_only=True, slots=True)
class Write:
    """A write under way, between its first byte and the reading of the status word."""

    job: Job
    arrivals: Arrivals | None
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    start_s: float = field(default_factory=time.perf_counter)


def by_source(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """The steps of each source tensor."""
    grouped: dict[str, list[Step]] = {}
    for step in steps:
        grouped.setdefault(step.source, []).append(step)
    return grouped
