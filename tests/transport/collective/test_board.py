"""Messages that members of a group leave for each other, and what becomes of them when the trainer is silent."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fp8refit import TransportError
from fp8refit.transport.collective import store
from fp8refit.transport.collective.board import Address, Board


@pytest.fixture
def trainer() -> Board:
    opened, token, port = store.open_store(host="127.0.0.1", port=0, timeout_s=5.0)
    return Board(Address(token=token, host="127.0.0.1", port=port), 0, opened)


def member_of(trainer: Board) -> Board:
    return Board.find(trainer.address, 1, timeout_s=5.0)


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 2, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_messages_of_any_size_are_heard_and_taken_once(size, trainer):
    text = "ä" * (size // 2) + "x" * (size % 2)
    member_of(trainer).send("letter", text)
    assert trainer.receive("letter") == [text]
    assert trainer.take("letter") == [text]
    assert trainer.take("letter") == []


def test_every_message_is_kept_in_order(trainer):
    member_of(trainer).send("letter", "first")
    member_of(trainer).send("letter", "second")
    assert trainer.receive("letter") == ["first", "second"]


def test_who_left_first_says_why(trainer):
    first, second = member_of(trainer), member_of(trainer)
    assert second.first_word() == ""
    trainer.abort("enough")
    end = time.monotonic() + 60
    while not second.first_word():  # nobody waits until the store has what a leaving member says
        assert time.monotonic() < end
    first.abort()
    assert second.first_word() == "member 0: enough"
    with pytest.raises(TransportError, match="has ended"):
        first.first_word()


OPEN = """
import sys
from fp8refit.transport.collective.board import Address
from fp8refit.transport.collective.store import open_store
opened, token, port = open_store(host="127.0.0.1", port=0, timeout_s=20.0)
print(Address(token=token, host="127.0.0.1", port=port).model_dump_json(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("size", [1, 64 << 20])  # what waits for an answer, and what waits to be read
def test_a_trainer_that_does_not_answer_is_given_up_and_its_late_answer_too(monkeypatch, size):
    monkeypatch.setattr(store, "_LEAST_S", 1.0)
    with subprocess.Popen(
        [sys.executable, "-c", OPEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        end = threading.Timer(120.0, process.kill)
        end.start()
        member = Board.find(Address.model_validate_json(process.stdout.readline()), 1, timeout_s=1.0)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # or it answers before it stops
        start_s = time.monotonic()
        with pytest.raises(TransportError, match="does not answer"):
            member.send("letter", "x" * size)
        assert time.monotonic() - start_s < 20
        process.send_signal(signal.SIGCONT)
        with pytest.raises(TransportError, match="has ended"):
            member.first_word()
        process.kill()
        end.cancel()
