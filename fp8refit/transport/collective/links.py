"""What carries the bytes of a broadcast between members of a group: NCCL or gloo.

Nothing here waits for a broadcast. Callers ask whether it is over.
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
from typing_extensions import override

from fp8refit.errors import TransportError
from fp8refit.transport.collective.nccl import NcclCommunicator, abort_together, launched_together, terms, unique_id

_OUTLIVE_S = 0.1


class Transfer:
    """A broadcast that was started."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], None] = lambda: None) -> None:
        self.is_done = is_done
        self.finish = finish

    @classmethod
    def of(cls, transfers: Sequence["Transfer"]) -> "Transfer":
        """Combine several broadcasts, started one after another, into one."""

        def finish() -> None:
            for transfer in transfers:
                transfer.finish()

        return cls(lambda: all(transfer.is_done() for transfer in transfers), finish)


class Link(Protocol):
    """What carries the bytes."""

    def is_settled(self) -> bool:
        """Whether it is ready for the next broadcast. Ask until it is."""
        ...

    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Start a broadcast. The caller will wait for it for at most `timeout_s`."""
        ...

    def transfer(self) -> Transfer:
        """Return the last broadcast that was started."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seat:
    """One member's place in a link."""

    store: Store
    """Where the link's members, and only they, meet."""
    trainer: tuple[str, int]
    """Address of the trainer, which is rank 0."""
    rank: int
    size: int
    device: torch.device
    timeout_s: float
    """Time to connect."""


class NcclLink(Link):
    """A link between GPUs.

    Args:
        seat: This member's seat.
        beside: This member's first link. All others run on its stream, so that kernels run in the order of the calls.

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
        """Event after the last broadcast, until that is known to be on the stream."""

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of its broadcasts."""
        return self.communicator.stream

    @override
    def is_settled(self) -> bool:
        """Whether NCCL is ready for the next broadcast."""
        if not self.communicator.is_settled():
            return False
        if self._last is not None:
            self._last.record(self.stream)
            self._last = None
        return True

    @override
    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Start a broadcast on the stream."""
        self.communicator.broadcast(buffer, root=0)

    @override
    def transfer(self) -> Transfer:
        """Return the last broadcast that was started."""
        event = self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def is_done() -> bool:
            self.is_settled()  # raises the error of a peer, if any
            return self._last is not event and bool(event.query())  # type: ignore[no-untyped-call]

        return Transfer(is_done)


def _hold_terms(wanted: Mapping[str, str]) -> None:
    """Check that NCCL is configured as at the trainer.

    Raises:
        TransportError: It is not. The message names the difference and the remedy.
    """
    here = terms()
    for name, value in wanted.items():
        if here.get(name) != value:
            what = "install the same PyTorch for both" if name == "NCCL" else f"set {name} to the same for both"
            raise TransportError(
                f"the trainer has {name}={value}, but this rank has {name}={here.get(name)}, so they cannot be connected; "
                f"{what}, before they start"
            )


class GlooLink(Link):
    """A link between CPUs. Tensors on a GPU go through host memory.

    Args:
        seat: This member's seat.

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

    @override
    def is_settled(self) -> bool:
        """Return True: gloo queues broadcasts."""
        return True

    @override
    def broadcast(self, buffer: Tensor, timeout_s: float) -> None:
        """Start a broadcast."""
        host = buffer.cpu() if buffer.is_cuda else buffer
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        # One bucket may start while another is being waited for. Waits have their own deadlines.
        options.timeout = timedelta(seconds=2 * timeout_s)
        work: Work = self._group.broadcast([host], options)  # type: ignore[attr-defined]

        @torch.inference_mode()
        def finish() -> None:
            work.wait()  # returns at once; raises the error of a peer, if any
            if host is not buffer and self._rank:
                buffer.copy_(host)
                torch.cuda.synchronize(buffer.device)

        self._works = [*(other for other in self._works if not other.is_completed()), work]
        self._transfer = Transfer(work.is_completed, finish)

    @override
    def transfer(self) -> Transfer:
        """Return the last broadcast that was started."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None, "transfer() follows broadcast()"
        return transfer

    def abort(self) -> None:
        """End whatever is pending."""
        # Destroying a group with pending work blocks the process until that times out, so a thread keeps the group.
        if not all(work.is_completed() for work in self._works):
            threading.Thread(target=_outlive, args=(self._group, self._works), daemon=True).start()


def broadcast_all(parts: Sequence[tuple[Link, Tensor]], timeout_s: float) -> None:
    """Start a broadcast on each of a member's links. On its GPU they run one after another.

    Raises:
        TransportError: NCCL refuses.
    """
    is_one_launch = len(parts) > 1 and all(isinstance(link, NcclLink) for link, _ in parts)
    with launched_together() if is_one_launch else nullcontext():
        for link, part in parts:
            link.broadcast(part, timeout_s)


def abort_all(links: Sequence[Link]) -> None:
    """End whatever is pending on a member's links. May be called repeatedly."""
    abort_together([link.communicator for link in links if isinstance(link, NcclLink)])
    for link in links:
        if isinstance(link, GlooLink):
            link.abort()


def _outlive(group: object, works: list[Work]) -> None:
    """Keep a group until all of its pending work has ended."""
    while not all(work.is_completed() for work in works):
        time.sleep(_OUTLIVE_S)


def _own_address(host: str, port: int) -> str:
    """Return the address from which this host reaches the trainer's, and so those of other members."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
