"""Orders that come to a process of a server which does not carry them out."""

import asyncio
import os
import socket
import uuid

import pytest

from fp8refit.driver import passage
from fp8refit.driver.passage import Passage
from fp8refit.errors import RankFailedError
from fp8refit.remote.servers.orders import MAX_BYTES, Answer


@pytest.fixture
def name():
    return uuid.uuid4().hex


async def answer(message: str) -> Answer:
    return Answer(said=(message,))


def test_orders_are_passed_on_and_answers_come_back(name):
    async def steps() -> list[Answer]:
        first = Passage(name)
        await first.open(answer)
        return await asyncio.gather(*(Passage(name).pass_on(said) for said in ("one", "x" * 5_000_000, "")))

    assert [found.said[0] for found in asyncio.run(steps())] == ["one", "x" * 5_000_000, ""]


def test_a_process_that_starts_later_is_waited_for(name):
    async def steps() -> Answer:
        waiting = asyncio.create_task(Passage(name).pass_on("early"))
        await asyncio.sleep(0.05)
        first = Passage(name)
        await first.open(answer)
        return await waiting

    assert asyncio.run(steps()).said == ("early",)


def test_a_process_that_never_starts_is_told(name, monkeypatch):
    monkeypatch.setattr(passage, "_STARTS_WITHIN_S", 0.1)
    with pytest.raises(RankFailedError, match=r"the server is not ready .*; refit later"):
        asyncio.run(Passage(name).pass_on("hello"))


async def ask(name: str, listener: socket.socket, said: bytes) -> None:
    """Pass an order on to a process that says this, and nothing more."""
    asked = asyncio.create_task(Passage(name).pass_on("hello"))
    other, _ = await asyncio.to_thread(listener.accept)
    with other:
        await asyncio.to_thread(other.recv, 100)  # what it does not read would be an error at the other end
        other.sendall(said)
    await asked


@pytest.mark.parametrize(
    ("said", "why"),
    [(b"", "carries out orders is gone"), ((MAX_BYTES + 1).to_bytes(8), "which is more than")],
    ids=["nothing", "too much"],
)
def test_a_process_that_does_not_answer_as_it_should_is_told(said, why, name):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0fp8refit-{os.getppid()}-{name}")
        listener.listen()
        with pytest.raises(RankFailedError, match=why):
            asyncio.run(ask(name, listener, said))


def test_a_process_of_another_parent_neither_gives_nor_receives_orders(name, monkeypatch):
    heard = []

    async def steps() -> None:
        first, other = Passage(name), Passage(name)
        await first.open(lambda message: heard.append(message))
        monkeypatch.setattr(os, "getppid", lambda: -1)
        await other.pass_on("hello")

    with pytest.raises(RankFailedError, match="none of this server"):
        asyncio.run(steps())
    assert heard == []
