"""What the ranks of a trainer say to each other, without the ranks."""

import pytest

from fp8refit.errors import EngineLostError, InvalidSourceError, RankFailedError
from fp8refit.sources.sharded.trainer_group import Statement, Trainers
from fp8refit.transport.vote import ErrorRecord

READ = Statement(step="read", max_bytes=100)


class FakeGroup:
    """Rank 0 of several, the others of which say what they are told to."""

    rank = 0

    def __init__(self, *others: Statement, is_lost: bool = False) -> None:
        self._others = [other.model_dump_json().encode() for other in others]
        self._is_lost = is_lost
        self.size = 1 + len(others)

    def exchange(self, message: bytes, *, timeout_s: float) -> list[bytes]:
        if self._is_lost:
            raise EngineLostError("closed by peer")
        return [message, *self._others]


def trainers(*others: Statement, is_lost: bool = False) -> Trainers:
    return Trainers(FakeGroup(*others, is_lost=is_lost), timeout_s=5)


def test_every_rank_hears_every_rank():
    follow = Statement(step="follow")
    assert trainers(READ, follow).exchange(READ) == [READ, READ, follow]


@pytest.mark.parametrize("other", [Statement(step="done"), Statement(step="batch", place=3), Statement(step="plan")])
def test_ranks_that_are_elsewhere_are_out_of_step(other):
    one = trainers(other)
    with pytest.raises(RankFailedError, match=f"rank 0 is at 'read' 0, rank 1 is at '{other.step}' {other.place}"):
        one.exchange(READ)
    assert one.is_over


def test_batches_have_numbers():
    with pytest.raises(RankFailedError, match="out of step"):
        trainers(Statement(step="batch", place=1)).exchange(Statement(step="batch", place=2))


def test_an_error_of_another_rank_is_raised_as_what_it_was():
    record = ErrorRecord.of(InvalidSourceError(["w: is absent"]))
    with pytest.raises(InvalidSourceError, match="w: is absent"):
        trainers(READ.model_copy(update={"error": record})).exchange(READ)


def test_an_error_of_its_own_is_raised_where_it_was_made():
    with pytest.raises(ZeroDivisionError):
        trainers(READ).exchange(READ, ZeroDivisionError())


def test_a_rank_that_is_lost_is_the_trainers_and_not_the_engines():
    with pytest.raises(RankFailedError, match=r"at 'read' and did not hear from every other rank within 5 s"):
        trainers(READ, is_lost=True).exchange(READ)


def test_after_an_error_nothing_is_said_any_more():
    one = trainers(Statement(step="done"))
    with pytest.raises(RankFailedError, match="out of step"):
        one.exchange(READ)
    with pytest.raises(RankFailedError, match="make a new one on every rank"):
        one.exchange(READ)
