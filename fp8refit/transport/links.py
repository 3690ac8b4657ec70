"""What carries the bytes of a broadcast between some members of a group: NCCL or gloo.

Nothing here waits for a broadcast: whoever began one asks whether it is over.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, Store, Work

from fp8refit.errors import TransportError
from fp8refit.transport.nccl import NcclCommunicator, abort_together, launched_together, terms, unique_id

_OUTLIVE_S = 0.1


class Transfer:
    """One broadcast under way."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], None] = lambda: None) -> None:
        self.is_done = is_done
        self.finish = finish

    @classmethod
    def of(cls, transfers: Sequence["Transfer"]) -> "Transfer":
        """Several that began one after another, as one."""

        def finish() -> None:
            for transfer in transfers:
                transfer.finish()

        return cls(lambda: all(transfer.is_done() for transfer in transfers), finish)


class Link(Protocol):
    """What carries the bytes."""

    def is_settled(self) -> bool:
        """Whether it is ready for the next broadcast. It is asked until it is."""
        ...

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Begin one, which will be waited for so long."""
        ...

    def transfer(self) -> Transfer:
        """The broadcast that began last."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seat:
    """Of one member among those that one link connects."""

    store: Store
    """At which they meet, and nobody else."""
    trainer: tuple[str, int]
    """Address of the trainer, which is rank 0."""
    rank: int
    size: int
    device: torch.device
    timeout_s: float
    """To connect."""


class NcclLink:
    """Between GPUs.

    Args:
        seat: Of this member.
        beside: Its first link, whose stream all others run on: their kernels follow one another as they were asked for.

    Raises:
        TransportError: NCCL refuses.
    """

    def __init__(self, seat: Seat, beside: "Link | None") -> None:
        if seat.rank == 0:
            seat.store.set("nccl", json.dumps([unique_id().hex(), terms()]))
        seat.store.wait(["nccl"], timedelta(seconds=seat.timeout_s))
        name, wanted = json.loads(seat.store.get("nccl"))
        _hold_terms(wanted)
        self.communicator = NcclCommunicator(
            bytes.fromhex(name),
            rank=seat.rank,
            size=seat.size,
            device=seat.device,
            stream=beside.stream if isinstance(beside, NcclLink) else None,
        )
        self._last: torch.cuda.Event | None = None
        """Of the broadcast that began last, until it is known to be on the stream: the event comes after it."""

    @property
    def stream(self) -> torch.cuda.Stream:
        """What its broadcasts run on."""
        return self.communicator.stream

    def is_settled(self) -> bool:
        """See `Link`."""
        if not self.communicator.is_settled():
            return False
        if self._last is not None:
            self._last.record(self.stream)
            self._last = None
        return True

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """See `Link`."""
        self.communicator.broadcast(buffer, root=0)

    def transfer(self) -> Transfer:
        """See `Link`."""
        event = self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def is_done() -> bool:
            self.is_settled()  # raises what befell a peer
            return self._last is not event and bool(event.query())  # type: ignore[no-untyped-call]

        return Transfer(is_done)


def _hold_terms(wanted: Mapping[str, str]) -> None:
    """Hold that NCCL is here what it is at the trainer.

    Raises:
        TransportError: It is not; says in what, and what to do.
    """
    here = terms()
    for name, value in wanted.items():
        if here.get(name) != value:
            what = "install the same PyTorch for both" if name == "NCCL" else f"set {name} to the same for both"
            raise TransportError(
                f"the trainer has {name}={value}, this rank has {name}={here.get(name)}, with which they cannot be connected; "
                f"{what}, before they start"
            )


class GlooLink:
    """Between CPUs; tensors of a GPU go through memory of its host.

    Args:
        seat: Of this member.

    Raises:
        RuntimeError: Another member does not come.
    """

    def __init__(self, seat: Seat) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(*seat.trainer))]
        options._timeout = timedelta(seconds=seat.timeout_s)
        options._threads = 2
        self._rank = seat.rank
        self._group = ProcessGroupGloo(seat.store, seat.rank, seat.size, options)
        self._transfer: Transfer | None = None
        self._works: list[Work] = []

    def is_settled(self) -> bool:
        """See `Link`."""
        return True

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """See `Link`."""
        host = buffer.cpu() if buffer.is_cuda else buffer
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        # One bucket may be begun while another is waited for; who waits has a deadline of its own.
        options.timeout = timedelta(seconds=2 * timeout_s)
        work: Work = self._group.broadcast([host], options)  # type: ignore[attr-defined]

        @torch.inference_mode()
        def finish() -> None:
            work.wait()  # at once; raises what befell a peer
            if host is not buffer and self._rank:
                buffer.copy_(host)
                torch.cuda.synchronize(buffer.device)

        self._works = [*(other for other in self._works if not other.is_completed()), work]
        self._transfer = Transfer(work.is_completed, finish)

    def transfer(self) -> Transfer:
        """See `Link`."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None, "transfer() follows broadcast()"
        return transfer

    def abort(self) -> None:
        """End whatever is under way."""
        # A group that goes while something is under way stops the whole process until that has timed out: a thread keeps it.
        if not all(work.is_completed() for work in self._works):
            threading.Thread(target=_outlive, args=(self._group, self._works), daemon=True).start()


def broadcast_all(parts: Sequence[tuple[Link, Tensor]], timeout_s: float) -> None:
    """Begin a broadcast on each of several links of one member, which follow one another on its GPU.

    Raises:
        TransportError: NCCL refuses.
    """
    is_one_launch = len(parts) > 1 and all(isinstance(link, NcclLink) for link, _ in parts)
    with launched_together() if is_one_launch else nullcontext():
        for link, part in parts:
            link.broadcast(part, timeout_s)


def abort_all(links: Sequence[Link]) -> None:
    """End whatever is under way on the links of one member. To be called again is harmless."""
    abort_together([link.communicator for link in links if isinstance(link, NcclLink)])
    for link in links:
        if isinstance(link, GlooLink):
            link.abort()


def _outlive(group: object, works: list[Work]) -> None:
    """Hold a group until everything that it has under way has ended."""
    while not all(work.is_completed() for work in works):
        time.sleep(_OUTLIVE_S)


def _own_address(host: str, port: int) -> str:
    """The address of this host by which it reaches the trainer's, and so the other members' hosts."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
