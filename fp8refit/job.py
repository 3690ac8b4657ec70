"""What one prepared refit of one rank holds until it is written: source, plan, tables, staging, and what has arrived."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.files import StoredTensor
from fp8refit.fill import ResidentFill, StreamFill
from fp8refit.pieces import InPieces, Piece
from fp8refit.plan import PlanBuilder, RefitPlan, Step, compile_plan
from fp8refit.received import ReceivedFill
from fp8refit.slots import Inventory, TensorMeta
from fp8refit.sources import MappingSource, SafetensorsSource, Source, check_readable

Arriving: TypeAlias = tuple[str, Tensor] | tuple[str, StoredTensor] | Piece
"""A tensor, one in a file that is still to be read, or some rows of one."""


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
    is_first: bool = False

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
        )

    @property
    def unneeded(self) -> frozenset[str]:
        """Names that may come and that this rank has no slot for."""
        return self.foreign.union(self.inventory.unneeded)

    def staged_tensors(self) -> Iterator["Arriving"]:
        """The tensors that go through staging, from the source, or runs of their rows."""
        if isinstance(self.source, InPieces):
            return self.source.pieces(self.config.bucket_bytes)
        if isinstance(self.source, MappingSource):
            tensors = self.source.tensors
            return ((name, tensors[name]) for name in self.stream_steps or ())
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
        inventory = job.inventory
        self._builder = (
            PlanBuilder(inventory.slots, aliases=inventory.aliases, unneeded=job.unneeded, stacked=inventory.stacked)
            if job.stream_steps is None
            else None
        )

    def take(self, tensors: Iterable[Arriving]) -> None:
        """Stage what comes.

        Raises:
            InvalidSourceError: A tensor came twice, in part, without bytes, or otherwise than announced.
        """
        for tensor in tensors:
            if not isinstance(tensor, Piece):
                self._take_whole(*tensor)
            elif tensor.is_whole:
                self._take_whole(tensor.name, tensor.tensor)
            else:
                self._take_rows(tensor)

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

    def finish(self) -> None:
        """Hold that everything came.

        Raises:
            InvalidSourceError: Something announced did not come, or what came without announcement does not fit.
        """
        self._check_is_complete()
        if self._builder is not None:
            self._job.plan = self._builder.finish()
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
        if self._builder is not None:
            return self._builder.add(name, meta)
        job = self._job
        assert job.stream_steps is not None, "announced"
        if name in self._names:
            raise InvalidSourceError([f"{name}: sent twice; send it once"])
        self._names.add(name)
        if job.metadata is not None and job.metadata.get(name) != meta:
            announced = job.metadata.get(name, "nothing of that name")
            raise InvalidSourceError([f"{name}: came as {meta}, announced was {announced}"])
        return job.stream_steps.get(name, ())


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
