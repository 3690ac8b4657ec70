"""Messages in shared memory: order, room, ends and deaths. And the board of a rank."""

import json
import subprocess
import sys
import threading

import pytest

from fp8refit.errors import RankFailedError, TransportError
from fp8refit.transport.board import Board
from fp8refit.transport.memfd import make_memfd
from fp8refit.transport.ring import NUM_SETS, Ring, wait_until


def receive(ring, num_received, *, rank=0, timeout_s=5.0):
    return ring.receive(rank, num_received, timeout_s=timeout_s, meanwhile=lambda: None)


@pytest.fixture
def ring():
    ring = Ring.make()
    yield ring
    ring.close()


def test_messages_come_in_order_to_every_rank_and_no_faster_than_they_are_read(ring):
    heard, count = [[], []], 50

    def follow(rank):
        other = Ring.find(ring.segment)
        while (said := receive(other, len(heard[rank]), rank=rank)) is not None:
            heard[rank].append(said)
            other.take(rank, len(heard[rank]))

    readers = [threading.Thread(target=follow, args=(rank,)) for rank in range(2)]
    for reader in readers:
        reader.start()
    sent = [f"{number} ä" * number for number in range(count)]
    for number, message in enumerate(sent):
        wait_until(lambda number=number: ring.num_taken(2) > number - NUM_SETS, timeout_s=5.0, who="a rank")
        ring.send(message)
    ring.end(is_complete=True)
    for reader in readers:
        reader.join(10)
    assert heard == [sent, sent]


def test_nothing_comes_after_the_end_and_a_ring_begins_anew(ring):
    ring.send("one")
    ring.end(is_complete=True)
    assert receive(ring, 0) == "one"
    assert receive(ring, 1) is None
    ring.begin()
    with pytest.raises(TransportError, match=r"did nothing for 0\.05 s"):
        receive(ring, 0, timeout_s=0.05)


def test_who_gives_up_and_who_cannot_go_on_is_heard_at_once(ring):
    ring.fail(1)
    assert ring.num_taken(1) == 0
    with pytest.raises(RankFailedError, match="could not take"):
        ring.num_taken(2)
    ring.send("late")
    ring.end(is_complete=False)
    assert receive(ring, 0) is None


def test_a_sender_that_died_is_not_waited_for():
    code = """
import json, sys
from fp8refit.transport.ring import Ring
print(Ring.make().segment.model_dump_json(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        segment = Ring.make().segment.model_validate(json.loads(sender.stdout.readline()))
        ring = Ring.find(segment)
        sender.kill()
        sender.wait()
        with pytest.raises(TransportError, match="died"):
            receive(ring, 0, timeout_s=30.0)


def test_what_is_no_ring_and_what_is_too_long_is_refused(ring):
    segment, _, close = make_memfd(64)
    with pytest.raises(TransportError, match="no ring"):
        Ring.find(segment)
    close()
    with pytest.raises(RankFailedError, match="more than can be sent"):
        ring.send("x" * (17 << 20))


def test_a_board_says_elsewhere_what_it_says_here():
    board = Board.make()
    assert not board.is_read
    other = Board.find(board.segment)
    assert board.is_read
    assert (other.is_raised, other.num_drops, other.version) == (False, 0, 0)
    board.is_raised, board.num_drops, board.version = True, 3, 1 << 40
    assert (other.is_raised, other.num_drops, other.version) == (True, 3, 1 << 40)
