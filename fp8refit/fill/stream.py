"""Fills from tensors that arrive one after another, pulled from a stream or pushed by its reader.

Each tensor is compared with the announcement. Tensors on the engine's device are read in place, others are staged.
After an unannounced stream, the next one is expected to be the same, and is planned again if it differs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.errors import InvalidSourceError
from fp8refit.fill.direct import DirectFill, Lying
from fp8refit.fill.fill import Arriving, Fill
from fp8refit.fill.kernels import Action
from fp8refit.fill.plan import PlanBuilder, RefitPlan, Step
from fp8refit.fill.staging import Staging
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.files import StoredTensor
from fp8refit.sources.row_runs import InPieces, Piece
from fp8refit.sources.source import MappingSource, PushedSource, SafetensorsSource, Source, check_readable
from fp8refit.sources.work_stream import WorkStream

_SMALL_BYTES = 16 << 20
"""Copying this much takes a device about as long as a launch."""
_MOST_COPIED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The expected tensors and their steps."""

    plan: RefitPlan
    steps: Mapping[str, Sequence[Step]]
    """Steps by source tensor."""
    metadata: Mapping[str, TensorMeta] | None = None
    """All expected tensors; None if they need no check."""


@dataclass(kw_only=True, slots=True)
class _CutTensor:
    """A tensor whose first rows have arrived."""

    name: str
    full_shape: tuple[int, ...]
    steps: Sequence[Step]
    next_row: int = 0

    @property
    def num_rows(self) -> int:
        return self.full_shape[0] if self.full_shape else 0


class StreamFill(Fill):
    """Carries out steps on tensors that arrive one after another.

    Args:
        source: The source of the tensors.
        expected: The expected tensors; None if unknown.
        is_announced: Whether anything unexpected is an error; otherwise it is planned on arrival.
        is_first: Whether `expected` was planned for this refit.
        make_builder: Starts a plan for unannounced tensors.
        make_staging: Makes the staging buckets, for what is to be done with values.
        action: Whether to write to the slots or to compare with them.
        aliases: Names that share another name's slot.
        direct: Fills from tensors on the engine's device; None to stage them too.
        learn: Called with what arrived, if that was not expected.
    """

    def __init__(
        self,
        source: Source,
        expected: Expected | None,
        *,
        is_announced: bool,
        is_first: bool,
        make_builder: Callable[[], PlanBuilder],
        make_staging: Callable[[Action], Staging],
        action: Action = Action.WRITE,
        aliases: Mapping[str, str],
        direct: DirectFill | None = None,
        learn: Callable[["Expected"], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._expected = expected
        self._is_announced = is_announced
        self._plan = expected.plan if expected is not None and is_announced else None
        self._make_builder = make_builder
        self._make_staging = make_staging
        self._staging = make_staging(action)
        self._work = WorkStream(self._staging.device)
        self._aliases = aliases
        self._direct = direct
        self._learn = learn
        self.is_first = is_first
        self._names: set[str] = set()
        self._cut: _CutTensor | None = None
        self._waiting: list[Lying] = []
        """Tensors on the engine's device that the next launch reads."""
        self._waiting_bytes = 0
        self._builder = make_builder() if expected is None else None

    @property
    @override
    def plan(self) -> RefitPlan | None:
        return self._plan

    @property
    @override
    def num_device_bytes(self) -> int:
        """Device memory of buckets and of tables kept between streams, in bytes."""
        return self._staging.num_device_bytes + (self._direct.num_device_bytes if self._direct is not None else 0)

    @property
    @override
    def came(self) -> Iterable[str]:
        return self._builder.seen if self._builder is not None else self._names

    @override
    def look(self) -> list[str]:
        scout = StreamFill(
            self._source,
            self._expected,
            is_announced=self._is_announced,
            is_first=False,
            make_builder=self._make_builder,
            make_staging=lambda _: self._make_staging(Action.CHECK),
            aliases=self._aliases,
        )
        scout.read(drain=False)
        scout.finish()
        return scout.bad_sources()

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Start; nothing has arrived yet."""
        if self._direct is not None:
            self._direct.begin(self._expected.plan if self._expected is not None else None)
        if begun is not None:
            begun.record()

    @override
    def read(self, *, drain: bool) -> None:
        self._take_all(self._tensors(), drain=drain)

    @override
    def take(self, tensors: Iterable[Arriving], *, drain: bool = False) -> None:
        self._take_all(tensors, drain=drain)

    @override
    def finish(self) -> None:
        self._check_is_complete()
        expected = self._expected
        if expected is not None and not self._is_announced and len(self._names) < len(expected.metadata or ()):
            self._judge_anew()
        if self._builder is not None:
            plan = self._builder.finish()
            expected = Expected(plan=plan, steps=by_source(plan.steps), metadata=self._builder.seen)
            self._learn(expected)
        assert expected is not None, "otherwise it was planned on arrival"
        absent = [name for name in expected.steps if self._is_announced and name not in self._names]
        if absent:
            raise InvalidSourceError([f"{name}: was announced but did not arrive" for name in absent])
        self._plan = expected.plan
        if self._direct is not None:
            self._direct.end(expected.plan)
        self.flush()

    @override
    def flush(self) -> None:
        with self._work.joined():
            self._staging.flush()

    @override
    def release(self) -> None:
        self._waiting.clear()
        self._staging.release()

    @override
    def bad_sources(self) -> list[str]:
        return self._staging.bad_sources() + (self._direct.bad_sources() if self._direct is not None else [])

    @property
    @override
    def differing(self) -> set[str]:
        return self._staging.differing | (self._direct.differing if self._direct is not None else set())

    def _tensors(self) -> Iterable[Arriving]:
        """Read the source, whole tensors or runs of rows; a list if all tensors stay valid."""
        source = self._source
        if isinstance(source, InPieces):
            return source.pieces(self._staging.bucket_bytes)
        if isinstance(source, MappingSource):
            tensors, steps = source.tensors, self._expected.steps if self._expected is not None else {}
            return list(tensors.items()) if self._direct is not None else [(name, tensors[name]) for name in steps]
        if isinstance(source, SafetensorsSource):
            return iter(source.stored.items())
        return () if isinstance(source, PushedSource) else iter(source)

    def _take_all(self, tensors: Iterable[Arriving], *, drain: bool) -> None:
        try:
            self._take(tensors)
        except Exception:
            if drain and isinstance(tensors, Iterator):
                for _ in tensors:
                    pass
            raise

    def _take(self, tensors: Iterable[Arriving]) -> None:
        if isinstance(tensors, list):
            with self._work.joined():
                if not self._take_group(tensors):
                    for tensor in tensors:
                        self._take_one(tensor, is_lent=len(tensors) == 1)
                    self._fill_waiting(are_together=True)
            return
        for tensor in tensors:
            with self._work.joined():
                self._take_one(tensor, is_lent=True)
        with self._work.joined():
            self._fill_waiting()

    def _take_one(self, tensor: Arriving, *, is_lent: bool) -> None:
        if type(tensor) is tuple and self._take_known(*tensor, is_lent=is_lent):
            return
        if isinstance(tensor, Piece) and not tensor.is_whole:
            self._take_rows(tensor, is_lent=is_lent)
            return
        name, value = (tensor.name, tensor.tensor) if isinstance(tensor, Piece) else tensor
        direct = self._direct
        if direct is None or not isinstance(value, Tensor) or value.device != direct.device:
            self._take_whole(name, value)
        else:
            self._take_where_it_lies(name, value, is_lent=is_lent)

    def _take_group(self, tensors: Sequence[Any]) -> bool:
        """Fill from tensors that have arrived together before; otherwise return False."""
        direct = self._direct
        if direct is None or len(tensors) < 2 or not all(type(each) is tuple for each in tensors):
            return False
        names = [each[0] for each in tensors]
        if self._builder is not None or self._cut is not None or not self._names.isdisjoint(names):
            return False
        if not direct.fill_group(names, [each[1] for each in tensors]):
            return False
        self._names.update(names)
        return True

    def _take_known(self, name: str, tensor: Any, *, is_lent: bool) -> bool:
        """Take a tensor that earlier streams brought too; returns False if it has to be looked at."""
        direct = self._direct
        if direct is None or self._builder is not None or self._cut is not None or name in self._names:
            return False
        place = direct.place_of(name, tensor)
        if place is None:
            return False
        self._names.add(name)
        if is_lent:
            direct.fill_one(place, tensor)
        else:
            self._waiting.append(Lying(name=name, tensor=tensor, place=place))
        return True

    def _take_where_it_lies(self, name: str, tensor: Tensor, *, is_lent: bool) -> None:
        """Fill from a tensor on the engine's device without staging it, with the next launch.

        A lent tensor may be overwritten when this returns, so it gets its own launch, or is copied if it is small: a table
        for many costs the host less than many tables.
        """
        self._check_is_complete()
        check_readable(name, tensor)
        steps = self._steps_of(name, TensorMeta.of(tensor))
        self._let_wait(Lying(name=name, tensor=tensor.detach(), steps=steps, is_kept=self._is_settled(name)), is_lent)

    def _place_of(self, key: str, tensor: Any) -> int | None:
        """The place of what arrives in the table of earlier streams; None if it is not there or has to be planned."""
        return self._direct.place_of(key, tensor) if self._direct is not None and self._builder is None else None

    def _is_settled(self, name: str) -> bool:
        """Whether the steps of a tensor are known. Only once all have arrived is it known which of two names for one
        tensor counts.
        """
        return self._builder is None or not (name in self._aliases or name in self._aliases.values())

    def _let_wait(self, lying: Lying, is_lent: bool) -> None:
        """Queue a tensor for the next launch; see `_take_where_it_lies`."""
        num_bytes = lying.tensor.nbytes
        is_small = is_lent and num_bytes <= _SMALL_BYTES
        if is_small:
            lying.tensor = lying.tensor.detach().clone()
            self._waiting_bytes += num_bytes
        self._waiting.append(lying)
        if is_lent and (not is_small or self._waiting_bytes > _MOST_COPIED_BYTES):
            self._fill_waiting()

    def _fill_waiting(self, *, are_together: bool = False) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if waiting:
            assert self._direct is not None, "they are on the engine's device"
            self._direct.fill(waiting, are_together=are_together)

    def _take_whole(self, name: str, tensor: Tensor | StoredTensor) -> None:
        self._check_is_complete()
        if isinstance(tensor, StoredTensor):
            for step in self._steps_of(name, TensorMeta.of(tensor.meta)):
                self._staging.add(step, tensor.meta, is_stable=False, read_box=tensor.read_box)
            return
        check_readable(name, tensor)
        for step in self._steps_of(name, TensorMeta.of(tensor)):
            self._staging.add(step, tensor, is_stable=isinstance(self._source, MappingSource))

    def _take_rows(self, piece: Piece, *, is_lent: bool) -> None:
        """Fill from rows as they arrive: in place, if they are on the engine's device."""
        check_readable(piece.name, piece.tensor)
        cut = self._cut
        if cut is None or piece.name != cut.name:
            self._check_is_complete()
            steps = self._steps_of(piece.name, TensorMeta(shape=piece.full_shape, dtype=piece.tensor.dtype))
            cut = self._cut = _CutTensor(name=piece.name, full_shape=piece.full_shape, steps=steps)
        self._check_follows(piece, cut)
        is_there = self._direct is not None and piece.tensor.device == self._direct.device
        for step in cut.steps:
            if is_there:
                for first_row, run in self._staging.runs_of(step, piece.tensor.detach(), piece.first_row):
                    is_kept = self._is_settled(piece.name)
                    lying = Lying(name=piece.name, tensor=run, steps=(step,), first_row=first_row, is_kept=is_kept)
                    lying.place = self._place_of(lying.key, run)
                    self._let_wait(lying, is_lent)
            else:
                self._staging.add_rows(step, piece.tensor, piece.first_row)
        cut.next_row = piece.end_row
        if cut.next_row == cut.num_rows:
            self._cut = None

    def _check_is_complete(self) -> None:
        """Check that the last tensor that arrived in runs of rows is complete.

        Raises:
            InvalidSourceError: It is not.
        """
        cut = self._cut
        if cut is not None:
            raise InvalidSourceError([f"{cut.name}: came up to row {cut.next_row} of {cut.num_rows}"])

    def _check_follows(self, piece: Piece, cut: _CutTensor) -> None:
        """Check that rows follow the last ones.

        Raises:
            InvalidSourceError: They do not.
        """
        came = f"{piece.name}: rows {piece.first_row} to {piece.end_row} of {list(piece.full_shape)} came"
        if (piece.first_row, piece.full_shape) != (cut.next_row, cut.full_shape) or piece.end_row > cut.num_rows:
            raise InvalidSourceError([f"{came} where row {cut.next_row} of {list(cut.full_shape)} belongs"])
        if tuple(piece.tensor.shape[1:]) != cut.full_shape[1:]:
            raise InvalidSourceError([f"{came} with the shape {list(piece.tensor.shape)}"])

    def _steps_of(self, name: str, meta: TensorMeta) -> Sequence[Step]:
        expected = self._expected
        if expected is not None:
            metadata = expected.metadata
            is_other = metadata is not None and metadata.get(name) != meta
            if self._is_announced:
                self._check_was_announced(name, meta, expected)
            elif is_other or name in self._names:
                self._judge_anew()
        if self._builder is not None:
            return self._builder.add(name, meta)
        assert expected is not None, "otherwise it is planned on arrival"
        self._names.add(name)
        return expected.steps.get(name, ())

    def _check_was_announced(self, name: str, meta: TensorMeta, expected: Expected) -> None:
        """Check that a tensor arrives only once, and as announced.

        Raises:
            InvalidSourceError: It does not.
        """
        if name in self._names:
            raise InvalidSourceError([f"{name}: sent twice; send it once"])
        if expected.metadata is not None and expected.metadata.get(name) != meta:
            announced = expected.metadata.get(name, "nothing of that name")
            raise InvalidSourceError([f"{name}: arrived as {meta}, but {announced} was announced"])

    def _judge_anew(self) -> None:
        """Plan the stream again: it is not like the last one."""
        expected, self._expected = self._expected, None
        assert expected is not None and expected.metadata is not None, "nothing else is judged twice"
        self._builder, self.is_first = self._make_builder(), True
        if self._direct is not None:
            self._fill_waiting()
            self._direct.forget()
        for name in self._names:
            self._builder.add(name, expected.metadata[name])


def by_source(steps: Iterable[Step]) -> dict[str, list[Step]]:
    """The steps of each source tensor."""
    grouped: dict[str, list[Step]] = {}
    for step in steps:
        grouped.setdefault(step.source, []).append(step)
    return grouped
