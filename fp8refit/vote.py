"""How the ranks of one engine agree: errors as values, ballots, and the exchange of them.

Every step of a refit ends in a vote. Each rank says whether it could, every rank hears every other, and all of them go on or
all of them raise the same error. An error never crosses a process as an exception.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict

import fp8refit.errors
from fp8refit.errors import (
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    RefitError,
    UnsupportedEngineError,
)
from fp8refit.files import FilesRead
from fp8refit.report import KvReport, RankReport
from fp8refit.slots import PartlyRead

Phase: TypeAlias = Literal["ready", "names", "prepared", "go", "written", "measured", "scaled"]


class ErrorRecord(BaseModel):
    """An error as a value."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """Class name of a `RefitError`; anything else was not foreseen."""
    message: str
    items: tuple[str, ...] = ()
    """Problems of the source, names of tensors, or reasons."""
    written: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "ErrorRecord":
        """Describe `error`."""
        if not isinstance(error, RefitError):
            return cls(kind="RankFailedError", message=f"{type(error).__name__}: {error}")
        kinds = (base.__name__ for base in type(error).__mro__ if base.__module__ == fp8refit.errors.__name__)
        kind, message = next(kinds), str(error)
        if isinstance(error, InvalidSourceError):
            return cls(kind=kind, message=message, items=error.problems, written=error.written)
        if isinstance(error, NonFiniteError):
            return cls(kind=kind, message=message, items=error.names, written=error.written)
        if isinstance(error, UnsupportedEngineError):
            return cls(kind=kind, message=message.partition("\n")[0], items=error.reasons)
        return cls(kind=kind, message=message)

    def error(self) -> RefitError:
        """The error described."""
        if self.kind == "InvalidSourceError":
            return InvalidSourceError(self.items, written=self.written)
        if self.kind == "NonFiniteError":
            return NonFiniteError(self.items, written=self.written)
        if self.kind == "UnsupportedEngineError":
            return UnsupportedEngineError(self.message, self.items)
        kind = getattr(fp8refit.errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, RefitError):
            return kind(self.message)
        return RankFailedError(f"{self.kind}: {self.message}")


class Ballot(BaseModel):
    """What one rank says at the end of one step."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    error: ErrorRecord | None = None
    claim: str = ""
    """What has to be equal on every rank: the source that was read."""
    files: FilesRead | None = None
    """What this rank opened, if the source is files."""
    held: str = ""
    """Digest of the names that this rank holds, and of what it reads of them."""
    names: tuple[str, ...] = ()
    partly_read: dict[str, PartlyRead] = {}
    """Checkpoint tensors that this rank does not read whole."""
    version: int = 0
    asked: str = ""
    """How this rank's driver wants to refit: one that waits less than the others would give up on them."""
    report: RankReport | None = None
    amax: dict[str, float] = {}
    """What a calibration pass showed on this rank."""
    kv: KvReport | None = None


class Group(Protocol):
    """The ranks of one engine, as this rank reaches them."""

    @property
    def rank(self) -> int:
        """Place of this rank among them."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Give `message` to every rank and get one from each, in order of rank. Every rank calls it.

        Raises:
            EngineLostError: A rank died, or did not come within `timeout_s`.
        """
        ...


class SoloGroup:
    """An engine of one rank."""

    rank = 0
    size = 1

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """See `Group`."""
        return [message]


def vote(group: Group, ballot: Ballot, error: BaseException | None, *, timeout_s: float) -> list[Ballot]:
    """Exchange `ballot` and agree. Every rank of `group` calls it at the same step.

    Args:
        group: The ranks.
        ballot: What this rank says, without its error.
        error: What this rank could not do.
        timeout_s: Seconds to wait for the others.

    Returns:
        Every rank's ballot, in order of rank, if all of them could.

    Raises:
        RefitError: The ranks' errors as one, or EngineLostError if a rank does not answer.
        BaseException: `error` itself, if it is none of ours.
    """
    if group.size == 1:
        if error is not None:
            raise error
        return [ballot]
    if error is not None:
        ballot = ballot.model_copy(update={"error": ErrorRecord.of(error)})
    answers = group.exchange(ballot.model_dump_json().encode(), timeout_s=timeout_s)
    ballots = [Ballot.model_validate_json(answer) for answer in answers]
    if error is not None and not isinstance(error, RefitError):
        raise error
    verdict = _judge(ballots)
    if verdict is not None:
        raise verdict from error
    return ballots


def _judge(ballots: Sequence[Ballot]) -> RefitError | None:
    """The error that every rank raises, or None."""
    steps = [f"rank {rank} is at {ballot.phase!r}" for rank, ballot in enumerate(ballots)]
    if len({ballot.phase for ballot in ballots}) > 1:
        return EngineLostError(
            f"the ranks are out of step: {', '.join(steps)}. Every rank has to call refit, in the same order; start the "
            "engine again"
        )
    failed = {rank: ballot.error for rank, ballot in enumerate(ballots) if ballot.error is not None}
    if failed:
        return merge_errors(failed, num_ranks=len(ballots))
    if len({ballot.asked for ballot in ballots}) > 1:
        return RankFailedError(
            "the drivers of the ranks want to refit in different ways; give all the same RefitConfig"
        )
    if ballots[0].phase in ("prepared", "written") and len({ballot.claim for ballot in ballots}) > 1:
        return InvalidSourceError(
            ["source: the ranks were given different names, shapes or dtypes; pass every rank the same state dict"],
            written=ballots[0].phase == "written",
        )
    read = [ballot.files for ballot in ballots if ballot.files is not None]
    if moved := {first.path for first, second in combinations(read, 2) if first.clashes_with(second)}:
        return InvalidSourceError(
            [
                f"{path}: was replaced or changed while the ranks opened it; write every checkpoint under a name of its own, "
                "then refit again"
                for path in sorted(moved)
            ]
        )
    return None


_GRAVITY = ("EngineLostError", "RankFailedError", "UnsupportedEngineError", "InvalidSourceError", "NonFiniteError")


def merge_errors(failed: dict[int, ErrorRecord], *, num_ranks: int, is_agreed: bool = False) -> RefitError:
    """One error for those of several ranks: the gravest kind, with what every rank of that kind found.

    Args:
        failed: By rank.
        num_ranks: How many ranks there are.
        is_agreed: Whether these are answers after a vote, which say already whose error it is.
    """
    kinds = {record.kind for record in failed.values()}
    kind = next((kind for kind in _GRAVITY if kind in kinds), next(iter(failed.values())).kind)
    records = {rank: record for rank, record in failed.items() if record.kind == kind}
    first = next(iter(records.values()))
    if first.items:
        items = dict.fromkeys(item for record in records.values() for item in record.items)
        written = any(record.written for record in records.values())
        return first.model_copy(update={"items": tuple(items), "written": written}).error()
    if num_ranks == 1 or is_agreed:
        return first.error()
    ranks = "all ranks" if len(records) == num_ranks else ", ".join(f"rank {rank}" for rank in records)
    return first.model_copy(update={"message": f"{ranks}: {first.message}"}).error()
