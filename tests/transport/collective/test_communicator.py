"""Members of a group that broadcasts: who comes, who goes, and that nobody waits for those who went."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fp8refit.errors import InvalidSourceError, TransportError
from fp8refit.transport.collective import store
from fp8refit.transport.collective.communicator import Communicator, Meeting
from tests.fake_ranks import together

CPU = torch.device("cpu")
TRAINER = """
import sys, torch
from fp8refit.transport.collective.communicator import Communicator
trainer = Communicator.open(host="127.0.0.1", port=0, size=3, backend="gloo", timeout_s=20)
print(trainer.meeting.model_dump_json(), flush=True)
if sys.argv[1:] == ["alone"]:
    sys.stdin.readline()
trainer.join(torch.device("cpu"), timeout_s=20)
buffer = torch.full((1000,), 7, dtype=torch.uint8)
trainer.wait(trainer.broadcast(buffer, timeout_s=20), timeout_s=20)
print("sent", flush=True)
sys.stdin.readline()
"""


def open_trainer(size, timeout_s=20.0, sections=()):
    return Communicator.open(
        host="127.0.0.1", port=0, size=size, backend="gloo", timeout_s=timeout_s, sections=sections
    )


def group(size, sections=()):
    """All members, joined."""
    trainer = open_trainer(size, sections=sections)
    members = [trainer, *(Communicator.find(trainer.meeting, rank, timeout_s=20.0) for rank in range(1, size))]
    assert together([lambda member=member: member.join(CPU, timeout_s=20.0) for member in members]) == [None] * size
    return members


def receive(member, value, timeout_s=20.0):
    buffer = torch.full((1000,), value, dtype=torch.uint8)
    member.wait(member.broadcast(buffer, timeout_s=timeout_s), timeout_s=timeout_s)
    return buffer.unique().tolist()


def test_all_members_get_what_the_trainer_sends():
    members = group(3)
    assert together([lambda m=m: receive(m, 5 - m.rank) for m in members]) == [[5]] * 3
    for member in members:
        member.abort()


def filled(value):
    return torch.full((1000,), value, dtype=torch.uint8)


def exchange(member, sections, timeout_s=20.0):
    """One broadcast in which the trainer sends its number to all, and to each section that section's number plus ten."""
    if member.rank == 0:
        shared, parts = filled(1), {section: filled(10 + section) for section in sections}
    else:
        shared, parts = filled(0), {member.section: filled(0)} if member.section in sections else {}
    member.wait(member.broadcast(shared, sections=parts, timeout_s=timeout_s), timeout_s=timeout_s)
    return [tensor.unique().tolist() for tensor in (shared, *parts.values())]


def test_members_of_a_section_get_what_the_trainer_sends_it_beside_what_all_get():
    members = group(5, sections=(0, 1, 0, 1))
    for sections in ((0, 1), (1,), (), (0, 1)):
        expected = [
            [[1], *([10 + section] for section in sections)],
            *([[1], *([[10 + own]] if own in sections else [])] for own in (0, 1, 0, 1)),
        ]
        assert together([lambda m=m, s=sections: exchange(m, s) for m in members]) == expected
    for member in members:
        member.abort()


def test_who_gives_up_ends_the_wait_of_every_section():
    trainer, first, second, _ = group(4, sections=(0, 1, 0))
    start_s = time.monotonic()
    threading.Timer(0.2, lambda: first.abort("no memory")).start()
    errors = together([lambda m=m: [exchange(m, (0, 1)) for _ in range(2)] for m in (trainer, second)])
    assert time.monotonic() - start_s < 15
    assert all(isinstance(error, TransportError) and "no memory" in str(error) for error in errors), errors
    assert not trainer.is_joined and not second.is_joined
    with pytest.raises(TransportError, match="has ended"):
        exchange(trainer, (0, 1))


def test_a_member_that_stops_ends_its_section_at_the_deadline():
    trainer, first, second = group(3, sections=(0, 1))
    start_s = time.monotonic()

    def leave_out(member):  # takes part in what goes to all, and not in what goes to its section
        member.wait(member.broadcast(filled(0), timeout_s=5.0), timeout_s=5.0)

    errors = together(
        [
            lambda: [exchange(trainer, (0, 1), timeout_s=1.0) for _ in range(2)],
            lambda: leave_out(first),
            lambda: [exchange(second, (0, 1), timeout_s=1.0) for _ in range(2)],
        ]
    )
    assert time.monotonic() - start_s < 15
    assert [type(error) for error in errors] == [TransportError, type(None), TransportError]


def test_sections_are_those_of_every_member():
    with pytest.raises(ValueError, match="2 members have a section, but there are 3"):
        open_trainer(4, sections=(0, 1))


def test_the_store_is_at_the_loopback_address_alone():
    trainer = open_trainer(2)
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    port = f":{trainer.meeting.port:04X}"
    assert [line[1] for line in listening if line[1].endswith(port) and line[3] == "0A"] == [f"0100007F{port}"]


def test_an_address_that_is_taken_or_not_here_is_named():
    trainer = open_trainer(2)
    for host, port in (("127.0.0.1", trainer.meeting.port), ("192.0.2.1", 0)):
        with pytest.raises(TransportError, match=host):
            Communicator.open(host=host, port=port, size=2, backend="gloo", timeout_s=2.0)


def test_who_does_not_come_is_named_to_all():
    trainer = open_trainer(3)
    early = Communicator.find(trainer.meeting, 1, timeout_s=5.0)
    errors = together([lambda m=m: m.join(CPU, timeout_s=0.5) for m in (trainer, early)])
    assert all(isinstance(error, TransportError) for error in errors)
    assert any("member(s) 2 of 3" in str(error) for error in errors)


def test_another_token_does_not_join():
    trainer = open_trainer(2)
    meeting = Meeting(**{**trainer.meeting.model_dump(), "token": "1" * 32})
    stranger = Communicator.find(meeting, 1, timeout_s=5.0)
    errors = together([lambda m=m: m.join(CPU, timeout_s=0.5) for m in (trainer, stranger)])
    assert [type(error) for error in errors] == [TransportError] * 2


def test_a_failure_of_one_is_heard_by_all_and_the_group_goes_on():
    members = group(3)
    problem = InvalidSourceError(["w: missing"])
    outcomes = together([lambda m=m: m.agree(problem if m.rank == 1 else None, timeout_s=20.0) for m in members])
    assert [outcome.problems for outcome in outcomes] == [("w: missing",)] * 3
    assert together([lambda m=m: m.agree(None, timeout_s=20.0) for m in members]) == [None] * 3
    assert together([lambda m=m: receive(m, 9 - m.rank) for m in members]) == [[9]] * 3


class LateStore:
    """A store that a key reaches only with the next request on the same connection, as those of torch may."""

    def __init__(self, store):
        self._store, self._unsent = store, []

    def append(self, key, value):
        self._unsent.append((key, value))

    def check(self, keys):
        while self._unsent:
            self._store.append(*self._unsent.pop())
        return self._store.check(keys)


def test_what_a_member_was_told_can_be_heard_at_once(monkeypatch):
    trainer, member = group(2)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_store", LateStore(trainer._store))
        trainer.send("a refit", "the reason")
        assert member.receive("a refit") == ["the reason"]
    assert member.receive("another refit") == []
    for each in (trainer, member):
        each.abort()


def test_who_gives_up_ends_the_wait_of_all_others():
    trainer, first, second = group(3)
    start_s = time.monotonic()
    threading.Timer(0.2, lambda: trainer.abort("no more weights")).start()
    errors = together([lambda m=m: receive(m, 0) for m in (first, second)])
    assert time.monotonic() - start_s < 15
    assert all("no more weights" in str(error) for error in errors)
    assert not first.is_joined


def test_what_is_said_after_the_first_word_does_not_hide_it():
    trainer, first, second = group(3)
    trainer.abort("no more weights")
    first.abort("Connection closed by peer")
    assert "no more weights" in second.first_word()


def test_a_port_where_nobody_listens_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = Meeting(token="1" * 32, host="127.0.0.1", port=port, size=2, backend="gloo")
    start_s = time.monotonic()
    with pytest.raises(TransportError, match=f"127.0.0.1:{port}"):
        Communicator.find(meeting, 1, timeout_s=60.0)
    assert time.monotonic() - start_s < 10


def test_a_member_that_does_not_answer_ends_at_the_deadline():
    members = group(2)
    with pytest.raises(TransportError):
        members[1].agree(None, timeout_s=0.3)
    with pytest.raises(TransportError, match="ended"):
        receive(members[1], 0)


@contextmanager
def trainer_process(*arguments):
    """A trainer in a process of its own, and where to meet it."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    try:
        yield process, Meeting.model_validate_json(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def join_elsewhere(process, meeting, timeout_s=20.0):
    """The two members here of a trainer that has sent once."""
    members = [Communicator.find(meeting, rank, timeout_s=timeout_s) for rank in (1, 2)]
    together([lambda m=m: m.join(CPU, timeout_s=20.0) for m in members])
    assert together([lambda m=m: receive(m, 0) for m in members]) == [[7]] * 2
    assert process.stdout.readline() == "sent\n"
    return members


@pytest.fixture
def trainer_elsewhere():
    """A trainer in a process of its own that has sent once, and its two members here."""
    with trainer_process() as (process, meeting):
        yield process, join_elsewhere(process, meeting)


def test_a_trainer_that_is_killed_ends_the_wait_of_all_others(trainer_elsewhere):
    process, members = trainer_elsewhere
    threading.Timer(0.2, process.kill).start()
    start_s = time.monotonic()
    errors = together([lambda m=m: receive(m, 0) for m in members])
    assert time.monotonic() - start_s < 15
    assert [type(error) for error in errors] == [TransportError] * 2


def test_a_trainer_that_is_silent_is_left_without_its_answer(trainer_elsewhere):
    process, members = trainer_elsewhere
    process.send_signal(signal.SIGSTOP)
    threading.Timer(10.0, process.kill).start()
    start_s = time.monotonic()
    for member in members:
        member.abort()
    assert time.monotonic() - start_s < 5


PROBLEM = InvalidSourceError(["w: missing"])
WAITS = {
    "broadcast": lambda member: receive(member, 0, timeout_s=60.0),
    "agree": lambda member: member.agree(None, timeout_s=60.0),
    "fail": lambda member: member.agree(PROBLEM, timeout_s=60.0),
    "join": lambda member: member.join(CPU, timeout_s=60.0),
}


@pytest.fixture
def brief(monkeypatch):
    """A trainer is silent for too long after a second."""
    monkeypatch.setattr(store, "_LEAST_S", 1.0)


@contextmanager
def stopped(process):
    """A process that stands still and keeps its connections, as one whose host vanished. A test that hangs ends."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # or it answers before it stops
    end = threading.Timer(40.0, process.kill)
    end.start()
    try:
        yield
    finally:
        end.cancel()
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("wait", WAITS)
def test_a_trainer_that_is_silent_ends_every_wait(brief, wait):
    with trainer_process(*(["alone"] if wait == "join" else [])) as (process, meeting):
        if wait == "join":
            member = Communicator.find(meeting, 1, timeout_s=1.0)
        else:
            member = join_elsewhere(process, meeting, timeout_s=1.0)[0]
        with stopped(process):
            start_s = time.monotonic()
            with pytest.raises(TransportError, match="does not answer"):
                WAITS[wait](member)
            with pytest.raises(InvalidSourceError, match="w: missing"):
                member.agree(PROBLEM, timeout_s=60.0)
            member.abort()
            assert time.monotonic() - start_s < 15


def test_a_trainer_that_is_silent_cannot_be_found(brief):
    with trainer_process("alone") as (process, meeting), stopped(process):
        start_s = time.monotonic()
        with pytest.raises(TransportError, match="cannot be reached"):
            Communicator.find(meeting, 1, timeout_s=1.0)
        assert time.monotonic() - start_s < 15


def test_a_late_answer_is_not_taken_for_another(brief):
    with trainer_process() as (process, meeting):
        member = join_elsewhere(process, meeting, timeout_s=1.0)[0]
        with stopped(process), pytest.raises(TransportError):
            member.agree(PROBLEM, timeout_s=60.0)
        with pytest.raises(TransportError, match="has ended"):
            member.agree(None, timeout_s=60.0)
        # Another one that went to it reads what this one left.
        assert "does not answer" in Communicator.find(meeting, 1, timeout_s=20.0).first_word()
