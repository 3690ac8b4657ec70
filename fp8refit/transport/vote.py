"""How the ranks of one engine agree: errors as values, ballots, and their exchange.

Every step of a refit ends in a vote. Each rank says whether it succeeded and hears all others; then all go on, or all
raise the same error. An error never crosses processes as an exception.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, Protocol, TypeAlias

from pydantic import BaseModel
from typing_extensions import override

import fp8refit.errors
from fp8refit.errors import (
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    RefitError,
    UnsupportedEngineError,
)
from fp8refit.live.slots import PartlyRead
from fp8refit.report import KvReport, RankReport
from fp8refit.transport.stamps import FilesRead

Phase: TypeAlias = Literal["ready", "names", "prepared", "go", "held", "untouched", "written", "measured", "scaled"]


class ErrorRecord(BaseModel, frozen=True):
    """An error as a value."""

    kind: str
    """Class name of a `RefitError`, or of an unexpected error."""
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
        """Recreate the error."""
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


class Ballot(BaseModel, frozen=True):
    """What one rank says at the end of a step."""

    phase: Phase
    error: ErrorRecord | None = None
    claim: str = ""
    """What must be equal on every rank: the source that was read. At "held": whether this rank holds some tensors."""
    files: FilesRead | None = None
    """The files that this rank opened, if the source is files."""
    held: str = ""
    """Digest of the names that this rank holds, and of what it reads of them."""
    names: tuple[str, ...] = ()
    partly_read: dict[str, PartlyRead] = {}
    """Checkpoint tensors that this rank reads only in part."""
    version: int = 0
    asked: str = ""
    """How this rank's driver wants to refit. All must agree: one with a shorter timeout would give up on the others."""
    report: RankReport | None = None
    amax: dict[str, float] = {}
    """Maxima that a calibration pass found on this rank."""
    kv: KvReport | None = None


class Group(Protocol):
    """The ranks of one engine, as one of them reaches the others."""

    @property
    def rank(self) -> int:
        """Index of this rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Send `message` to every rank and return one from each, in rank order. Every rank must call it.

        Raises:
            EngineLostError: A rank died or did not answer within `timeout_s`.
        """
        ...


class SoloGroup(Group):
    """The group of an engine with one rank."""

    rank = 0
    size = 1

    @override
    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        """Return `message`, the only one."""
        return [message]


def vote(group: Group, ballot: Ballot, error: BaseException | None, *, timeout_s: float) -> list[Ballot]:
    """Exchange `ballot` and agree. Every rank of `group` must call it at the same step.

    Args:
        group: The ranks.
        ballot: What this rank says, without its error.
        error: Why this rank failed, if it did.
        timeout_s: Seconds to wait for the others.

    Returns:
        Every rank's ballot in rank order, if all succeeded.

    Raises:
        RefitError: The ranks' errors combined, or EngineLostError if a rank does not answer.
        BaseException: `error` itself, if it is not a `RefitError`.
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
    """Return the error that every rank raises, if any."""
    steps = [f"rank {rank} is at {ballot.phase!r}" for rank, ballot in enumerate(ballots)]
    if len({ballot.phase for ballot in ballots}) > 1:
        return EngineLostError(
            f"the ranks are out of step: {', '.join(steps)}. Every rank must call refit, in the same order; start the "
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
            [
                "source: the ranks were given different names, shapes, dtypes or values; pass every rank the same state dict"
            ],
            written=ballots[0].phase == "written",
        )
    read = [ballot.files for ballot in ballots if ballot.files is not None]
    if moved := {first.path for first, second in combinations(read, 2) if first.clashes_with(second)}:
        return InvalidSourceError(
            [
                f"{path}: was replaced or changed while the ranks opened it; write each checkpoint under a new name, "
                "then refit again"
                for path in sorted(moved)
            ]
        )
    return None


_GRAVITY = ("EngineLostError", "RankFailedError", "UnsupportedEngineError", "InvalidSourceError", "NonFiniteError")


def merge_errors(failed: dict[int, ErrorRecord], *, num_ranks: int, is_agreed: bool = False) -> RefitError:
    """Combine the errors of several ranks: the gravest kind, with what every rank of that kind found.

    Args:
        failed: Errors by rank.
        num_ranks: Number of all ranks.
        is_agreed: Whether ranks have already voted, so that errors name their rank.
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
