"""A trainer and the ranks of one or more engines as a broadcast group: NCCL between GPUs, gloo between CPUs.

The group is separate from torch's default process group and from the engines' groups. Its members meet at a store that
the trainer opens, on the loopback address unless told otherwise. Every wait has a deadline, notices if the trainer is
gone or a member gave up, and then leaves nothing pending.

Members that get the same data form a section, to which the trainer sends in addition to what it sends to all. Each
member's broadcasts run in the same order, first to all, then to each section, to avoid deadlock.
"""

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from fp8refit.errors import TransportError
from fp8refit.transport.collective.board import Address, Board, TooLateError
from fp8refit.transport.collective.buckets import MAX_SECTIONS
from fp8refit.transport.collective.links import GlooLink, Link, NcclLink, Seat, Transfer, abort_all, broadcast_all
from fp8refit.transport.collective.store import open_store
from fp8refit.transport.vote import ErrorRecord

Backend: TypeAlias = Literal["nccl", "gloo"]

_ALL_DONE = b"done"
_SPIN_S = 2e-4
"""How long a wait spins first. NCCL launches in its own thread, which takes half this time."""
_POLL_S = 5e-5
_SLOWEST_POLL_S = 2e-3
"""After that, a wait polls often while a bucket is sent, and less often the longer it takes."""
_STORE_POLL_S = 0.2
"""How often a wait asks the store whether a member gave up or is gone."""
_NO_SECTIONS: Mapping[int, Tensor] = MappingProxyType({})


class Meeting(Address, frozen=True):
    """Where the members of a group meet, and how they communicate."""

    size: int = Field(ge=2, le=1 << 16)
    """Number of members: the trainer, which is rank 0, and the ranks of all engines."""
    backend: Backend
    sections: tuple[Annotated[int, Field(ge=0, lt=MAX_SECTIONS)], ...] = Field(default=(), max_length=1 << 16)
    """Section of each member except the trainer; empty if there are none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sections and len(self.sections) != self.size - 1:
            raise ValueError(f"{len(self.sections)} members have a section, but there are {self.size - 1}")
        return self

    def members(self, section: int | None) -> tuple[int, ...]:
        """Members of a section and the trainer, or all members. The trainer comes first."""
        if section is None:
            return tuple(range(self.size))
        return (0, *(rank for rank, found in enumerate(self.sections, 1) if found == section))


class Communicator(Board):
    """One member of a group. Rank 0 is the trainer, which sends.

    The trainer calls `open` and hands its `meeting` to the other members. Every member calls `join`.
    """

    def __init__(self, meeting: Meeting, rank: int, store: Store) -> None:
        super().__init__(meeting, rank, store)
        self.meeting = meeting
        self._links: dict[int | None, Link] = {}
        self._ends_at_s = math.inf
        self._num_votes = 0
        self._met: tuple[str, ...] = ()
        """Keys of the last place where all members met."""

    @classmethod
    def open(
        cls, *, host: str, port: int, size: int, backend: Backend, timeout_s: float, sections: tuple[int, ...] = ()
    ) -> "Communicator":
        """Open the store where all members meet, as rank 0.

        Args:
            host: Address of this host that the members can reach. The store binds to it.
            port: 0 for any free port.
            size: Number of members, including this one.
            backend: What carries the bytes.
            timeout_s: For every exchange with the store.
            sections: See `Meeting`.

        Raises:
            TransportError: The address is not one of this host's, or is in use.
        """
        store, token, port = open_store(host=host, port=port, timeout_s=timeout_s)
        meeting = Meeting(token=token, host=host, port=port, size=size, backend=backend, sections=sections)
        return cls(meeting, 0, store)

    def join(self, device: torch.device, *, timeout_s: float) -> None:
        """Wait for every member, and connect to them.

        Args:
            device: Device of this member's buffers.
            timeout_s: Total time.

        Raises:
            TransportError: A member did not come, or cannot be connected to; names the missing ones.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._failing():
            self._store.set(f"here/{self.rank}", "here")
            try:
                self._meet("here", deadline_s)
            except TooLateError:
                absent = ", ".join(str(rank) for rank in range(self.meeting.size) if not self._has([f"here/{rank}"]))
                raise TransportError(
                    f"member(s) {absent or 'that came late'} of {self.meeting.size} did not join within {timeout_s:g} s; 0 is "
                    "the trainer"
                ) from None
            self._connect(None, device, deadline_s)
            for section in sorted(set(self.meeting.sections)):
                if self.rank == 0 or section == self.section:
                    self._connect(section, device, deadline_s)
        # Nobody may go on, fail and leave while others are still connecting.
        self.agree(None, timeout_s=max(deadline_s - time.monotonic(), 1.0))

    def broadcast(self, buffer: Tensor, *, timeout_s: float, sections: Mapping[int, Tensor] = _NO_SECTIONS) -> Transfer:
        """Start sending `buffer` from rank 0 to all others. Every member calls this in the same order.

        Args:
            buffer: uint8, contiguous, on the device passed to `join`. Earlier work on the current stream comes first. Do
                not touch it before `wait` returns.
            timeout_s: Time for the previous broadcast to start. With NCCL, a broadcast starts 0.2 ms after the call, which
                does not wait for it.
            sections: What rank 0 sends to each section in addition; others pass a buffer for their own.

        Raises:
            TransportError: A member is gone or gave up.
        """
        links, deadline_s = self._require_links(), time.monotonic() + timeout_s
        parts = [(links[section], part) for section, part in ((None, buffer), *sorted(sections.items()))]
        with self._failing():
            # All of them in one group, so that every member launches the kernels in the same order.
            self._poll(lambda: all(link.is_settled() for link in links.values()), deadline_s)
            broadcast_all(parts, timeout_s)
            return Transfer.of([link.transfer() for link, _ in parts])

    def wait(self, transfer: Transfer, *, timeout_s: float) -> None:
        """Wait until a broadcast is over, on the device too.

        Raises:
            TransportError: A member is gone, gave up, or was too late. The group has ended.
        """
        with self._failing():
            self._poll(transfer.is_done, time.monotonic() + timeout_s)
            transfer.finish()

    def agree(self, error: BaseException | None, *, timeout_s: float) -> None:
        """Wait until every member has succeeded or one has failed. Every member calls this in the same order.

        Args:
            error: Why this member failed, if it did.
            timeout_s: Time for the slowest member.

        Raises:
            RefitError: `error`, or another member's error.
            TransportError: A member is gone, gave up, or was too late.
        """
        if self._is_ended:  # a late answer from the store would be taken for that of this vote
            raise error if error is not None else self._has_ended()
        self._num_votes += 1
        with self._failing():
            failed = ErrorRecord.of(error).model_dump_json() if error is not None else None
            said = self._meet(f"vote/{self._num_votes}", time.monotonic() + timeout_s, failed=failed)
        if error is not None:
            raise error
        if said != _ALL_DONE:
            raise ErrorRecord.model_validate_json(said).error()

    def _meet(self, where: str, deadline_s: float, *, failed: str | None = None) -> bytes:
        """Wait until every member has come, or one has failed. The first that fails says why, and the last that comes says that
        all have, so each member asks for one key, however many they are.

        Returns:
            What was said.

        Raises:
            TooLateError: The deadline passed.
            TransportError: A member gave up.
        """
        over = f"{where}/over"
        if failed is not None:
            self._store.compare_set(over, "", failed)
        if self._store.add(f"{where}/count", 1) == self.meeting.size:
            self._store.compare_set(over, "", _ALL_DONE.decode())
            for key in self._met:  # everyone has left there
                self._store.delete_key(key)
        self._poll(lambda: self._has([over]), deadline_s)
        self._met = over, f"{where}/count"
        return self._store.get(over)

    def expect_end(self, why: str, *, within_s: float = 2.0) -> None:
        """Give up this member's waits unless they end by themselves within `within_s`. Called from another thread.

        If all members know of an error, waits end by themselves. If only some do, nothing more arrives.
        """
        self._why = why
        self._ends_at_s = min(self._ends_at_s, time.monotonic() + within_s)

    @override
    def abort(self, why: str = "the group was left") -> None:
        links, self._links = self._links, {}
        super().abort(why if self._ends_at_s == math.inf else self._why)
        abort_all(list(links.values()))

    @property
    def is_joined(self) -> bool:
        """Whether the group can be used."""
        return bool(self._links) and not self._is_ended

    @property
    def section(self) -> int | None:
        """This member's section; None for the trainer, which is in all, and if there are none."""
        return self.meeting.sections[self.rank - 1] if self.meeting.sections and self.rank else None

    def _require_links(self) -> dict[int | None, Link]:
        if not self._links:
            raise self._has_ended()
        return self._links

    def _connect(self, section: int | None, device: torch.device, deadline_s: float) -> None:
        """Connect to all members, or to those of a section. All connect in the same order."""
        members = self.meeting.members(section)
        seat = Seat(
            store=PrefixStore("all" if section is None else f"section {section}", self._store),
            trainer=(self.meeting.host, self.meeting.port),
            rank=members.index(self.rank),
            size=len(members),
            device=device,
            timeout_s=max(deadline_s - time.monotonic(), 1.0),
        )
        first = self._links.get(None)
        link = NcclLink(seat, first) if self.meeting.backend == "nccl" else GlooLink(seat)
        self._links[section] = link
        self._poll(link.is_settled, deadline_s)

    def _poll(self, is_done: Callable[[], bool], deadline_s: float) -> None:
        """Wait for `is_done`.

        Raises:
            TooLateError: The deadline passed.
            TransportError: A member gave up.
            RuntimeError: The store is gone, or the operation failed.
        """
        start_s = time.monotonic()
        next_look_s, pause_s = start_s + _STORE_POLL_S, _POLL_S
        while not is_done():
            now_s = time.monotonic()
            if self._is_ended or now_s > self._ends_at_s:
                raise TransportError(self._why)
            if now_s > deadline_s:
                raise TooLateError("it takes too long, or a member stopped")
            if now_s > next_look_s:
                if said := self.first_word():
                    raise TransportError(said)
                next_look_s = now_s + _STORE_POLL_S
            if now_s < start_s + _SPIN_S:
                time.sleep(0)  # let other threads run
                continue
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, _SLOWEST_POLL_S)
