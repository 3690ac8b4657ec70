"""The rank side of an engine in other processes: takes one request after another and answers with values, never errors."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from fp8refit._version import __version__
from fp8refit.config import RefitConfig
from fp8refit.errors import RankFailedError, RefitError
from fp8refit.pieces import Piece
from fp8refit.rank import Rank
from fp8refit.receiver import Receiver
from fp8refit.slots import TensorMeta
from fp8refit.sources import MappingSource, PushedSource, SafetensorsSource, Source
from fp8refit.transport import messages
from fp8refit.transport.memory import Importer
from fp8refit.transport.messages import Reply, Request
from fp8refit.vote import ErrorRecord

logger = logging.getLogger(__name__)


class RankServer:
    """Does what a driver asks of one rank.

    Args:
        make_rank: Gives the rank; called once, at the first request.
    """

    def __init__(self, make_rank: Callable[[], Rank]) -> None:
        self._make_rank = make_rank
        self._rank: Rank | None = None
        self._importer: Importer | None = None
        self._mapped: tuple[str, MappingSource] | None = None
        self._receiver: Receiver | None = None
        self._token = ""
        self._refit = ""
        self._config = RefitConfig()

    def handle(self, message: str) -> str:
        """Answer one request. An error is a value: one that crosses an engine's RPC may end the engine."""
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
        rank, importer = self._rank, self._open_importer(self._rank.target.device)
        is_taken = isinstance(order, messages.Take) and order.refit == self._refit
        if self._receiver is not None and not is_taken:
            self._receiver.recall()
        if isinstance(order, messages.Prepare):
            self._refit, self._config = order.refit, order.config

            def receive() -> None:
                if order.is_under_way:
                    self._open_receiver(rank).receive_ahead(self._token, order.config)

            rank.prepare(
                lambda: self._make_source(order.source, importer, rank),
                order.config,
                kv=order.kv,
                is_known=order.is_known,
                compares=order.compares,
                on_judged=receive,
            )
            return {}
        if isinstance(order, messages.Join):
            self._open_receiver(rank).join(order)
            return {}
        if isinstance(order, messages.CheckCalibration):
            rank.check_calibration(order.kv, order.config)
            return {}
        if isinstance(order, messages.Calibrate):
            return {"kv": rank.calibrate(order.kv, order.config)}
        if isinstance(order, messages.Describe):
            return {"layout": rank.layout()}
        if isinstance(order, messages.Fingerprint):
            return {"fingerprint": rank.fingerprint()}
        if isinstance(order, messages.Close):
            self._forget()
            rank.close()
            return {}
        if isinstance(order, messages.Hello):
            return {}
        if isinstance(order, messages.Abandon):
            if order.refit == self._refit:
                rank.target.abandon()
                self._unmap()
            return {}
        if order.refit != self._refit:
            raise RankFailedError("this refit was given up: another one began, or the engine was closed; refit again")
        if isinstance(order, messages.Begin):
            rank.begin()
        elif isinstance(order, messages.Push):
            importer.keep_only(segment.id for segment in order.segments)
            rank.push(_pieces(importer.open(order.segments, order.refs), order.runs))
        elif isinstance(order, messages.Write):
            reports = rank.write(self._config)
            if not order.keeps_mapped:
                self._unmap()
            return {"reports": tuple(reports)}
        elif isinstance(order, messages.Finish):
            return {"reports": tuple(rank.finish(self._config))}
        elif isinstance(order, messages.Take):
            return {"reports": tuple(self._open_receiver(rank).take(order, self._token, self._config))}
        return {}

    def _open_receiver(self, rank: Rank) -> Receiver:
        if self._receiver is None:
            self._receiver = Receiver(rank)
        return self._receiver

    def _open_importer(self, device: torch.device) -> Importer:
        if self._importer is None:
            self._importer = Importer(device)
        return self._importer

    def _make_source(
        self,
        source: messages.MappedTensors | messages.Files | messages.Pushed | messages.Broadcast,
        importer: Importer,
        rank: Rank,
    ) -> Source:
        if isinstance(source, messages.MappedTensors):
            return self._map(source, importer)
        self._mapped = None
        if isinstance(source, messages.Broadcast):
            importer.close()
            self._token = source.token
            return self._open_receiver(rank).source(source)
        if isinstance(source, messages.Files):
            importer.close()
            return SafetensorsSource(Path(source.path), judged=source.stamps)
        manifest = None if source.manifest is None else _metadata(source.manifest)
        return PushedSource(manifest, problems=source.problems, odd_scales=source.odd_scales, unfit=source.unfit)

    def _map(self, source: messages.MappedTensors, importer: Importer) -> MappingSource:
        if source.refs is not None:
            self._mapped = None
            importer.keep_only(segment.id for segment in source.segments)
            tensors = importer.open(source.segments, source.refs)
            self._mapped = source.digest, MappedSource(tensors, source.problems)
        elif self._mapped is None or self._mapped[0] != source.digest:
            raise RankFailedError("this rank no longer has the tensors of the last refit; refit again")
        return self._mapped[1]

    def _forget(self) -> None:
        """Let go of the refit under way, and of everything mapped."""
        self._refit = ""
        if self._rank is not None:
            self._rank.target.abandon()
        self._unmap()
        if self._receiver is not None:
            self._receiver.forget()

    def _unmap(self) -> None:
        self._mapped = None
        if self._importer is not None and self._rank is not None:
            if self._rank.target.device.type == "cuda" and self._rank.target.lost_because is None:
                torch.cuda.synchronize(self._rank.target.device)  # a fill that failed half way may still be reading
            self._importer.close()


class MappedSource(MappingSource):
    """Tensors of another process, under the names and with the problems that it found."""

    def __init__(self, tensors: Mapping[str, Tensor], problems: tuple[str, ...]) -> None:
        super().__init__(tensors)
        self._found = problems

    @property
    def problems(self) -> tuple[str, ...]:
        """See `MappingSource`."""
        return (*super().problems, *self._found)


def _read(message: str) -> Request:
    """The request.

    Raises:
        RankFailedError: It is none that this version knows.
    """
    try:
        request = Request.model_validate_json(message)
    except ValidationError as error:
        raise RankFailedError(
            f"this rank, fp8refit {__version__}, cannot read what the driver says; install the same version on both sides "
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


def _metadata(manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorMeta]:
    metadata = {}
    for name, (shape, dtype) in manifest.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise RankFailedError(f"{name}: {dtype!r} is no dtype of this rank's PyTorch {torch.__version__}")
        metadata[name] = TensorMeta(shape=shape, dtype=kind)
    return metadata
