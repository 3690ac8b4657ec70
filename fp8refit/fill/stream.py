"""Fills from tensors that arrive one after another, pulled from a stream or pushed by its reader.

Tensors on the engine's device are read in place, others are staged. After an unannounced stream, the next one is expected
to be the same, and is planned again if it differs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.fill.arrivals import Arrivals, CutTensor, Expected
from fp8refit.fill.direct import DirectFill, Lying
from fp8refit.fill.fill import Arriving, Fill
from fp8refit.fill.plan import RefitPlan
from fp8refit.fill.staging import Staging
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.files import StoredTensor
from fp8refit.sources.pairs import check_readable
from fp8refit.sources.row_runs import InGroups, InPieces, NamedRun, Piece
from fp8refit.sources.source import MappingSource, PushedSource, Source
from fp8refit.sources.work_stream import WorkStream

_SMALL_BYTES = 16 << 20
"""Copying this much takes a device about as long as a launch."""
_MOST_COPIED_BYTES = 64 << 20


class StreamFill(Fill):
    """Carries out steps on tensors that arrive one after another.

    Args:
        source: The source of the tensors.
        arrivals: Judges what arrives.
        staging: Buckets for tensors that are elsewhere.
        direct: Fills from tensors on the engine's device; None to stage them too.
        make_scout: Makes a fill of the same source that only checks values.
        is_first: Whether the expected tensors were planned for this refit.
        learn: Called with what arrived, if that was not expected.
    """

    def __init__(
        self,
        source: Source,
        arrivals: Arrivals,
        staging: Staging,
        *,
        direct: DirectFill | None = None,
        make_scout: Callable[[], "StreamFill"],
        is_first: bool,
        learn: Callable[[Expected], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._arrivals = arrivals
        self._staging = staging
        self._work = WorkStream(staging.device)
        self._direct = direct
        self._make_scout = make_scout
        self._learn = learn
        self._plan = arrivals.plan
        self.is_first = is_first
        self._cut: CutTensor | None = None
        self._waiting: list[Lying] = []
        """Tensors on the engine's device that the next launch reads."""
        self._waiting_bytes = 0
        arrivals.on_surprise = self._begin_anew

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
        return self._arrivals.came

    @override
    def look(self) -> list[str]:
        scout = self._make_scout()
        scout.read(drain=False)
        scout.finish()
        return scout.bad_sources()

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        """Start; nothing has arrived yet."""
        expected = self._arrivals.expected
        if self._direct is not None:
            self._direct.begin(expected.plan if expected is not None else None)
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
        came, is_new = self._arrivals.finish()
        if is_new:
            self._learn(came)
        self._plan = came.plan
        if self._direct is not None:
            self._direct.end(came.plan)
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

    def _tensors(self) -> Iterable[Arriving | list[NamedRun]]:
        """Read the source, whole tensors, runs of rows, or groups of both; a list if all tensors stay valid."""
        source = self._source
        if isinstance(source, InGroups):
            return source.groups(self._staging.bucket_bytes)
        if isinstance(source, InPieces):
            return source.pieces(self._staging.bucket_bytes)
        if isinstance(source, MappingSource):
            tensors, expected = source.tensors, self._arrivals.expected
            if self._direct is not None or expected is None:
                return list(tensors.items())
            return [(name, tensors[name]) for name in expected.steps]
        if isinstance(source, SafetensorsSource):
            return iter(source.stored.items())
        return () if isinstance(source, PushedSource) else iter(source)

    def _take_all(self, tensors: Iterable[Arriving | list[NamedRun]], *, drain: bool) -> None:
        try:
            self._take(tensors)
        except Exception:
            if drain and isinstance(tensors, Iterator):
                for _ in tensors:
                    pass
            raise

    def _take(self, tensors: Iterable[Arriving | list[NamedRun]]) -> None:
        if isinstance(tensors, list):
            with self._work.joined():
                self._take_together(tensors)
            return
        for each in tensors:
            with self._work.joined():
                if isinstance(each, list):
                    self._take_together(each)
                else:
                    self._take_one(each, is_lent=True)
        with self._work.joined():
            self._fill_waiting()

    def _take_together(self, tensors: Sequence[Any]) -> None:
        if not self._take_group(tensors):
            for tensor in tensors:
                self._take_one(tensor, is_lent=len(tensors) == 1)
            self._fill_waiting(are_together=True)

    def _take_one(self, tensor: Arriving, *, is_lent: bool) -> None:
        if isinstance(tensor, Piece) and not tensor.is_whole:
            self._take_rows(tensor, is_lent=is_lent)
            return
        name, value = (tensor.name, tensor.tensor) if isinstance(tensor, Piece) else tensor
        if self._take_known(name, value, is_lent=is_lent):
            return
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
        if self._cut is not None or not self._arrivals.are_new(names):
            return False
        if not direct.fill_group(names, [each[1] for each in tensors]):
            return False
        self._arrivals.note(names)
        return True

    def _take_known(self, name: str, tensor: Any, *, is_lent: bool) -> bool:
        """Take a tensor that earlier streams brought too; returns False if it has to be looked at."""
        direct = self._direct
        if direct is None or self._cut is not None:
            return False
        place = direct.place_of(name, tensor)
        if place is None or not self._arrivals.note_new(name):
            return False
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
        steps = self._arrivals.steps_of(name, TensorMeta.of(tensor))
        is_kept = self._arrivals.is_settled(name)
        self._let_wait(Lying(name=name, tensor=tensor.detach(), steps=steps, is_kept=is_kept), is_lent)

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
            for step in self._arrivals.steps_of(name, TensorMeta.of(tensor.meta)):
                self._staging.add(step, tensor.meta, is_stable=False, read_box=tensor.read_box)
            return
        check_readable(name, tensor)
        for step in self._arrivals.steps_of(name, TensorMeta.of(tensor)):
            self._staging.add(step, tensor, is_stable=isinstance(self._source, MappingSource))

    def _take_rows(self, piece: Piece, *, is_lent: bool) -> None:
        """Fill from rows as they arrive: in place, if they are on the engine's device."""
        check_readable(piece.name, piece.tensor)
        cut = self._cut
        if cut is None or piece.name != cut.name:
            self._check_is_complete()
            meta = TensorMeta(shape=piece.full_shape, dtype=piece.tensor.dtype)
            steps = self._arrivals.steps_of(piece.name, meta)
            cut = self._cut = CutTensor(name=piece.name, full_shape=piece.full_shape, steps=steps)
        cut.check_follows(piece)
        is_there = self._direct is not None and piece.tensor.device == self._direct.device
        for step in cut.steps:
            if is_there:
                for first_row, run in self._staging.runs_of(step, piece.tensor.detach(), piece.first_row):
                    lying = Lying(name=piece.name, tensor=run, steps=(step,), first_row=first_row)
                    self._let_wait(self._recognized(lying), is_lent)
            else:
                self._staging.add_rows(step, piece.tensor, piece.first_row)
        cut.next_row = piece.end_row
        if cut.is_complete:
            self._cut = None

    def _recognized(self, lying: Lying) -> Lying:
        """A run of rows, with its place in the table of earlier streams, if it has one."""
        lying.is_kept = self._arrivals.is_settled(lying.name)
        if self._direct is not None and self._arrivals.are_known:
            lying.place = self._direct.place_of(lying.key, lying.tensor)
        return lying

    def _check_is_complete(self) -> None:
        """Check that the last tensor that arrived in runs of rows is complete.

        Raises:
            InvalidSourceError: It is not.
        """
        if self._cut is not None:
            self._cut.check_is_complete()

    def _begin_anew(self) -> None:
        """The stream is not like the last one: nothing is recognized from here on."""
        self.is_first = True
        if self._direct is not None:
            self._fill_waiting()
            self._direct.forget()
