"""Ranks of several replicas that vote together."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fp8refit.driver.replicas import Gathering, gathering
from fp8refit.errors import EngineLostError, TransportError

TIMEOUT_S = 10.0


def join_and_say(place: Gathering, rank: int) -> tuple[int, int, list[bytes]]:
    group = place.join(rank)
    return group.rank, group.size, group.exchange(f"{place.first} {rank}".encode(), timeout_s=TIMEOUT_S)


def test_ranks_of_all_replicas_hear_each_other():
    with gathering(2, 2, host="127.0.0.1", timeout_s=TIMEOUT_S) as places, ThreadPoolExecutor(4) as pool:
        sent = [Gathering.model_validate_json(place.model_dump_json()) for place in places]
        waiting = [pool.submit(join_and_say, place, rank) for place in sent for rank in range(2)]
        found = [each.result() for each in waiting]
    assert found == [(number, 4, [b"0 0", b"0 1", b"2 0", b"2 1"]) for number in range(4)]


def test_ranks_that_have_met_need_no_place():
    with gathering(2, 1, host="127.0.0.1", timeout_s=TIMEOUT_S) as places, ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda place: place.join(0), places))
    with ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(lambda group: group.exchange(b"here", timeout_s=TIMEOUT_S), groups))
    assert heard == [[b"here"] * 2] * 2


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_agreed():
    with (
        gathering(2, 1, host="127.0.0.1", timeout_s=1.0) as places,
        pytest.raises(
            EngineLostError, match=r"rank 1 of 2 did not reach .* within 1 s .*; they have to reach each other"
        ),
    ):
        places[1].join(0)


def test_a_place_that_is_gone_is_told():
    late = r"rank 1 of 2 did not reach .* within 1 s .*; they have to reach each other"
    with gathering(2, 1, host="127.0.0.1", timeout_s=1.0) as places, pytest.raises(EngineLostError, match=late):
        places[1].join(0)


def test_an_address_of_another_host_is_no_place():
    elsewhere = gathering(2, 1, host="192.0.2.1", timeout_s=1.0)
    with pytest.raises(TransportError, match="use an address of this host"), elsewhere:
        raise AssertionError("opened")
