"""What a vote of many members asks of the store: as much of each member, however many they are."""

from collections import Counter

import pytest
from torch.distributed import HashStore

from fp8refit.errors import InvalidSourceError
from fp8refit.transport.collective.communicator import Communicator, Meeting
from tests.fake_ranks import together

NUM_VOTES = 3
PROBLEM = InvalidSourceError(["w: missing"])


class CountingStore:
    """Counts what is asked of a store, apart from whether keys are there, which is asked until they are."""

    def __init__(self, store):
        self.store, self.asked, self.most_keys = store, Counter(), 0

    def check(self, keys):
        self.most_keys = max(self.most_keys, len(keys))
        return self.store.check(keys)

    def __getattr__(self, name):
        def ask(*arguments):
            self.asked[name] += 1
            return getattr(self.store, name)(*arguments)

        return ask


def members_of(size):
    store, meeting = HashStore(), Meeting(token="t" * 16, host="127.0.0.1", port=1, size=size, backend="gloo")
    return store, [Communicator(meeting, rank, CountingStore(store)) for rank in range(size)]


def vote(member, errors=()):
    for number in range(NUM_VOTES):
        member.agree(PROBLEM if (member.rank, number) in errors else None, timeout_s=60.0)


@pytest.mark.parametrize("size", [4, 64, 256])
def test_a_member_asks_as_little_of_many_as_of_few(size):
    store, members = members_of(size)
    assert together([lambda m=m: vote(m) for m in members]) == [None] * size
    asked = [member._store.asked for member in members]
    assert {member._store.most_keys for member in members} == {1}
    assert all(count["add"] == count["get"] == NUM_VOTES for count in asked)
    ends = sum(count["compare_set"] + count["delete_key"] for count in asked)
    assert ends == NUM_VOTES + 2 * (NUM_VOTES - 1)  # said once, by whoever came last, and the vote before is removed
    assert store.num_keys() == 2


@pytest.mark.parametrize("size", [4, 64])
def test_all_of_many_hear_the_first_that_failed(size):
    _, members = members_of(size)
    outcomes = together([lambda m=m: vote(m, {(1, 2), (size - 1, 2)}) for m in members])
    assert [outcome.problems for outcome in outcomes] == [("w: missing",)] * size
