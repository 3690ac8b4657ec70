"""Ranks that exchange messages through a process group, each in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8refit.errors import EngineLostError
from fp8refit.transport.process_group import _HEADER_BYTES, _SMALL_BYTES, ProcessGroupExchange, wait_for
from tests.transport import other_rank
from tests.transport.other_rank import digest

FITS = _SMALL_BYTES - _HEADER_BYTES


class Ranks:
    """Three ranks, as `other_rank` joins them."""

    def __init__(self, store: Path) -> None:
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, other_rank.__file__, str(store), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environ,
            )
            for rank in range(3)
        ]
        self.say({rank: ["ready"] for rank in range(3)})

    def say(self, orders: dict[int, list]) -> list:
        """Give each rank its order, all at once, and their answers."""
        for rank, order in orders.items():
            self.processes[rank].stdin.write(json.dumps(order) + "\n")
            self.processes[rank].stdin.flush()
        return [json.loads(self.processes[rank].stdout.readline() or "null") for rank in orders]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("store") / "store")
    yield ranks
    ranks.end()


@pytest.mark.parametrize(
    "sizes",
    [(0, 0), (1, 0), (FITS, FITS), (FITS, FITS + 1), (FITS + 1, 0), (5 << 20, 3), (3, 5 << 20), (1 << 20, 1 << 20)],
    ids=str,
)
def test_every_rank_hears_every_rank_in_order(sizes, ranks):
    answers = ranks.say({rank: ["exchange", "both", "ab"[rank], sizes[rank], 60.0] for rank in (0, 1)})
    expected = [digest(b"a" * sizes[0]), digest(b"b" * sizes[1])]
    assert [answer["said"] for answer in answers] == [expected] * 2
    assert [(answer["rank"], answer["size"]) for answer in answers] == [(0, 2), (1, 2)]


def test_bytes_of_any_value_come_through(ranks):
    answers = ranks.say({rank: ["exchange", "both", "\0ä\0", 1000 + rank, 60.0] for rank in (0, 1)})
    expected = [digest("\0ä\0".encode() * (1000 + rank)) for rank in (0, 1)]
    assert [answer["said"] for answer in answers] == [expected] * 2


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_asked(ranks):
    (answer,) = ranks.say({0: ["exchange", "late", "a", 1, 0.5]})
    assert 0.45 < answer["seconds"] < 5  # its clock is another than the one that waits
    assert "rank 0 of 2 did not hear from every other rank within 0.5 s, or one of them died" in answer["error"]
    assert "Every rank must call refit; restart the engine" in answer["error"]


def test_a_rank_that_dies_is_not_waited_for(ranks):
    answer, silence = ranks.say({0: ["exchange", "dead", "a", 1, 60.0], 2: ["die"]})
    assert silence is None
    assert answer["seconds"] < 10
    assert "or one of them died" in answer["error"]


def test_no_room_is_made_for_what_nobody_says(monkeypatch):
    exchange = object.__new__(ProcessGroupExchange)
    announced = (1 << 40).to_bytes(_HEADER_BYTES)
    monkeypatch.setattr(exchange, "_gather", lambda frame, num_bytes, timeout_s: [announced], raising=False)
    with pytest.raises(EngineLostError, match="a rank announced a message of 1099511627776 bytes"):
        exchange.exchange(b"", timeout_s=1.0)


class SlowLook:
    """An operation of NCCL's: its own wait looks once, and then after a long while."""

    def __init__(self, num_looks):
        self.num_looks = num_looks

    def is_completed(self):
        self.num_looks -= 1
        return self.num_looks < 0

    def wait(self, timeout):
        if self.num_looks >= 0:
            raise RuntimeError(f"took longer than {timeout.total_seconds()} s")


def test_an_operation_is_looked_at_more_often_than_it_looks_itself():
    start_s = time.monotonic()
    wait_for(SlowLook(20), 60.0)
    assert time.monotonic() - start_s < 1
    with pytest.raises(RuntimeError, match=r"took longer than 0\.001 s"):
        wait_for(SlowLook(1_000_000), 0.05)
