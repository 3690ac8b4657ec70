"""A driver's connections to its ranks: answers in order of rank, and no end that waits for ever."""

import asyncio
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8refit.errors import EngineLostError, RankFailedError, UnsupportedEngineError
from fp8refit.transport.loopback import RankConnection, Switchboard


class Ranks:
    """Ranks in threads: told to answer, each calls, hears one message and says what `says` makes of it."""

    def __init__(
        self, count: int, says: Callable[[int, str], str | None] = lambda rank, heard: f"{rank}: {heard}"
    ) -> None:
        self._count = count
        self._says = says
        self._lines: dict[int, RankConnection] = {}

    async def ring(self, address: str) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._answer, rank, address) for rank in range(self._count)))

    def _answer(self, rank: int, address: str) -> None:
        connection = self._lines[rank] = RankConnection(address, rank, timeout_s=5)
        for message in connection.messages():
            answer = self._says(rank, message)
            if answer is None:
                break
            connection.answer(answer)
        connection.close()


@pytest.fixture
def switchboard():
    board = Switchboard(2)
    yield board
    board.close()


async def send(board: Switchboard, message: str, ring, *, timeout_s: float = 5):
    """The answers to one message."""
    (heard,) = await board.send((message,), ring, timeouts_s=(timeout_s,))
    return heard


def ask(board: Switchboard, message: str, ring):
    return asyncio.run(send(board, message, ring))


def test_every_rank_answers_in_order(switchboard):
    assert ask(switchboard, "hello", Ranks(2).ring) == ["0: hello", "1: hello"]


def test_ranks_call_for_every_question(switchboard):
    ranks = Ranks(2)

    async def talk():
        return [await send(switchboard, message, ranks.ring) for message in ("a", "b", "c")]

    assert asyncio.run(talk()) == [["0: a", "1: a"], ["0: b", "1: b"], ["0: c", "1: c"]]


@pytest.fixture
def rings():
    return []


def counted(ranks: Ranks, rings: list[str]):
    async def ring(address: str) -> None:
        rings.append(address)
        await ranks.ring(address)

    return ring


@pytest.mark.parametrize("ends", ["with its last message", "early"])
def test_ranks_call_once_for_a_conversation(ends, switchboard, rings):
    said = ["a", "b"] if ends == "early" else ["a", "b", "c"]
    ring = counted(Ranks(2), rings)

    async def talk():
        for _ in range(2):
            heard = await switchboard.send(
                ("a", "b", "c"), ring, timeouts_s=(5, 5, 5), goes_on=lambda heard: ends != "early" or len(heard) < 2
            )
            assert heard == [[f"0: {one}", f"1: {one}"] for one in said]

    asyncio.run(talk())
    assert len(rings) == 2


def test_a_rank_goes_on_after_the_last_message_even_if_nobody_hears_it(switchboard, monkeypatch):
    gone_on, tell = threading.Event(), Switchboard._tell
    ranks = Ranks(2)

    async def ring(address: str) -> None:
        await ranks.ring(address)
        gone_on.set()

    async def tell_and_wait(board, message, **options):
        said = await tell(board, message, **options)
        if message == "b":
            assert await asyncio.to_thread(gone_on.wait, 5), "ranks wait for another message"
        return said

    monkeypatch.setattr(Switchboard, "_tell", tell_and_wait)
    assert asyncio.run(switchboard.send(("a", "b"), ring, timeouts_s=(8, 8)))[-1] == ["0: b", "1: b"]


def test_a_conversation_that_raises_lets_go_of_the_ranks(switchboard):
    def fail(heard):
        raise ArithmeticError("of the driver")

    async def talk():
        with pytest.raises(ArithmeticError):
            await switchboard.send(("a", "b"), Ranks(2).ring, timeouts_s=(5, 5), goes_on=fail)
        return await send(switchboard, "b", Ranks(2).ring)

    assert asyncio.run(talk()) == ["0: b", "1: b"]


def test_a_rank_that_hangs_up_in_a_conversation_is_lost(switchboard):
    ranks = Ranks(2, lambda rank, heard: None if (rank, heard) == (1, "b") else heard)
    with pytest.raises(EngineLostError, match="hung up"):
        asyncio.run(switchboard.send(("a", "b"), ranks.ring, timeouts_s=(5, 5)))


def test_a_driver_that_leaves_in_the_middle_of_a_message_is_noticed(tmp_path):
    address = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as driver:
        driver.bind(address)
        driver.listen()
        connection = RankConnection(address, 0, timeout_s=5)
        accepted, _ = driver.accept()
        with accepted:
            assert accepted.recv(64)
            accepted.sendall(((1 << 63) + 1).to_bytes(8) + b"a" + (1 << 63).to_bytes(8)[:3])
        messages = connection.messages()
        assert next(messages) == "a"
        with pytest.raises(RankFailedError, match="the driver hung up"):
            next(messages)
        connection.close()


def test_two_drivers_take_turns(switchboard):
    ranks, other = Ranks(2), Switchboard(2)

    async def talk():
        return [await send(board, "a", ranks.ring) for board in (switchboard, other, switchboard)]

    assert asyncio.run(talk()) == [["0: a", "1: a"]] * 3
    other.close()


def test_a_loop_of_uvloop_ends_a_line_too(switchboard):
    uvloop = pytest.importorskip("uvloop")

    async def talk():
        with pytest.raises(EngineLostError, match="did not answer"):
            await send(switchboard, "a", Ranks(1).ring, timeout_s=0.2)
        return await send(switchboard, "b", Ranks(2).ring)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(talk()) == ["0: b", "1: b"]


def test_another_event_loop_gets_another_address(switchboard):
    ranks = Ranks(2)
    ask(switchboard, "a", ranks.ring)
    first = switchboard.address
    assert ask(switchboard, "b", ranks.ring) == ["0: b", "1: b"]
    assert switchboard.address != first


def test_long_messages_arrive_whole(switchboard):
    message = "ü" * 3_000_000
    assert ask(switchboard, message, Ranks(2, lambda _, heard: heard).ring) == [message, message]


def test_only_this_user_can_call(switchboard):
    ask(switchboard, "hello", Ranks(2).ring)
    folder = Path(switchboard.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_long_temporary_folder_is_left_out(switchboard, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert ask(switchboard, "hello", Ranks(2).ring) == ["0: hello", "1: hello"]


def test_a_rank_that_does_not_answer_is_lost(switchboard):
    released = threading.Event()

    def silent(rank: int, heard: str) -> str:
        if rank == 1:
            released.wait(5)
        return heard

    async def wait_and_release():
        try:
            await send(switchboard, "hello", Ranks(2, silent).ring, timeout_s=0.3)
        finally:
            released.set()

    with pytest.raises(EngineLostError, match=r"did not answer within 0\.3 s.*timeout_s"):
        asyncio.run(wait_and_release())


def test_a_rank_that_is_late_for_one_message_of_a_conversation_is_lost(switchboard):
    released = threading.Event()

    def slow(rank: int, heard: str) -> str:
        if (rank, heard) == (1, "b"):
            released.wait(5)
        return heard

    async def talk_and_release():
        try:
            await switchboard.send(("a", "b"), Ranks(2, slow).ring, timeouts_s=(5, 0.2))
        finally:
            released.set()

    with pytest.raises(EngineLostError, match=r"did not answer within 0\.2 s"):
        asyncio.run(talk_and_release())


@pytest.mark.parametrize("messages", [("a",), ("b", "a")])
def test_answers_are_in_time_although_the_event_loop_stood_still(messages, switchboard):
    """As that of a synchronous engine does, while the trainer computes the next tensor."""
    answered = threading.Barrier(3)

    def says(rank: int, heard: str) -> str:
        if heard == "a":
            answered.wait(5)
        return heard

    def stand_still() -> None:
        answered.wait(5)
        time.sleep(0.5)

    ranks, timeouts_s = Ranks(2, says), (9, 0.2)[-len(messages) :]
    heard = asyncio.run(switchboard.send(messages, ranks.ring, timeouts_s=timeouts_s, on_told=stand_still))
    assert heard[-1] == ["a", "a"]


def test_a_rank_that_hangs_up_is_lost(switchboard):
    with pytest.raises(EngineLostError, match="hung up"):
        ask(switchboard, "hello", Ranks(2, lambda rank, heard: heard if rank == 0 else None).ring)


def test_an_engine_that_rings_nobody_is_lost(switchboard):
    with pytest.raises(EngineLostError, match="was told to connect, but did not"):
        ask(switchboard, "hello", Ranks(0).ring)


def test_an_engine_that_cannot_ring_says_why(switchboard):
    async def ring(address: str) -> None:
        raise UnsupportedEngineError("no plugin")

    with pytest.raises(UnsupportedEngineError, match="no plugin"):
        ask(switchboard, "hello", ring)
    assert not switchboard.has_been_called


def test_a_rank_that_its_driver_does_not_wait_for_hears_so(switchboard):
    ranks = Ranks(1)

    async def talk():
        with pytest.raises(EngineLostError, match="did not answer"):
            await send(switchboard, "hello", ranks.ring, timeout_s=0.2)
        connection = await asyncio.to_thread(RankConnection, switchboard.address, 0, timeout_s=1)
        switchboard.close()
        with pytest.raises(RankFailedError, match=r"hung up|is silent"):
            await asyncio.to_thread(next, connection.messages())

    asyncio.run(talk())


def test_a_rank_notices_that_no_driver_waits(tmp_path):
    with pytest.raises(RankFailedError, match="cannot be reached at"):
        RankConnection(str(tmp_path / "nobody"), 0, timeout_s=1)


def test_a_message_that_is_none_of_ours_is_not_read(switchboard):
    class Babbler(Ranks):
        def _answer(self, rank: int, address: str) -> None:
            connection = RankConnection(address, rank, timeout_s=5)
            connection._socket.sendall(b"\xff" * 64)
            self._lines[rank] = connection

    with pytest.raises(RankFailedError, match="not one of ours"):
        ask(switchboard, "hello", Babbler(2).ring)


def test_what_was_asked_is_answered_before_the_next_although_the_caller_was_cancelled(switchboard):
    may_answer, ringing = threading.Event(), []

    def slow(rank: int, heard: str) -> str:
        if heard == "first":
            assert may_answer.wait(5)
        return f"{rank}: {heard}"

    ranks = Ranks(2, slow)

    async def ring(address: str) -> None:
        assert not ringing, "an earlier ring was left"
        ringing.append(address)
        await ranks.ring(address)
        ringing.clear()

    async def talk():
        first = asyncio.create_task(send(switchboard, "first", ring))
        while len(ranks._lines) < 2:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(send(switchboard, "second", ring))
        await asyncio.sleep(0)
        may_answer.set()
        return await second

    assert asyncio.run(talk()) == ["0: second", "1: second"]


def test_after_a_rank_that_did_not_answer_all_call_again(switchboard):
    may_answer = threading.Event()

    def slow_once(rank: int, heard: str) -> str:
        if heard == "first" and rank == 0:
            assert may_answer.wait(5)
        return f"{rank}: {heard}"

    ranks = Ranks(2, slow_once)

    async def ring(address: str) -> None:
        await asyncio.gather(ranks.ring(address), return_exceptions=True)

    async def talk():
        with pytest.raises(EngineLostError, match="did not answer"):
            await send(switchboard, "first", ring, timeout_s=0.2)
        may_answer.set()
        return await send(switchboard, "second", ring)

    assert asyncio.run(talk()) == ["0: second", "1: second"]
    assert switchboard.has_been_called


def test_after_a_rank_that_hung_up_all_call_again(switchboard):
    may_answer = threading.Event()

    def says(rank: int, heard: str) -> str | None:
        if heard == "first":
            assert rank == 1 or may_answer.wait(5)
            return None if rank == 1 else "late"
        return f"{rank}: {heard}"

    ranks = Ranks(2, says)

    async def talk():
        with pytest.raises(EngineLostError, match="hung up"):
            await send(switchboard, "first", ranks.ring)
        may_answer.set()
        return await send(switchboard, "second", ranks.ring)

    assert asyncio.run(talk()) == ["0: second", "1: second"]


@pytest.mark.parametrize("said", ["7", "-1", "rank", "\ud7ff", ""])
def test_who_calls_and_is_no_rank_is_hung_up_on(said, switchboard):
    ranks = Ranks(2)

    async def ring(address: str) -> None:
        stranger = await asyncio.to_thread(RankConnection, address, 0, timeout_s=5)
        stranger.close()
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(address)
        stranger.sendall(len(said.encode()).to_bytes(8) + said.encode())
        stranger.settimeout(5)
        assert await asyncio.to_thread(stranger.recv, 1) == b""
        stranger.close()
        await ranks.ring(address)

    assert ask(switchboard, "hello", ring) == ["0: hello", "1: hello"]


def test_a_caller_that_left_does_not_stand_for_its_rank(switchboard):
    """Rank 1 completes the calls only with a rank 0 that is still there, even one that calls later."""

    async def ring(address: str) -> None:
        RankConnection(address, 0, timeout_s=5).close()
        other = asyncio.create_task(answer(address, 1))
        while 1 not in switchboard._connections:
            await asyncio.sleep(0)
        await asyncio.gather(answer(address, 0), other)

    assert ask(switchboard, "hello", ring) == ["0: hello", "1: hello"]


def test_a_caller_that_left_does_not_take_the_place_of_its_rank(switchboard):
    async def ring(address: str) -> None:
        answers = [asyncio.create_task(answer(address, 0))]
        while 0 not in switchboard._connections:
            await asyncio.sleep(0)
        RankConnection(address, 0, timeout_s=5).close()
        await asyncio.gather(*answers, answer(address, 1))

    assert ask(switchboard, "hello", ring) == ["0: hello", "1: hello"]


def test_of_two_calls_of_a_rank_the_later_counts(switchboard):
    async def ring(address: str) -> None:
        earlier = RankConnection(address, 0, timeout_s=5)
        later = asyncio.create_task(answer(address, 0))
        with pytest.raises(RankFailedError, match="hung up"):
            await asyncio.to_thread(next, earlier.messages())
        await asyncio.gather(later, answer(address, 1))

    assert ask(switchboard, "hello", ring) == ["0: hello", "1: hello"]


def test_who_calls_after_all_have_is_hung_up_on(switchboard):
    def says(rank: int, heard: str) -> str:
        if rank == 0:
            late = RankConnection(switchboard.address, 1, timeout_s=5)
            with pytest.raises(RankFailedError, match="hung up"):
                next(late.messages())
        return f"{rank}: {heard}"

    assert ask(switchboard, "hello", Ranks(2, says).ring) == ["0: hello", "1: hello"]


async def answer(address: str, rank: int) -> None:
    """Call as `rank`, hear and answer in a thread."""
    await asyncio.to_thread(Ranks(0)._answer, rank, address)


def test_a_rank_hears_the_whole_of_a_message_in_time(tmp_path):
    """A driver that drips does not hold it."""
    address, may_end = str(tmp_path / "socket"), threading.Event()
    with socket.socket(socket.AF_UNIX) as driver:
        driver.bind(address)
        driver.listen()

        def drip() -> None:
            connection, _ = driver.accept()
            with connection:
                for byte in (1000).to_bytes(8) + bytes(1000):
                    if may_end.wait(0.05):
                        return
                    connection.send(bytes([byte]))

        thread = threading.Thread(target=drip)
        thread.start()
        connection, start_s = RankConnection(address, 0, timeout_s=0.3), time.monotonic()
        with pytest.raises(RankFailedError, match="the driver is silent"):
            next(connection.messages())
        assert time.monotonic() - start_s < 3
        may_end.set()
        thread.join()
        connection.close()
