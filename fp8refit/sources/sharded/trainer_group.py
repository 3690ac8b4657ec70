"""How a trainer's ranks agree on what they gather: before the first collective operation, at each one, and after the
last.

Each rank makes a statement and hears all others. Then all go on, or all raise the same error.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from pydantic import BaseModel
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_store

from fp8refit.errors import EngineLostError, RankFailedError, RefitError
from fp8refit.sources.sharded.owned import Holding
from fp8refit.transport.process_group import ProcessGroupExchange
from fp8refit.transport.vote import ErrorRecord, Group, SoloGroup, merge_errors

if TYPE_CHECKING:  # not in every build
    from torch.distributed import ProcessGroupGloo

_POLL_S = 2e-3
_STORE_S = 1.0
_LEFT = "left"
_Answer = TypeVar("_Answer")

Step: TypeAlias = Literal["plan", "read", "batch", "end", "done", "follow", "names"]


class Statement(BaseModel, frozen=True):
    """What one rank says at one step."""

    step: Step
    """What the rank does. `plan`: asks what there is. `read`: wants to gather everything. `batch`, `end`: is within or at
    the end of that. `done`: will not gather again. `follow`: does what the others do."""
    place: int = 0
    """Number of the batch."""
    max_bytes: int = 0
    digest: str = ""
    """Digest of everything that is gathered."""
    names: tuple[str, ...] = ()
    """Everything that is gathered, one line each. Sent only after digests differed."""
    holdings: tuple[Holding, ...] = ()
    """Everything this rank holds, if ranks may hold different tensors."""
    error: ErrorRecord | None = None


class Trainers:
    """The ranks of one trainer while they gather one state dict. Every rank must make the same calls in the same order.

    Args:
        group: How they reach each other.
        timeout_s: Seconds to wait for the others at each step.

    Attributes:
        is_over: Whether nothing more will be gathered: all ranks are done or have answers of an error.
    """

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        self._group = group
        self.timeout_s = timeout_s
        self.is_over = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._group.size

    def exchange(self, own: Statement, error: BaseException | None = None) -> list[Statement]:
        """Send `own`, or an error, and return every rank's statement in rank order.

        Raises:
            RefitError: The ranks' errors combined; RankFailedError if a rank died, did not answer in time, or is at
                another step.
            BaseException: `error` itself, if it is not a `RefitError`.
        """
        if self.is_over:
            raise RankFailedError(
                "this state dict can no longer be gathered; make a new one on every rank of the trainer"
            )
        if error is not None:
            own = own.model_copy(update={"error": ErrorRecord.of(error)})
        try:
            answers = self._exchange(own)
            failed = {rank: said.error for rank, said in enumerate(answers) if said.error is not None}
            if error is not None and not isinstance(error, RefitError):
                raise error
            if failed:
                raise merge_errors(failed, num_ranks=len(answers)) from error
            _check_are_in_step(answers)
        except BaseException:
            self.is_over = True
            raise
        return answers

    def _exchange(self, own: Statement) -> list[Statement]:
        try:
            messages = self._group.exchange(own.model_dump_json().encode(), timeout_s=self.timeout_s)
        except EngineLostError as error:
            raise RankFailedError(
                f"rank {self._group.rank} of {self._group.size} of the trainer was at {own.step!r} and did not hear from every "
                f"other rank within {self.timeout_s:g} s, or one of them died. Every rank of the trainer must take part: in "
                "refit if each has an engine, else in fp8refit.gathered(...), joined or left as a context by those that do "
                "not refit"
            ) from error
        return [Statement.model_validate_json(message) for message in messages]


def _check_are_in_step(answers: list[Statement]) -> None:
    """Check that all ranks do the same, or follow.

    Raises:
        RankFailedError: They do not.
    """
    places = {(said.step, said.place) for said in answers if said.step != "follow"}
    if len(places) > 1:
        steps = ", ".join(f"rank {rank} is at {said.step!r} {said.place}" for rank, said in enumerate(answers))
        raise RankFailedError(
            f"the ranks of the trainer are out of step: {steps}. All of them must read the state dict alike, or join"
        )


def trainer_group(group: ProcessGroup | None) -> Group:
    """Return the ranks of `group`, or of the default group. They vote over a group of their own."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return SoloGroup()
    group = group if group is not None else torch.distributed.group.WORLD
    assert group is not None, "initialized"
    return SoloGroup() if group.size() == 1 else VoteGroup(group)


_voting: WeakKeyDictionary[ProcessGroup, "_Votes"] = WeakKeyDictionary()
"""The connections over which the ranks of a trainer's group vote."""


class VoteGroup:
    """Implements `Group` for the ranks of a trainer's process group, apart from it, over gloo, whatever the trainer does there.

    The first vote connects them. The connections end with the trainer's group, and with a vote that failed. A vote can fail on
    one rank alone, whose time is over when the others' just is not: they meet it again in their next vote.

    Args:
        group: The trainer's group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Send `message` to every rank and return all, in rank order."""
        deadline_s = time.monotonic() + timeout_s
        try:
            if self._group in _voting:
                try:
                    return _voting[self._group].vote(message, timeout_s)
                except EngineLostError:
                    if not _voting[self._group].is_left():
                        raise
                    _voting.pop(self._group).linger(timeout_s)
            _voting[self._group] = _connect(self._group, deadline_s - time.monotonic())
            return _voting[self._group].vote(message, max(deadline_s - time.monotonic(), 0.0))
        except (EngineLostError, RuntimeError) as error:
            if (votes := _voting.pop(self._group, None)) is not None:
                votes.leave()
            raise error if isinstance(error, EngineLostError) else EngineLostError(str(error)) from error


class _Votes:
    """Connections of the ranks of a group, and how many votes were taken over them.

    Args:
        group: What they vote in.
        store: A store for these connections alone. Who leaves says in it with which vote.
    """

    def __init__(self, group: "ProcessGroupGloo", store: PrefixStore) -> None:
        self._group, self._store = group, store
        self._num_votes = 0

    def vote(self, message: bytes, timeout_s: float) -> list[bytes]:
        """Send `message` to every rank and return all, in rank order."""
        self._num_votes += 1
        if hasattr(self._group, "_set_default_timeout"):  # a vote that waits longer than this rank would hold it up
            self._group._set_default_timeout(timedelta(seconds=timeout_s))
        return ProcessGroupExchange(self._group, self.is_left).exchange(message, timeout_s=timeout_s)

    def is_left(self) -> bool:
        """Return whether another rank has left in an earlier vote than this rank's last."""
        is_said = _ask(lambda: self._store.check([_LEFT]))
        return bool(is_said) and int(_ask(lambda: self._store.get(_LEFT)) or self._num_votes) < self._num_votes

    def leave(self) -> None:
        """Tell the others that this rank votes here no more."""
        _ask(lambda: self._store.set(_LEFT, str(self._num_votes)))

    def linger(self, duration_s: float) -> None:
        """Keep the connections until their last operation is over at the latest: to end them earlier would wait for it."""
        Thread(target=lambda kept: time.sleep(duration_s), args=(self,), daemon=True).start()


def _ask(question: Callable[[], _Answer]) -> _Answer | None:
    """Ask a store. If its host is gone it may never answer, so that gives None after a second."""
    answers: list[_Answer] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_S)
    return answers[0] if answers else None


def _connect(group: ProcessGroup, timeout_s: float) -> "_Votes":
    """Connect the ranks of a group anew. They meet at its store.

    Each rank leaves a new ticket for the first, which answers it with the place to meet. A rank that gives up takes its ticket
    back, so the next attempt does not wait for it.

    Raises:
        RuntimeError: They are not all there in time.
    """
    from torch.distributed import ProcessGroupGloo

    deadline_s, rank, ticket = time.monotonic() + timeout_s, group.rank(), uuid4().hex
    store = PrefixStore("fp8refit", _get_process_group_store(group))

    def read(key: str) -> str:
        return bytes(store.get(key)).decode() if store.check([key]) else ""

    def wait_for(*keys: str) -> list[str]:
        while not all(values := [read(key) for key in keys]):
            if time.monotonic() > deadline_s:
                raise RuntimeError("a rank did not come in time")
            time.sleep(_POLL_S)
        return values

    if rank > 0:
        store.set(str(rank), ticket)
        try:
            (place,) = wait_for(ticket)
        except BaseException:
            store.compare_set(str(rank), ticket, "")
            raise
        store.delete_key(ticket)
    else:
        place, others = ticket, [str(other) for other in range(1, group.size())]
        for other, answered in zip(others, wait_for(*others), strict=True):
            store.compare_set(other, answered, "")
            store.set(answered, place)
    own, left_s = PrefixStore(place, store), max(deadline_s - time.monotonic(), 0.0)
    return _Votes(ProcessGroupGloo(own, rank, group.size(), timedelta(seconds=left_s)), own)


@contextmanager
def waits_at_most(group: ProcessGroup | None, timeout_s: float) -> Iterator[None]:
    """Limit how long operations of a process group, such as a trainer's own, wait for a rank that is gone."""
    limits = []
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = group if group is not None else torch.distributed.group.WORLD
        assert group is not None, "initialized"
        backends = {id(each): each for each in map(group._get_backend, group._device_types)}
        # Older torch has no such limit; the operations' own applies.
        limits = [(each, each.options._timeout) for each in backends.values() if hasattr(each, "_set_default_timeout")]
    for backend, longest in limits:
        backend._set_default_timeout(min(longest, timedelta(seconds=timeout_s)))
    try:
        yield
    finally:
        for backend, longest in limits:
            backend._set_default_timeout(longest)
