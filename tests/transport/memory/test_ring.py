"""Texts in shared memory: order, room, and who reads."""

import json
import subprocess
import sys
import threading
import time

import pytest

from fp8refit.errors import RankFailedError, TransportError
from fp8refit.transport.memory.memfd import make_memfd
from fp8refit.transport.memory.ring import NUM_SETS, Call, Ring
from fp8refit.transport.memory.segment import Segment


@pytest.fixture
def ring():
    ring = Ring.make()
    yield ring
    ring.close()


def test_texts_come_in_order_to_every_rank_and_no_faster_than_they_are_taken(ring):
    sent = [f"{number} ä" * (1 + number * 37 % 500) for number in range(200)]
    heard = [[], []]

    def read(rank):
        other = Ring.find(ring.segment)
        while len(heard[rank]) < len(sent):
            text = other.receive(len(heard[rank]))
            if text is None:
                time.sleep(0)
                continue
            heard[rank].append(text)
            other.take(rank, len(heard[rank]))
        other.leave(rank)

    readers = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
    for reader in readers:
        reader.start()
    for number, text in enumerate(sent):
        while ring.num_taken(2) <= number - NUM_SETS:
            time.sleep(0)
        ring.send(text)
    for reader in readers:
        reader.join(20)
    assert heard == [sent, sent]
    assert ring.is_left(2) and (ring.num_taken(2), ring.num_taken_by(1)) == (len(sent), len(sent))


def test_a_ring_begins_anew(ring):
    ring.send("one")
    ring.take(0, 1)
    ring.leave(0)
    ring.call_back()
    ring.begin()
    assert ring.receive(0) is None
    assert (ring.num_sent, ring.num_taken(1), ring.is_left(1), ring.call) == (0, 0, False, Call.STAY)


def test_readers_are_called_back_until_they_are_expected_again(ring):
    other = Ring.find(ring.segment)
    other.leave(1)
    assert ring.is_left(2)
    for call in (Call.BACK, Call.OVER):
        ring.call_back(call)
        assert other.call is call and not ring.is_left(1) and ring.is_left(2)
    ring.expect_readers()
    assert other.call is Call.STAY and not ring.is_left(2)


def test_the_slowest_rank_counts(ring):
    ring.take(0, 5)
    assert (ring.num_taken(1), ring.num_taken(2)) == (5, 0)


def test_another_process_reads_what_is_sent(ring):
    code = """
import sys
from fp8refit.transport.memory.ring import Ring
from fp8refit.transport.memory.segment import Segment
ring = Ring.find(Segment.model_validate_json(sys.stdin.readline()))
ring.take(3, len(ring.receive(0)))
"""
    ring.send("how long?")
    sent = ring.segment.model_dump_json() + "\n"
    subprocess.run([sys.executable, "-c", code], input=sent, text=True, check=True)
    assert ring.num_taken_by(3) == len("how long?")


def test_what_is_no_ring_and_what_is_too_long_is_refused(ring):
    segment, _, close = make_memfd(64)
    with pytest.raises(TransportError, match="not a ring"):
        Ring.find(segment)
    close()
    with pytest.raises(RankFailedError, match="more than can be sent"):
        ring.send("x" * (17 << 20))


def test_a_ring_that_is_gone_is_told():
    ring = Ring.make()
    segment = Segment.model_validate(json.loads(ring.segment.model_dump_json()))
    ring.close()
    with pytest.raises(TransportError):
        Ring.find(segment)
