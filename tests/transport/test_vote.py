"""Errors as values, and what the ranks make of each other's ballots."""

from itertools import permutations
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import fp8refit.errors
from fp8refit.errors import (
    CheckpointError,
    EngineBusyError,
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    PrecisionError,
    RankFailedError,
    RefitError,
    StagingMemoryError,
    UnsupportedEngineError,
)
from fp8refit.report import RankReport
from fp8refit.transport.vote import Ballot, ErrorRecord, Phase, SoloGroup, merge_errors, vote
from tests.fake_ranks import Meeting, ThreadGroup, together

PLAIN = [
    kind
    for kind in vars(fp8refit.errors).values()
    if isinstance(kind, type)
    and issubclass(kind, RefitError)
    and kind not in (InvalidSourceError, NonFiniteError, UnsupportedEngineError, CheckpointError, PrecisionError)
]
WITH_ITEMS = [
    InvalidSourceError(["a: missing", "b: sent twice"]),
    InvalidSourceError(["a: missing"], written=True),
    NonFiniteError(["a", "b"], written=False),
    NonFiniteError(["a"], written=True),
    UnsupportedEngineError("it cannot be refitted:", ["layers.0: repacks. Set X=1", "layers.1: repacks. Set X=1"]),
    UnsupportedEngineError("no engine"),
    CheckpointError("it cannot be quantized:", ["a: is FP8"]),
]


PHASES = get_args(Phase)


class ScriptedGroup:
    """Rank 0, whose others say what the test says."""

    rank = 0

    def __init__(self, *others: Ballot) -> None:
        self.others = others
        self.size = 1 + len(others)
        self.said: list[bytes] = []

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        self.said.append(message)
        return [message, *(other.model_dump_json().encode() for other in self.others)]


def ask(group, ballot, error=None):
    return vote(group, ballot, error, timeout_s=1.0)


# Errors as values.


@pytest.mark.parametrize("error", [*(kind("what, why, what to do") for kind in PLAIN), *WITH_ITEMS], ids=repr)
def test_an_error_comes_out_of_json_as_it_went_in(error):
    record = ErrorRecord.model_validate_json(ErrorRecord.of(error).model_dump_json())
    rebuilt = record.error()
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    if not isinstance(error, CheckpointError):  # no rank raises it
        assert vars(rebuilt) == vars(error)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("w"), KeyboardInterrupt()], ids=repr)
def test_what_was_not_foreseen_is_told_with_its_type(error):
    rebuilt = ErrorRecord.of(error).error()
    assert type(rebuilt) is RankFailedError
    assert str(rebuilt) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", ["ErrorOfALaterVersion", "Sequence", "_WRITTEN_IN_PART", ""])
def test_a_kind_that_is_no_error_of_ours_is_not_made(kind):
    assert type(ErrorRecord(kind=kind, message="why").error()) is RankFailedError


# Several errors as one.


def merged(*errors: BaseException | None, **options) -> RefitError:
    failed = {rank: ErrorRecord.of(error) for rank, error in enumerate(errors) if error is not None}
    return merge_errors(failed, num_ranks=len(errors), **options)


GRAVE_FIRST = [
    EngineLostError("died"),
    RuntimeError("boom"),
    UnsupportedEngineError("no"),
    InvalidSourceError(["a: missing"]),
    NonFiniteError(["a"], written=True),
    StagingMemoryError("no room"),
]


@pytest.mark.parametrize("index", range(len(GRAVE_FIRST) - 1))
def test_the_gravest_error_is_told_whoever_found_it(index):
    first, second = GRAVE_FIRST[index : index + 2]
    kinds = {type(merged(*order)) for order in permutations([first, second, None])}
    assert kinds == {type(first) if isinstance(first, RefitError) else RankFailedError}


def test_what_several_ranks_found_is_told_once():
    error = merged(
        InvalidSourceError(["a: missing", "b: missing"]), None, InvalidSourceError(["b: missing", "c: missing"])
    )
    assert error.problems == ("a: missing", "b: missing", "c: missing")
    assert not error.written
    error = merged(NonFiniteError(["a"], written=False), NonFiniteError(["b"], written=True))
    assert (error.names, error.written) == (("a", "b"), True)


def test_whose_error_it_is_is_told():
    assert str(merged(None, StagingMemoryError("no room"))) == "rank 1: no room"
    assert str(merged(*[StagingMemoryError("no room")] * 2)) == "all ranks: no room"
    assert str(merged(*[StagingMemoryError("no room")] * 2, None)) == "rank 0, rank 1: no room"
    assert str(merged(StagingMemoryError("no room"))) == "no room"
    assert str(merged(None, StagingMemoryError("rank 1: no room"), is_agreed=True)) == "rank 1: no room"


# Votes.


def test_alone_an_error_is_raised_as_it_is():
    for error in (StagingMemoryError("no room"), RuntimeError("boom"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            ask(SoloGroup(), Ballot(phase="ready"), error)
        assert caught.value is error
    ballot = Ballot(phase="ready")
    assert ask(SoloGroup(), ballot) == [ballot]


def test_everybody_hears_everybody():
    report = RankReport(num_tensors=3, bytes_read=1, bytes_written=2, fill_s=0.5, verify_s=0.25, ignored=("a",))
    own, other = (
        Ballot(phase="written", claim="c", names=("ä\n",), version=3, report=report.model_copy(update={"rank": rank}))
        for rank in range(2)
    )
    assert ask(ScriptedGroup(other), own) == [own, other]


def test_an_unforeseen_error_of_this_rank_is_raised_as_it_is_after_the_others_heard_of_it():
    group, error = ScriptedGroup(Ballot(phase="prepared")), ConnectionError("the trainer went away")
    with pytest.raises(ConnectionError) as caught:
        ask(group, Ballot(phase="prepared"), error)
    assert caught.value is error
    (said,) = group.said
    assert Ballot.model_validate_json(said).error.message == "ConnectionError: the trainer went away"


def test_the_cause_of_an_agreed_error_is_this_rank_s_own():
    error = StagingMemoryError("no room")
    with pytest.raises(StagingMemoryError, match=r"^rank 0: no room") as caught:
        ask(ScriptedGroup(Ballot(phase="prepared")), Ballot(phase="prepared"), error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(("own", "other"), permutations(PHASES, 2))
def test_ranks_at_different_steps_are_lost(own, other):
    match = f"rank 0 is at '{own}', rank 1 is at '{other}'.*start the engine again"
    with pytest.raises(EngineLostError, match=match):
        ask(ScriptedGroup(Ballot(phase=other)), Ballot(phase=own))


def test_the_steps_are_these():
    assert PHASES == ("ready", "names", "prepared", "go", "held", "untouched", "written", "measured", "scaled")
    with pytest.raises(ValidationError, match="phase"):
        Ballot(phase="commit")


def test_ranks_at_different_steps_are_lost_whatever_else_went_wrong():
    failed = Ballot(phase="written", error=ErrorRecord.of(StagingMemoryError("no room")))
    with pytest.raises(EngineLostError, match="out of step"):
        ask(ScriptedGroup(failed), Ballot(phase="ready"))


@pytest.mark.parametrize(("phase", "written"), [("prepared", False), ("written", True)])
def test_ranks_that_read_different_sources_are_told(phase, written):
    with pytest.raises(
        InvalidSourceError, match="different names, shapes, dtypes or values; pass every rank the same"
    ) as caught:
        ask(ScriptedGroup(Ballot(phase=phase, claim="b")), Ballot(phase=phase, claim="a"))
    assert caught.value.written is written


def test_ranks_may_hold_different_names():
    own, other = Ballot(phase="ready", claim="a"), Ballot(phase="ready", claim="b")
    assert ask(ScriptedGroup(other), own) == [own, other]


errors = st.sampled_from([None, None, *GRAVE_FIRST[:1], *GRAVE_FIRST[2:], EngineBusyError("2 requests")])


@settings(max_examples=40, deadline=None)
@given(st.lists(errors, min_size=2, max_size=4), st.sampled_from(PHASES))
def test_all_ranks_come_to_the_same_end(each, phase):
    meeting = Meeting(len(each))
    outcomes = together(
        [
            lambda rank=rank, error=error: ask(ThreadGroup(meeting, rank), Ballot(phase=phase, version=rank), error)
            for rank, error in enumerate(each)
        ]
    )
    if any(each):
        assert all(isinstance(outcome, RefitError) for outcome in outcomes)
        assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1
    else:
        assert [[ballot.version for ballot in ballots] for ballots in outcomes] == [list(range(len(each)))] * len(each)
