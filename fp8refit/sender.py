"""The trainer's side of a broadcast: packs a policy into buckets, quantizing on the way, and sends them in a thread of its own.

Two buffers: one is packed while the other travels. A bucket's tables are compiled once and pointed at the trainer's tensors in
every later refit. Peak memory beyond the trainer's own: the two buffers, and what of the source is on another device.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fp8refit.caught import Caught
from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError, RefitError, StagingMemoryError
from fp8refit.fill import scale_problem
from fp8refit.kernels import Task, WorkTable, compile_table
from fp8refit.kernels.table import SourceLayout, source_layout
from fp8refit.slots import FP8_DTYPE, SCALE_SUFFIX, Op, ScaleFormat, dtype_name
from fp8refit.sources import MappingSource, Source
from fp8refit.transport.buckets import Placement, WireTensor, lay_out
from fp8refit.transport.collective import Communicator, Transfer
from fp8refit.transport.header import Status, write_header
from fp8refit.vote import ErrorRecord

_PIECE_BYTES = 256 << 20
"""In how large pieces a source is read that comes in pieces."""
NUM_VOTES = 3
"""For how many votes of the engines the trainer waits at the end: on what is written, and on KV scales."""


class Rows(Protocol):
    """Some rows of a tensor, or all of them."""

    name: str
    first_row: int
    tensor: Tensor


@runtime_checkable
class InPieces(Protocol):
    """A source that gives large tensors in runs of rows, in the order of its names; see `fp8refit.gather.Gathered`."""

    def pieces(self, max_bytes: int) -> Iterable[Rows]:
        """Everything once, in pieces that begin at multiples of 128 rows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrival:
    """Rows of one tensor of the source."""

    tensor: int
    """Index of the `WireTensor`."""
    first_row: int
    values: Tensor

    @property
    def end_row(self) -> int:
        """The first row that it does not have."""
        return self.first_row + (self.values.shape[0] if self.values.ndim else 1)


@dataclass(kw_only=True, slots=True, eq=False)
class _Table:
    """A table, and what tensors it can be pointed at."""

    table: WorkTable
    layouts: list[SourceLayout]
    names: list[str]


class Sender:
    """Sends policies of one shape.

    Args:
        tensors: What was announced, in the form in which it travels.
        config: How to refit.
        device: Of the buffers, and of what is quantized.

    Raises:
        StagingMemoryError: No room for two buffers.
    """

    def __init__(self, tensors: Sequence[WireTensor], config: RefitConfig, device: torch.device) -> None:
        self._tensors = tuple(tensors)
        self._index_of = {tensor.name: index for index, tensor in enumerate(tensors)}
        self._config, self.device = config, device
        self._buckets = lay_out(tensors, config.bucket_bytes)
        self._tables: dict[tuple[int, int], _Table] = {}
        self.was_told = False
        """Whether the ranks know how the last send ended, or will."""
        num_bytes = max((bucket.num_bytes for bucket in self._buckets), default=0)
        try:
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        except torch.OutOfMemoryError as error:
            raise StagingMemoryError(
                f"no room for two buffers of {num_bytes >> 20} MiB on the trainer's {device}; lower bucket_bytes. Nothing was "
                "written"
            ) from error

    @property
    def num_buckets(self) -> int:
        """In which they travel."""
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """That travel, once to all."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def send(self, source: Source, communicator: Communicator, refit: str) -> None:
        """Send everything, and wait until every rank of every engine has it and says so.

        Args:
            source: What was announced. A stream is read once, in the order in which it was announced, to its end.
            communicator: To send in; this is its rank 0.
            refit: Names this refit.

        Raises:
            InvalidSourceError: The source is not what was announced.
            NonFiniteError: NaN or Inf.
            TransportError: A rank is gone, or does not answer.
            RefitError: What a rank failed with.
            BaseException: What reading the source raised. The ranks were told.
        """
        self.was_told = False
        timeout_s = self._config.timeout_s
        reader = _Reader(source, self._index_of, self._tensors, self.device)
        travelling: list[Transfer | None] = [None, None]
        bad: set[str] = set()
        error: BaseException | None = None
        for ordinal, bucket in enumerate(self._buckets):
            buffer, previous = self._buffers[ordinal % 2][: bucket.num_bytes], travelling[ordinal % 2]
            if previous is not None:
                communicator.wait(previous, timeout_s=timeout_s)
            with Caught() as failed:
                bad |= self._pack(ordinal, buffer, reader)
            error, failed.error = failed.error, None
            if error is not None:
                communicator.tell(refit, ErrorRecord.of(error).model_dump_json())
            status = Status.WEIGHTS if error is None else Status.NOTHING
            travelling[ordinal % 2] = self._begin(communicator, buffer, ordinal, status)
            if error is not None:
                self._end(communicator, ordinal + 1)
                break
        for transfer in travelling:
            if transfer is not None:
                communicator.wait(transfer, timeout_s=timeout_s)
        if error is None:
            with Caught() as unfit:
                reader.finish()
                _refuse(bad)
            error, unfit.error = unfit.error, None
        self.was_told = True
        communicator.agree(error, timeout_s=NUM_VOTES * timeout_s)

    def release(self) -> None:
        """Let go of the source tensors."""
        for table in self._tables.values():
            table.table.release()

    def _begin(self, communicator: Communicator, buffer: Tensor, ordinal: int, status: Status) -> Transfer:
        write_header(buffer, ordinal, status)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return communicator.broadcast(buffer, timeout_s=self._config.timeout_s)

    def _end(self, communicator: Communicator, ordinal: int) -> None:
        """Send the bucket that the ranks wait for already when they read that there is nothing more."""
        if ordinal < len(self._buckets):
            buffer = torch.empty(self._buckets[ordinal].num_bytes, dtype=torch.uint8, device=self.device)
            transfer = self._begin(communicator, buffer, ordinal, Status.NOTHING)
            communicator.wait(transfer, timeout_s=self._config.timeout_s)

    def _pack(self, ordinal: int, buffer: Tensor, reader: "_Reader") -> set[str]:
        """Fill one bucket, and name the tensors that hold NaN or Inf."""
        bucket, launched = self._buckets[ordinal], []
        runs = ((placement, *run) for placement in bucket.placements for run in reader.read(placement))
        batches = [list(runs)] if reader.is_resident else ([run] for run in runs)
        for place, batch in enumerate(batches):
            table = self._tables.get((ordinal, place))
            sources = [arrival.values for _, arrival, _, _ in batch]
            layouts = [source_layout(source) for source in sources]
            if table is None or table.layouts != layouts or not table.table.refresh(sources):
                tasks = [self._task(placement, arrival, buffer, row, end) for placement, arrival, row, end in batch]
                names = [self._tensors[placement.tensor].name for placement, _, _, _ in batch]
                table = _Table(table=compile_table(tasks, self.device), layouts=layouts, names=names)
                self._tables[ordinal, place] = table
            table.table.launch(check=self._config.validate_values != "off")
            launched.append(table)
        return {table.names[index] for table in launched for index in table.table.bad_tasks()}

    def _task(self, placement: Placement, arrival: Arrival, buffer: Tensor, row: int, end: int) -> Task:
        """What brings rows from `row` to `end` of an arrival to their place in a bucket."""
        tensor = self._tensors[placement.tensor]
        views = [part.view(buffer) for part in placement.parts]
        offset = (row - arrival.first_row, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
        if tensor.shape:
            views[0] = views[0].narrow(0, row - placement.first_row, end - row)
        if tensor.block_size is None:
            return Task(op=_copy_op(tensor), source=arrival.values, offset=offset, target=views[0])
        block = tensor.block_size[0]
        first, count = (row - placement.first_row) // block, -(-(end - row) // block)
        return Task(
            op=Op.QUANTIZE,
            source=arrival.values,
            offset=offset,
            target=views[0],
            scale=views[1].narrow(0, first, count),
            block_size=tensor.block_size,
            scale_format=tensor.scale_format,
            round_to_bf16=self._config.fp32_sources == "round_to_bf16",
        )


class _Reader:
    """Gives the rows of a source in the order of the buckets."""

    def __init__(
        self, source: Source, index_of: Mapping[str, int], tensors: Sequence[WireTensor], device: torch.device
    ) -> None:
        self._index_of, self._tensors, self._device = index_of, tensors, device
        self._held = source.tensors if isinstance(source, MappingSource) else None
        self._arrivals = iter(()) if self._held is not None else self._stream(source)
        self._last: Arrival | None = None

    @property
    def is_resident(self) -> bool:
        """Whether every tensor is there, and stays as it is until all are sent."""
        return self._held is not None

    def read(self, placement: Placement) -> Iterator[tuple[Arrival, int, int]]:
        """The arrivals that hold the rows of a placement, with the first row and the end of those in each.

        Raises:
            InvalidSourceError: What came is not what was announced.
        """
        row, end = placement.first_row, placement.first_row + placement.num_rows
        while row < end:
            arrival = self._arrival_with(placement.tensor, row)
            stop = min(end, arrival.end_row)
            yield arrival, row, stop
            row = stop

    def finish(self) -> None:
        """Read a stream to its end, which may be a collective operation of the trainer.

        Raises:
            InvalidSourceError: More came than was announced.
        """
        for arrival in self._arrivals:
            self._check_is_unsent(arrival)

    def _arrival_with(self, tensor: int, row: int) -> Arrival:
        if self._held is not None:
            values = self._held[self._tensors[tensor].name].detach()
            return Arrival(tensor=tensor, first_row=0, values=values.to(self._device))
        while self._last is None or self._last.tensor != tensor or self._last.end_row <= row:
            arrival = next(self._arrivals, None)
            if arrival is None:
                raise InvalidSourceError(
                    [f"{self._tensors[tensor].name}: was announced but did not come"], written=True
                )
            self._last = arrival
            if arrival.tensor != tensor:
                self._check_is_unsent(arrival, before=self._tensors[tensor].name)
        return self._last

    def _check_is_unsent(self, arrival: Arrival, *, before: str = "the end") -> None:
        tensor = self._tensors[arrival.tensor]
        if tensor.travels and arrival.values.numel():
            raise InvalidSourceError(
                [f"{tensor.name}: came where {before} was announced; a broadcast is read in the order of its names"],
                written=True,
            )

    def _stream(self, source: Source) -> Iterator[Arrival]:
        pieces: Iterable[tuple[str, int, Tensor]]
        if isinstance(source, InPieces):
            pieces = ((piece.name, piece.first_row, piece.tensor) for piece in source.pieces(_PIECE_BYTES))
        else:
            pieces = ((name, 0, tensor) for name, tensor in source)
        for name, first_row, values in pieces:
            index = self._index_of.get(name)
            if index is None:
                raise InvalidSourceError([f"{name}: came and was not announced"], written=True)
            shape = self._tensors[index].shape
            if tuple(values.shape[1:]) != shape[1:] or values.ndim != len(shape):
                raise InvalidSourceError(
                    [f"{name}: came as {list(values.shape)}, announced was {list(shape)}"], written=True
                )
            yield Arrival(tensor=index, first_row=first_row, values=values.detach().to(self._device))


def _copy_op(tensor: WireTensor) -> Op:
    if tensor.name.endswith(SCALE_SUFFIX) and tensor.dtype == "float32":
        return Op.COPY_SCALES
    return Op.COPY_CODES if tensor.dtype == dtype_name(FP8_DTYPE) else Op.COPY


def _refuse(bad: set[str]) -> None:
    """Hold that nothing was flagged.

    Raises:
        NonFiniteError: Something was.
        InvalidSourceError: Scales were, and nothing else.
    """
    if bad and all(name.endswith(SCALE_SUFFIX) for name in bad):
        raise InvalidSourceError([scale_problem(name, ScaleFormat.FP32) for name in sorted(bad)], written=True)
    if bad:
        raise NonFiniteError(sorted(bad), written=True)


class Sending:
    """A policy on its way, in a thread of its own: the engines' ranks are asked to take it meanwhile."""

    def __init__(self, sender: Sender, source: Source, communicator: Communicator, refit: str) -> None:
        self._communicator = communicator
        self._caught = Caught()
        self._thread = threading.Thread(
            target=self._run, args=(sender, source, refit), name="fp8refit-sender", daemon=True
        )
        self._thread.start()

    def end(self, error: BaseException | None, *, timeout_s: float) -> BaseException | None:
        """Wait for the thread, and give the error to raise.

        Args:
            error: What the engines' ranks answered, if it is an error.
            timeout_s: After an error, for whatever the trainer's source is in the middle of.
        """
        if error is not None:
            self._communicator.expect_end(str(error) or type(error).__name__)
        self._thread.join(timeout_s if error is not None else None)
        if self._thread.is_alive():
            return error
        own = self._caught.error
        self._caught.error = None
        # What the trainer itself raised is the cause; what it heard from the ranks, or lost, they tell better.
        return own if own is not None and (error is None or not isinstance(own, RefitError)) else error

    def _run(self, sender: Sender, source: Source, refit: str) -> None:
        with self._caught, torch.cuda.device(sender.device if sender.device.type == "cuda" else -1):
            sender.send(source, self._communicator, refit)
        if self._caught.error is not None and not sender.was_told:
            self._communicator.abort(str(self._caught.error))
