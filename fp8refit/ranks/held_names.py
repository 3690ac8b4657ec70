"""Tracks which checkpoint names each rank of an engine holds; they differ under pipeline and expert parallelism."""

import hashlib
from collections.abc import Callable, Sequence

from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import Inventory
from fp8refit.tracing.reads import refusals_of
from fp8refit.transport.vote import Ballot


class HeldNames:
    """The names of one rank, and what it knows about the others'. Does nothing for a single rank.

    Attributes:
        digest: Digest of the names that this rank holds and of what it reads of them.
        foreign: Names that only other ranks hold.
    """

    def __init__(self) -> None:
        self._inventory: Inventory | None = None
        self._names: frozenset[str] = frozenset()
        self._known: tuple[str, ...] = ()
        """The digests of all ranks when `foreign` was learned."""
        self.digest = ""
        self.foreign: frozenset[str] = frozenset()

    def note(self, inventory: Inventory) -> None:
        """Record what this rank holds."""
        if self._inventory is inventory:
            return
        names = inventory.names
        parts = (f"{name} {part.boxes}" for name, part in inventory.partly_read.items())
        digest = hashlib.sha256("\n".join([*sorted(names), *sorted(parts)]).encode()).hexdigest()
        self._inventory, self._names, self.digest = inventory, names, digest

    def are_known(self, ballots: Sequence[Ballot]) -> bool:
        """Whether all ranks hold what they held when `foreign` was learned."""
        return tuple(ballot.held for ballot in ballots) == self._known

    def learn(self, ballots: Sequence[Ballot], ask: Callable[..., Sequence[Ballot]]) -> None:
        """Learn the names of the other ranks, if they have changed since the last time.

        Args:
            ballots: One per rank, with digests.
            ask: Exchanges ballots with the given names. Called by all ranks or none.

        Raises:
            UnsupportedEngineError: All ranks together do not read some tensor whole. Raised on every rank.
        """
        if self.are_known(ballots):
            return
        held, foreign = tuple(ballot.held for ballot in ballots), frozenset[str]()
        if self._inventory is not None:
            reads = [self._inventory.partly_read]
            if len(set(held)) > 1:
                answers = ask(names=tuple(sorted(self._names)), partly_read=dict(self._inventory.partly_read))
                foreign = frozenset(name for answer in answers for name in answer.names) - self._names
                reads = [answer.partly_read for answer in answers]
            if refusals := refusals_of(reads):
                raise UnsupportedEngineError("this engine cannot be refitted", [str(refusal) for refusal in refusals])
        self._known, self.foreign = held, foreign
