"""The rank's side of an engine in other processes: carries out requests one by one, and answers errors as values."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from typing_extensions import override

from fp8refit import __version__
from fp8refit.errors import RankFailedError, RefitError
from fp8refit.fill.fills import Prepared
from fp8refit.live.slots import TensorMeta
from fp8refit.ranks.rank import Rank
from fp8refit.remote import messages
from fp8refit.remote.broadcast.receiver import Receiver
from fp8refit.remote.messages import Reply, Request
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.row_runs import Piece
from fp8refit.sources.source import MappingSource, PushedSource, Source
from fp8refit.transport.memory.ring import Ring
from fp8refit.transport.memory.shared_tensors import Importer
from fp8refit.transport.vote import ErrorRecord

logger = logging.getLogger(__name__)

_POLL_S = 2e-5
_SPINNING_S = 1e-3
"""Seconds a rank polls without pause, once something has arrived: the shortest sleep takes as long as half a bucket."""
_LINGERING_S = 0.005
"""Seconds a rank polls for more of a stream before it returns."""
_FOLLOWING_S = 0.25
"""Seconds after which it returns even if more keeps arriving."""
_MOST_REMEMBERED_BYTES = 64 << 20
"""Of the texts of streams whose tensors are remembered."""


class RankServer:
    """Carries out a driver's orders on one rank.

    Args:
        make_rank: Creates the rank; called at the first request.
    """

    def __init__(self, make_rank: Callable[[], Rank]) -> None:
        self._make_rank = make_rank
        self._rank: Rank | None = None
        self._tensors: Importer | None = None
        """Maps tensors that stay where the trainer has them."""
        self._buckets: Importer | None = None
        """Maps the buckets of streams, which the trainer keeps from one stream to the next."""
        self._mapped: tuple[str, MappingSource] | None = None
        """Digest and source of the tensors that are mapped."""
        self._ring: Ring | None = None
        self._packed: OrderedDict[str, _Contents] = OrderedDict()
        """What texts of streams describe, the last used last."""
        self._receiver: Receiver | None = None
        self._token = ""
        self._refit = ""
        self._prepared: Prepared | None = None

    def handle(self, message: str) -> str:
        """Answer one request. Errors are returned as values: an exception that crosses an engine's RPC may end the
        engine.
        """
        request_id = ""
        try:
            request = _read(message)
            request_id = request.id
            answer = self._obey(request.order)
        except Exception as error:
            if not isinstance(error, RefitError):
                logger.exception("a refit failed on this rank")
            return self._reply(request_id, error=ErrorRecord.of(error)).encode()
        return self._reply(request_id, **answer).encode()

    def _reply(self, request_id: str, **fields: Any) -> Reply:
        rank = self._rank
        if rank is None:
            return Reply(id=request_id, package_version=__version__, **fields)
        return Reply(
            id=request_id,
            rank=rank.group.rank,
            version=rank.target.version,
            is_dirty=rank.target.is_dirty,
            package_version=__version__,
            **fields,
        )

    def _obey(self, order: messages.Order) -> dict[str, Any]:
        if self._rank is None:
            self._rank = self._make_rank()
        rank = self._rank
        is_taken = isinstance(order, messages.Take) and order.refit == self._refit
        if self._receiver is not None and not is_taken:
            self._receiver.recall()
        match order:
            case messages.Do(step="describe"):
                return {"layout": rank.target.live.layout()}
            case messages.Do(step="fingerprint"):
                return {"fingerprint": rank.target.live.fingerprint()}
            case messages.Do(step="close"):
                self._forget()
                rank.target.close()
            case messages.Do():
                pass  # every reply says who answers
            case messages.Prepare():
                self._prepare(order, rank)
            case messages.Join():
                self._open_receiver(rank).join(order)
            case messages.Calibrate(step="check_calibration"):
                rank.check_calibration(order.kv, order.config)
            case messages.Calibrate():
                return {"kv": rank.calibrate(order.kv, order.config)}
            case messages.RefitStep(step="abandon"):
                self._abandon(order, rank)
            case _:
                return self._write(order, rank)
        return {}

    def _prepare(self, order: messages.Prepare, rank: Rank) -> None:
        self._refit, self._prepared = order.refit, None

        def receive() -> None:
            if order.is_under_way:
                self._open_receiver(rank).receive_ahead(self._token, order.config)

        self._prepared = rank.prepare(
            lambda: self._make_source(order, rank),
            order.config,
            kv=order.kv,
            is_known=order.is_known,
            compares=order.compares,
            on_judged=receive,
        )

    def _write(
        self, order: messages.Write | messages.RefitStep | messages.Stream | messages.Take, rank: Rank
    ) -> dict[str, Any]:
        """A step of writing what was prepared.

        Raises:
            RankFailedError: Nothing is, or something else.
            RefitError: What this rank could not do.
        """
        if order.refit != self._refit:
            raise RankFailedError("this refit was abandoned: another one began, or the engine was closed; refit again")
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise RankFailedError("nothing is prepared on this rank; refit again")
        match order:
            case messages.Write():
                reports = rank.write(prepared)
                if not order.keeps_mapped:
                    self._unmap_tensors()
                return {"reports": tuple(reports)}
            case messages.RefitStep(step="finish"):
                return {"reports": tuple(rank.finish(prepared))}
            case messages.Take():
                return {"reports": tuple(self._open_receiver(rank).take(order, self._token, prepared))}
            case messages.RefitStep():
                rank.target.begin(prepared)
            case messages.Stream():
                self._follow(order, prepared, rank)
        self._prepared = prepared
        return {}

    def _abandon(self, order: messages.RefitStep, rank: Rank) -> None:
        if order.refit == self._refit:
            self._prepared = None
            rank.target.abandon()
            self._unmap()

    def _follow(self, order: messages.Stream, prepared: Prepared, rank: Rank) -> None:
        """Write what arrives through a ring, until nothing more arrives or `_FOLLOWING_S` have passed.

        A text counts as taken when the device has read the buckets it describes. All received texts are taken when this
        returns.

        Raises:
            RefitError: This rank failed.
        """
        if self._ring is None or self._ring.segment != order.ring:
            self._ring = Ring.find(order.ring)
        try:
            if order.begins:
                rank.target.begin(prepared)
            with rank.target.live.on_device():
                self._take_from(self._ring, rank, self._open_buckets(rank))
        finally:
            self._ring.leave(rank.group.rank)

    def _take_from(self, ring: Ring, rank: Rank, importer: Importer) -> None:
        place, is_gpu = rank.group.rank, rank.target.live.device.type == "cuda"
        num_received = ring.num_taken_by(place)
        reading: deque[tuple[int, torch.cuda.Event]] = deque()
        began_s = came_s = time.monotonic()
        while (now_s := time.monotonic()) - began_s < _FOLLOWING_S:
            text = ring.receive(num_received)
            if text is not None:
                self._write_packed(text, rank, importer)
                num_received, came_s = num_received + 1, now_s
                if is_gpu:
                    reading.append((num_received, _recorded()))
                else:
                    ring.take(place, num_received)
            elif ring.is_called_back or now_s - came_s > _LINGERING_S:
                break
            else:
                time.sleep(0 if now_s - came_s < _SPINNING_S else _POLL_S)
            while reading and reading[0][1].query():  # type: ignore[no-untyped-call]
                ring.take(place, reading.popleft()[0])
        if reading:
            reading[-1][1].synchronize()
            ring.take(place, num_received)

    def _write_packed(self, text: str, rank: Rank, importer: Importer) -> None:
        """Write the contents of a set of buckets. Streams repeat their texts, and the tensors are where they were."""
        contents = self._packed.get(text)
        if contents is not None:
            self._keep_buckets(contents.segments)
        else:
            told = messages.Packed.model_validate_json(text)
            segments = frozenset(segment.id for segment in told.segments)
            self._keep_buckets(segments)
            tensors = importer.open(told.segments, told.refs)
            contents = _Contents(segments=segments, tensors=list(_pieces(tensors, told.runs)))
        self._packed[text] = contents
        self._packed.move_to_end(text)
        rank.target.push(contents.tensors)
        while len(self._packed) > 1 and sum(map(len, self._packed)) > _MOST_REMEMBERED_BYTES:
            self._packed.popitem(last=False)

    def _keep_buckets(self, ids: Iterable[str]) -> None:
        if self._keep_only(ids, self._buckets):
            self._packed.clear()

    def _keep_only(self, ids: Iterable[str], importer: Importer | None) -> bool:
        """Unmap all but some segments, after waiting for launched work that may read them. Returns whether there were
        others.
        """
        kept, live = frozenset(ids), self._rank.target.live if self._rank is not None else None
        if importer is None or importer.mapped <= kept:
            return False
        if live is not None and live.lost_because is None:
            with live.on_device():
                live.synchronize()
        importer.keep_only(kept)
        return True

    def _open_receiver(self, rank: Rank) -> Receiver:
        if self._receiver is None:
            self._receiver = Receiver(rank)
        return self._receiver

    def _open_tensors(self, rank: Rank) -> Importer:
        if self._tensors is None:
            self._tensors = Importer(rank.target.live.device)
        return self._tensors

    def _open_buckets(self, rank: Rank) -> Importer:
        if self._buckets is None:
            self._buckets = Importer(rank.target.live.device)
        return self._buckets

    def _make_source(self, order: messages.Prepare, rank: Rank) -> Source:
        source = order.source
        if "tensors" not in order.keeps and not isinstance(source, messages.MappedTensors):
            self._unmap_tensors()
        if "buckets" not in order.keeps:
            self._unmap_buckets()
        if isinstance(source, messages.MappedTensors):
            return self._map(source, self._open_tensors(rank))
        if isinstance(source, messages.Broadcast):
            self._token = source.token
            return self._open_receiver(rank).source(source)
        if isinstance(source, messages.Files):
            return SafetensorsSource(Path(source.path), judged=source.stamps)
        manifest = None if source.manifest is None else _metadata(source.manifest)
        return PushedSource(manifest, problems=source.problems, odd_scales=source.odd_scales, unfit=source.unfit)

    def _map(self, source: messages.MappedTensors, importer: Importer) -> MappingSource:
        if source.refs is not None:
            self._mapped = None
            self._keep_only((segment.id for segment in source.segments), importer)
            tensors = importer.open(source.segments, source.refs)
            self._mapped = source.digest, MappedSource(tensors, source.problems)
        elif self._mapped is None or self._mapped[0] != source.digest:
            raise RankFailedError("this rank no longer has the tensors of the last refit; refit again")
        return self._mapped[1]

    def _forget(self) -> None:
        """Abandon the current refit, and unmap everything."""
        self._refit, self._prepared = "", None
        if self._rank is not None:
            self._rank.target.abandon()
        self._unmap()
        if self._receiver is not None:
            self._receiver.forget()

    def _unmap(self) -> None:
        self._unmap_tensors()
        self._unmap_buckets()

    def _unmap_tensors(self) -> None:
        self._mapped = None
        self._keep_only((), self._tensors)

    def _unmap_buckets(self) -> None:
        self._ring = None
        self._keep_buckets(())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Contents:
    """What a set of buckets holds."""

    segments: frozenset[str]
    """All buckets that were in use."""
    tensors: list[tuple[str, Tensor] | Piece]


class MappedSource(MappingSource):
    """Tensors of another process, with the names and problems that it found."""

    def __init__(self, tensors: Mapping[str, Tensor], problems: tuple[str, ...]) -> None:
        super().__init__(tensors)
        self._found = problems

    @property
    @override
    def problems(self) -> tuple[str, ...]:
        return (*super().problems, *self._found)


def _read(message: str) -> Request:
    """Parse a request.

    Raises:
        RankFailedError: This version cannot read it.
    """
    try:
        request = Request.model_validate_json(message)
    except ValidationError as error:
        raise RankFailedError(
            f"this rank (fp8refit {__version__}) cannot read the driver's message; install the same version on both sides "
            f"({messages.first_problem(error)})"
        ) from error
    if request.protocol != messages.PROTOCOL:
        raise RankFailedError(
            f"the driver speaks protocol {request.protocol} and this rank, fp8refit {__version__}, speaks "
            f"{messages.PROTOCOL}; install the same version on both sides"
        )
    return request


def _pieces(tensors: Mapping[str, Tensor], runs: Mapping[str, messages.Run]) -> Iterator[tuple[str, Tensor] | Piece]:
    for name, tensor in tensors.items():
        run = runs.get(name)
        if run is None:
            yield name, tensor
        else:
            yield Piece(name=name, first_row=run.first_row, tensor=tensor, full_shape=run.full_shape)


def _recorded() -> torch.cuda.Event:
    """Record an event after everything launched on the current device."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _metadata(manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorMeta]:
    metadata = {}
    for name, (shape, dtype) in manifest.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise RankFailedError(f"{name}: {dtype!r} is not a dtype of this rank's PyTorch {torch.__version__}")
        metadata[name] = TensorMeta(shape=shape, dtype=kind)
    return metadata
