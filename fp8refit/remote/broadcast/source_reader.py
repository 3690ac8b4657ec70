"""Reads a policy in the order in which it is broadcast. A stream is read once, with one piece in memory at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.live.slots import TensorMeta
from fp8refit.remote.broadcast.wire_formats import Wire
from fp8refit.sources.row_runs import in_pieces
from fp8refit.sources.source import MappingSource, Source
from fp8refit.transport.collective.buckets import Run

_PIECE_BYTES = 256 << 20
"""Size of the pieces in which a stream is read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrival:
    """Rows of one tensor of the source."""

    name: str
    first_row: int
    values: Tensor

    @property
    def end_row(self) -> int:
        """The row after its last one."""
        return self.first_row + (self.values.shape[0] if self.values.ndim else 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrived:
    """The part of a run that one arrival holds: rows `row` to `end` of the tensor as sent."""

    run: Run
    arrival: Arrival
    row: int
    end: int


class Reader:
    """Yields the rows of a source in the order of the buckets.

    Args:
        source: The announced source.
        wire: The form in which it is sent.
        device: The device on which its values are needed.
    """

    def __init__(self, source: Source, wire: Wire, device: torch.device) -> None:
        self._wire, self._device, self._source = wire, device, source
        self._arrivals = iter(()) if self.holds_all else self._stream(source)
        self._last: Arrival | None = None
        self._read = "", 0

    @property
    def holds_all(self) -> bool:
        """Whether every tensor is available at any time."""
        return isinstance(self._source, MappingSource)

    def held(self, name: str) -> Arrival:
        """One tensor of a source that `holds_all`. The last one is cached, since it may continue in the next bucket."""
        assert isinstance(self._source, MappingSource), "a stream is read in its order"
        if self._last is None or self._last.name != name:
            values = self._source.tensors[name].detach().to(self._device)
            self._last = Arrival(name=name, first_row=0, values=values)
        return self._last

    def batches(self, runs: Iterable[Run]) -> Iterator[Sequence[Arrived]]:
        """Yield all runs together if every tensor is available; otherwise the parts that each arrival holds.

        Raises:
            InvalidSourceError: The source is not as announced.
        """
        batch: list[Arrived] = []
        for run in runs:
            origin = self._wire.origins[run.tensor]
            row, end = run.first_row, run.first_row + run.num_rows
            while row < end:
                wanted = row if origin.expert is None else origin.expert
                if batch and not self.holds_all and not self._has(origin.name, wanted):
                    yield batch
                    batch = []
                arrival = self._arrival_with(origin.name, wanted)
                stop = end if origin.expert is not None else min(end, arrival.end_row)
                batch.append(Arrived(run=run, arrival=arrival, row=row, end=stop))
                row = stop
                del arrival
        if batch:
            yield batch

    def finish(self) -> None:
        """Read a stream to its end, which may be a collective operation of the trainer.

        Raises:
            InvalidSourceError: It yields more than was announced.
        """
        self._last = None
        for arrival in self._arrivals:
            self._check_is_unsent(arrival)
            self._read = arrival.name, arrival.end_row

    @cached_property
    def _announced(self) -> dict[str, TensorMeta]:
        """Every announced tensor."""
        return {origin.name: origin.meta for origin in self._wire.origins}

    @cached_property
    def _travelling(self) -> frozenset[str]:
        """Names of tensors that are sent, whole or in part."""
        pairs = zip(self._wire.origins, self._wire.tensors, strict=True)
        return frozenset(origin.name for origin, tensor in pairs if tensor.travels)

    def _has(self, name: str, row: int) -> bool:
        """Whether the last arrival has this row of a tensor; in a stack, an expert counts as a row."""
        return self._last is not None and self._last.name == name and self._last.end_row > row

    def _arrival_with(self, name: str, row: int) -> Arrival:
        if self.holds_all:
            return self.held(name)
        while not self._has(name, row):
            self._last = None
            arrival = next(self._arrivals, None)
            if arrival is None:
                raise InvalidSourceError([f"{name}: was announced but did not arrive"], written=True)
            if arrival.name != name:
                self._check_is_unsent(arrival, before=name)
            self._last, self._read = arrival, (arrival.name, arrival.end_row)
            del arrival
        assert self._last is not None, "has it"
        return self._last

    def _check_is_unsent(self, arrival: Arrival, *, before: str = "the end") -> None:
        """Check that nothing is skipped that must be sent. The rest of a tensor may be skipped, since no rank holds
        it.
        """
        is_rest = self._read == (arrival.name, arrival.first_row)
        if arrival.name in self._travelling and arrival.values.numel() and not is_rest:
            raise InvalidSourceError(
                [f"{arrival.name}: arrived where {before} was announced; a broadcast needs the announced order"],
                written=True,
            )

    def _stream(self, source: Source) -> Iterator[Arrival]:
        try:
            for piece in in_pieces(source, _PIECE_BYTES):
                announced = self._announced.get(piece.name)
                if announced is None:
                    raise InvalidSourceError([f"{piece.name}: arrived but was not announced"])
                came = TensorMeta(shape=piece.full_shape, dtype=piece.tensor.dtype)
                if came != announced:
                    raise InvalidSourceError([f"{piece.name}: arrived as {came}, but {announced} was announced"])
                yield Arrival(name=piece.name, first_row=piece.first_row, values=piece.tensor.detach().to(self._device))
                del piece
        except InvalidSourceError as error:
            raise InvalidSourceError(error.problems, written=True) from error
