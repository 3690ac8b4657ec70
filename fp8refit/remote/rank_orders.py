"""Carries out a driver's orders on one rank."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp8refit.errors import EngineBusyError, RankFailedError
from fp8refit.fill.fills import Prepared
from fp8refit.live.collector import collector_paused
from fp8refit.live.slots import TensorMeta
from fp8refit.live.turn import IN_USE, DisplacedError
from fp8refit.ranks.rank import Rank
from fp8refit.remote.broadcast.receiver import Receiver
from fp8refit.remote.host.mapped_memory import TensorMapper
from fp8refit.remote.host.stream_reader import State, StreamReader
from fp8refit.remote.protocol import messages
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.source import PushedSource, Source
from fp8refit.transport.memory.importer import Importer

_MOST_ABANDONED = 16


class RankOrders:
    """The orders to one rank, and what they leave for later ones.

    Between the orders of a refit that has begun to write, this object holds the target's turn. It loses it if the driver is
    silent for the refit's time limit, because the driver may have died; an order that prepares another refit takes over.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: Rank) -> None:
        live = rank.target.live
        self.rank = rank
        self.receiver = Receiver(rank)
        self.tensors = TensorMapper(live, Importer(live.device))
        self.streams = StreamReader(rank, Importer(live.device))
        self._refit = ""
        self._keeps_tensors = False
        """Whether tensors stay mapped after the write."""
        self._prepared: Prepared | None = None
        self._abandoned: deque[str] = deque(maxlen=_MOST_ABANDONED)
        """Refits that were abandoned. Orders of theirs may still arrive."""

    def execute(self, order: messages.Order) -> dict[str, Any]:
        """Carry out an order. Returns the fields of the reply.

        Raises:
            RefitError: What this rank could not do.
        """
        with self.rank.target.turn.during(self, self._silence_s) as is_held:
            return self._obey(order, None if is_held else EngineBusyError(IN_USE))

    def _obey(self, order: messages.Order, held: EngineBusyError | None) -> dict[str, Any]:
        """`execute`; if somebody else holds the turn, only what changes nothing."""
        rank = self.rank
        takes = isinstance(order, messages.Take) and order.refit == self._refit
        asks = isinstance(order, messages.Do) and order.step != "close"
        if not (takes or (asks and self.receiver.is_ahead)):
            self.receiver.recall()
        match order:
            case messages.Do(step="read"):
                rank.target.read_ahead()
            case messages.Do(step="describe"):
                return {"layout": rank.target.layout()}
            case messages.Do(step="fingerprint"):
                return {"fingerprint": rank.target.live.fingerprint()}
            case messages.Do(step="close"):
                self.forget()
                if held is not None:
                    raise held
                rank.target.close()
            case messages.Do():
                return {"place": messages.Place.here()}  # every reply says who answers
            case messages.Prepare():
                self._prepare(order, held)
            case messages.Join():
                return {"free_bytes": self.receiver.join(order)}
            case messages.Calibrate(step="check_calibration"):
                rank.check_calibration(order.job, driver_error=held)
            case messages.Calibrate():
                return {"kv": rank.calibrate(order.job, driver_error=held)}
            case messages.RefitStep(step="abandon"):
                self._abandoned.append(order.refit)
                if order.refit == self._refit:
                    self._drop()
                    self.unmap()
            case _ if held is not None:
                raise held
            case _:
                return self._write(order)
        return {}

    def _prepare(self, order: messages.Prepare, held: EngineBusyError | None) -> None:
        """Prepare a refit.

        Raises:
            DisplacedError: It was abandoned.
            RefitError: What this rank could not do; or `held`, on all ranks.
        """
        if order.refit in self._abandoned:
            raise DisplacedError
        self._refit, self._prepared = order.refit, None
        self.streams.displace()
        self._keeps_tensors = "tensors" in order.keeps

        def receive() -> None:
            if order.is_under_way:
                all_of_it = isinstance(order.source, messages.Broadcast) and order.source.is_ahead
                self.receiver.receive_ahead(order.job.config, all_of_it=all_of_it)

        self._prepared = self.rank.prepare(
            lambda: self._make_source(order),
            order.job,
            driver_error=held,
            is_known=order.is_known,
            on_judged=receive,
        )

    def _write(self, order: messages.RefitStep | messages.Stream | messages.Take) -> dict[str, Any]:
        """A step of writing what was prepared.

        Raises:
            RankFailedError: Nothing is prepared.
            DisplacedError: Another refit is.
            RefitError: What this rank could not do.
        """
        if order.refit != self._refit:
            raise DisplacedError
        rank, (prepared, self._prepared) = self.rank, (self._prepared, None)
        if prepared is None or not rank.target.is_current(prepared):
            self.streams.displace()
            raise RankFailedError("nothing is prepared on this rank; refit again")
        match order:
            case messages.RefitStep(step="write"):
                reports = rank.write(prepared)
                if not self._keeps_tensors:
                    self.tensors.unmap()
                return {"reports": tuple(reports)}
            case messages.RefitStep(step="finish"):
                return {"reports": tuple(self.streams.finish(prepared))}
            case messages.Take():
                return {"reports": tuple(self.receiver.take(order, prepared))}
            case messages.RefitStep():
                self.streams.begin(prepared)
            case messages.Stream():
                if self.streams.follow(order, prepared):
                    return {"reports": tuple(self.streams.finish(prepared))}
        self._prepared = prepared
        return {}

    def _silence_s(self) -> float:
        """How long to wait for the next order of a stream."""
        prepared = self._prepared
        return prepared.config.timeout_s if prepared is not None and self.streams.state is State.OPEN else 0.0

    def _drop(self) -> None:
        """Drop what is prepared, unless somebody else's refit took its place."""
        prepared, self._prepared = self._prepared, None
        self.streams.displace()
        if prepared is not None and self.rank.target.is_current(prepared):
            self.rank.target.abandon()

    @collector_paused()
    def _make_source(self, order: messages.Prepare) -> Source:
        source = order.source
        if "tensors" not in order.keeps and not isinstance(source, messages.MappedTensors):
            self.tensors.unmap()
        if "buckets" not in order.keeps:
            self.streams.unmap()
        if isinstance(source, messages.MappedTensors):
            return self.tensors.open(source)
        if isinstance(source, messages.Broadcast):
            return self.receiver.source(source)
        if isinstance(source, messages.Files):
            return SafetensorsSource(Path(source.path), judged=source.stamps)
        manifest = None if source.manifest is None else _metadata(source.manifest)
        return PushedSource(manifest, problems=source.problems, odd_scales=source.odd_scales, unfit=source.unfit)

    def forget(self) -> None:
        """Abandon the current refit, and unmap everything."""
        self._refit = ""
        self._drop()
        self.unmap()
        self.receiver.forget()

    def unmap(self) -> None:
        """Unmap all memory of the trainer."""
        self.tensors.unmap()
        self.streams.unmap()


def _metadata(manifest: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorMeta]:
    metadata = {}
    for name, (shape, dtype) in manifest.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise RankFailedError(f"{name}: {dtype!r} is not a dtype of this rank's PyTorch {torch.__version__}")
        metadata[name] = TensorMeta(shape=shape, dtype=kind)
    return metadata
