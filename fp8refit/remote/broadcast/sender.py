"""The trainer's side of a broadcast: packs and quantizes a policy into buckets, and sends them from a separate thread.

Buffers are used in turn: one is packed while others are sent. A bucket's tables are compiled once and pointed at the
trainer's tensors in later refits. Peak extra memory: the buffers, and tensors that must be copied from another device
(one piece of a stream).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError, RefitError, TransportError
from fp8refit.fill.tasks import scale_problem
from fp8refit.kernels import Task, WorkTable, compile_table
from fp8refit.kernels.work import SourceLayout, source_layout
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import FP8_DTYPE, SCALE_SUFFIX, Op, dtype_name
from fp8refit.remote.broadcast.source_reader import Arrival, Arrived, Reader
from fp8refit.remote.broadcast.wire_formats import Wire
from fp8refit.remote.protocol.channel import NUM_VOTES
from fp8refit.report import PhaseClock
from fp8refit.sources.source import MappingSource, Source
from fp8refit.transport.collective.buckets import NUM_BUFFERS, Placement, WireTensor, lay_out, take_buffers
from fp8refit.transport.collective.communicator import Communicator
from fp8refit.transport.collective.header import Headers, Status
from fp8refit.transport.collective.links import Transfer
from fp8refit.transport.error_capture import ErrorCapture
from fp8refit.transport.vote import ErrorRecord

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Table:
    """A compiled table, and the tensors that it can be pointed at."""

    table: WorkTable
    reads: list["_Read"]
    names: list[str]
    """The source tensor of each task."""
    is_whole: bool
    """Whether it fills its whole bucket."""
    bad: set[str] | None = None
    """Names of tensors with NaN or Inf, once known."""

    def bad_names(self) -> set[str]:
        """Wait for the last run, and return the names of tensors with NaN or Inf."""
        if self.bad is None:
            self.bad = {self.names[index] for index in self.table.bad_tasks()}
        return self.bad

    @property
    def sources(self) -> list[str]:
        """The distinct tensors that it reads."""
        return [name for name, _, _ in self.reads]

    def point_at(self, arrivals: Sequence[Arrival]) -> bool:
        """Point the table at these tensors; False if their layout differs."""
        return _reads(arrivals) == self.reads and self.table.refresh([arrival.values for arrival in arrivals])


_Read: TypeAlias = tuple[str, int, SourceLayout]
"""Name, first row and layout of a tensor that a table reads."""


def _reads(arrivals: Sequence[Arrival]) -> list[_Read]:
    return [(arrival.name, arrival.first_row, source_layout(arrival.values)) for arrival in arrivals]


class Sender:
    """Sends policies of one layout.

    Args:
        wire: The announced tensors, in the form in which they are sent.
        config: Options of the refit.
        device: Device of the buffers, on which tensors are quantized.
        num_sections: Number of sections that tensors are cut for.

    Raises:
        StagingMemoryError: There is no room for the buffers.
    """

    def __init__(self, wire: Wire, config: RefitConfig, device: torch.device, *, num_sections: int = 0) -> None:
        self._wire = wire
        self._config, self.device = config, device
        self.buckets = lay_out(wire.tensors, config.bucket_bytes, num_sections)
        self._tables: dict[tuple[int, int], _Table] = {}
        self._layout: LayoutGuard | None = None
        """Recognizes the source that all tables point at, if all of it is on the device."""
        self._names: list[str] = []
        """Names of that source's tensors, in the order sent."""
        self.was_told = False
        """Whether the ranks know, or will learn, how the last send ended."""
        self._headers = Headers(len(self.buckets), device)
        self._buffers = take_buffers(self.buckets, device, remedy="lower the trainer's bucket_bytes")

    def send(
        self, source: Source, communicator: Communicator, refit: str, *, layout: LayoutGuard | None = None
    ) -> None:
        """Send everything, and wait until every rank of every engine confirms that it has it. See `send_ahead`.

        Args:
            source: The announced source. A stream is read once to its end, in the announced order.
            communicator: The group, in which this is rank 0.
            refit: Id of this refit.
            layout: The guard that recognized the source, if any. If it also recognized the last one, tensors are not
                checked one by one.

        Raises:
            RefitError: A rank failed.
            BaseException: See `send_ahead`. The ranks have been told.
        """
        error = self._send(source, communicator, layout, refit=refit)
        self.confirm(communicator, error)

    def send_ahead(self, source: Source, communicator: Communicator, *, layout: LayoutGuard | None = None) -> None:
        """Send everything before the ranks are told to take it, and wait until each has it. `confirm` follows; see `send`.

        Raises:
            InvalidSourceError: The source is not as announced.
            NonFiniteError: NaN or Inf.
            TransportError: A rank is gone or does not answer.
            BaseException: Whatever reading the source raised. The ranks have not been told.
        """
        error = self._send(source, communicator, layout)
        if isinstance(error, InvalidSourceError):
            raise InvalidSourceError(error.problems) from error
        if error is not None:
            raise error
        communicator.agree(None, timeout_s=self._config.timeout_s)

    def confirm(self, communicator: Communicator, error: BaseException | None = None) -> None:
        """Wait until every rank of every engine confirms that it has everything.

        Args:
            communicator: The group.
            error: Why this process failed, if it did.

        Raises:
            RefitError: A rank failed; or `error`.
        """
        self.was_told = True
        communicator.agree(error, timeout_s=NUM_VOTES * self._config.timeout_s)

    def _send(
        self, source: Source, communicator: Communicator, layout: LayoutGuard | None, *, refit: str | None = None
    ) -> BaseException | None:
        """Send everything, or tell the ranks of this refit, which wait for it, that nothing more comes. Returns the error."""
        self.was_told = False
        timeout_s = self._config.timeout_s
        reader, clock = Reader(source, self._wire, self.device), PhaseClock()
        known = self._known(source, layout)
        travelling: deque[Transfer] = deque()
        packed: list[_Table] = []
        error: BaseException | None = None
        for ordinal, bucket in enumerate(self.buckets):
            portions = bucket.portions(self._buffers[ordinal % len(self._buffers)])
            if len(travelling) == len(self._buffers):
                with clock.phase("wait"):
                    communicator.wait(travelling.popleft(), timeout_s=timeout_s)
            with clock.phase("pack"), ErrorCapture() as failed:
                packed += self._pack(ordinal, portions, reader, known)
            error, failed.error = failed.error, None
            if error is not None:
                if refit is None:
                    return error
                communicator.send(refit, ErrorRecord.of(error).model_dump_json())
            status = Status.WEIGHTS if error is None else Status.NOTHING
            with clock.phase("begin"):
                travelling.append(self._begin(communicator, portions, ordinal, status))
            if error is not None:
                self._end(communicator, ordinal + 1)
                break
        with clock.phase("wait"):
            for transfer in travelling:
                communicator.wait(transfer, timeout_s=timeout_s)
        logger.debug("sent %d buckets in %s s", len(self.buckets), clock.phases_s)
        if error is None:
            with ErrorCapture() as unfit:
                reader.finish()
                _refuse({name for table in packed for name in table.bad_names()}, written=refit is not None)
            error, unfit.error = unfit.error, None
        if error is None and known is None:
            self._remember(source, layout)
        return error

    def _known(self, source: Source, layout: LayoutGuard | None) -> dict[str, Tensor] | None:
        """The tensors of a source that is known to have the layout of the last one; otherwise None."""
        if layout is None or layout is not self._layout or not isinstance(source, MappingSource):
            self._layout = None
            return None
        return dict(zip(self._names, source.sent, strict=True))

    def _remember(self, source: Source, layout: LayoutGuard | None) -> None:
        if isinstance(source, MappingSource) and all(value.device == self.device for value in source.tensors.values()):
            self._layout, self._names = layout, list(source.tensors)

    def _begin(self, communicator: Communicator, portions: Sequence[Tensor], ordinal: int, status: Status) -> Transfer:
        shared, *of_sections = portions
        self._headers.write(shared, ordinal, status)
        sections = {section: portion for section, portion in enumerate(of_sections) if portion.numel()}
        return communicator.broadcast(shared, sections=sections, timeout_s=self._config.timeout_s)

    def _end(self, communicator: Communicator, ordinal: int) -> None:
        """Send, from this bucket on, as many end markers as ranks will be waiting for when they read the first."""
        for late in range(ordinal, min(ordinal + NUM_BUFFERS - 1, len(self.buckets))):
            bucket = self.buckets[late]
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            transfer = self._begin(communicator, bucket.portions(buffer), late, Status.NOTHING)
            communicator.wait(transfer, timeout_s=self._config.timeout_s)

    def _pack(
        self, ordinal: int, portions: Sequence[Tensor], reader: Reader, known: Mapping[str, Tensor] | None
    ) -> list[_Table]:
        """Fill one bucket on the current stream, and return the tables that do it, whose flags are known later."""
        launched = self._repeat(ordinal, reader, known)
        if not launched:
            batches = reader.batches(self.buckets[ordinal].runs)
            # Do not hold a piece of a stream while the next one is read.
            launch = partial(self._launch, ordinal, portions, is_whole=reader.holds_all)
            launched = list(map(launch, count(), batches))
        return launched

    def _repeat(self, ordinal: int, reader: Reader, known: Mapping[str, Tensor] | None) -> list[_Table]:
        """Fill one bucket with its table from last time, at a cost per tensor instead of per run.

        Returns that table; an empty list if it cannot be used again.
        """
        table = self._tables.get((ordinal, 0))
        if table is None or not (table.is_whole and reader.holds_all):
            return []
        if known is not None:
            is_ready = table.table.refresh([known[name] for name in table.sources])
        else:
            is_ready = table.point_at([reader.held(name) for name in table.sources])
        return [self._run(table)] if is_ready else []

    def _launch(
        self, ordinal: int, portions: Sequence[Tensor], place: int, batch: Sequence[Arrived], *, is_whole: bool
    ) -> _Table:
        """Copy or quantize what was read together into its place in a bucket."""
        table = self._tables.get((ordinal, place))
        arrivals = list({each.arrival.name: each.arrival for each in batch}.values())
        if table is None or table.is_whole != is_whole or not table.point_at(arrivals):
            table = self._compile(batch, portions, arrivals, is_whole=is_whole)
            self._tables[ordinal, place] = table
        return self._run(table)

    def _run(self, table: _Table) -> _Table:
        table.bad = None
        table.table.launch(check=self._config.validate_values != "off")
        if not table.is_whole:
            table.bad_names()  # a stream may overwrite its tensor when the next piece is read
        table.table.release()
        return table

    def _compile(
        self, batch: Sequence[Arrived], portions: Sequence[Tensor], arrivals: Sequence[Arrival], *, is_whole: bool
    ) -> _Table:
        places = {arrival.name: place for place, arrival in enumerate(arrivals)}
        tasks, names = [], []
        for each in batch:
            for placement in each.run.placements:
                low, high = each.row, each.end
                if placement.start:
                    low, high = max(low, placement.start[0]), min(high, placement.start[0] + placement.shape[0])
                if low < high:
                    portion = portions[placement.portion]
                    tasks.append(self._task(each.run.tensor, placement, each.arrival, portion, low, high))
                    names.append(each.arrival.name)
        table = compile_table(tasks, self.device, [places[name] for name in names])
        return _Table(table=table, reads=_reads(arrivals), names=names, is_whole=is_whole)

    def _task(self, index: int, placement: Placement, arrival: Arrival, portion: Tensor, row: int, end: int) -> Task:
        """The task that puts rows `row` to `end` of a tensor into their place in a portion of a bucket."""
        tensor, origin = self._wire.tensors[index], self._wire.origins[index]
        views, start = [part.view(portion) for part in placement.parts], placement.start
        if start:
            views[0] = views[0].narrow(0, row - start[0], end - row)
        offset = (row - arrival.first_row, *start[1:]) if start else ()
        select: tuple[int, ...] = ()
        if origin.expert is not None:
            offset, select = (origin.first_row + row, *start[1:]), (origin.expert - arrival.first_row,)
        scale, columns = None, None
        if tensor.format is not None:
            first, length = tensor.format.columns_read(start[1], placement.shape[1], tensor.shape[1])
            if length > placement.shape[1]:
                offset, columns = (offset[0], first), (length, start[1] - first)
            block = tensor.format.block_size[0]
            assert (row - start[0]) % block == 0, f"{tensor.name=} {start=} {row=}"
            scale = views[1].narrow(0, (row - start[0]) // block, -(-(end - row) // block))
        return Task(
            op=Op.QUANTIZE if tensor.format is not None else _copy_op(tensor),
            source=arrival.values,
            offset=offset,
            target=views[0],
            scale=scale,
            format=tensor.format or BlockFormat(),
            round_to_bf16=self._config.fp32_sources == "round_to_bf16",
            select=select,
            is_transposed=origin.is_transposed,
            columns=columns,
        )


def _copy_op(tensor: WireTensor) -> Op:
    if tensor.name.endswith(SCALE_SUFFIX) and tensor.dtype == "float32":
        return Op.COPY_SCALES
    return Op.COPY_CODES if tensor.dtype == dtype_name(FP8_DTYPE) else Op.COPY


def _refuse(bad: set[str], *, written: bool) -> None:
    """Raise an error if anything was flagged.

    Raises:
        NonFiniteError: A tensor was flagged.
        InvalidSourceError: Only scales were flagged.
    """
    if bad and all(name.endswith(SCALE_SUFFIX) for name in bad):
        raise InvalidSourceError([scale_problem(name, ScaleFormat.FP32) for name in sorted(bad)], written=written)
    if bad:
        raise NonFiniteError(sorted(bad), written=written)


class Sending:
    """A step of a send in a separate thread, while the engines' ranks are told to take the policy, or compute requests.

    Args:
        step: The step.
        sender: Whose it is.
        communicator: The group.
    """

    def __init__(self, step: Callable[[], None], sender: Sender, communicator: Communicator) -> None:
        self._communicator = communicator
        self._caught = ErrorCapture()
        self._thread = threading.Thread(target=self._run, args=(step, sender), name="fp8refit-sender", daemon=True)
        self._thread.start()

    def is_over(self, *, within_s: float) -> bool:
        """Wait for the thread for some time. Returns whether it has ended.

        Raises:
            TransportError: A member has left the group.
        """
        self._thread.join(within_s)
        if self.is_under_way and (said := self._communicator.first_word()):
            raise TransportError(said)
        return not self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """Whether the thread still uses the source and the sender."""
        return self._thread.is_alive()

    def end(self, error: BaseException | None, *, timeout_s: float) -> BaseException | None:
        """Wait for the thread, and return the error to raise, if any.

        Args:
            error: The error of the engines' ranks, if any.
            timeout_s: After an error, how long to wait for the trainer's source.
        """
        if error is not None:
            self._communicator.expect_end(str(error) or type(error).__name__)
        self._thread.join(timeout_s if error is not None else None)
        if self.is_under_way:
            return error
        own = self._caught.error
        self._caught.error = None
        # An error of the trainer itself is the cause. Errors it got from the ranks are better told by the ranks.
        is_cause = not isinstance(own, RefitError) or isinstance(own, InvalidSourceError | NonFiniteError)
        return own if own is not None and (error is None or is_cause) else error

    def _run(self, step: Callable[[], None], sender: Sender) -> None:
        with self._caught, torch.cuda.device(sender.device if sender.device.type == "cuda" else -1):
            step()
        if self._caught.error is not None and not sender.was_told:
            self._communicator.abort(str(self._caught.error))
