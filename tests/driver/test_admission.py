"""A gate: requests wait, are admitted or are refused; and what they are told."""

import asyncio
from types import SimpleNamespace

import pytest

from fp8refit.driver.admission import Gate, cache_kept, refusal, still_running, unfinished
from fp8refit.errors import CacheFlushError, EngineBusyError, EngineDirtyError


def gate_of() -> Gate:
    """A gate at none of an engine's methods."""
    return Gate(SimpleNamespace(), (SimpleNamespace(), "add"))


async def knock(gate: Gate) -> asyncio.Task:
    task = asyncio.create_task(gate.pass_through())
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_requests_wait_at_a_gate_until_it_is_opened():
    async def steps():
        gate = gate_of()
        waiting = [await knock(gate) for _ in range(2)]
        assert not any(task.done() for task in waiting)
        gate.open()
        await asyncio.wait_for(asyncio.gather(*waiting, gate.pass_through()), 5)

    asyncio.run(steps())


def test_a_gate_that_refuses_does_so_until_it_is_closed_or_opened():
    async def steps():
        gate = gate_of()
        waiting = await knock(gate)
        gate.refuse("half written")
        for task in (waiting, await knock(gate)):
            with pytest.raises(EngineDirtyError, match="this engine refuses requests: half written"):
                await asyncio.wait_for(task, 5)
        gate.close()
        assert gate.reason is None
        waiting = await knock(gate)
        assert not waiting.done()
        gate.refuse("again")
        gate.open()
        await asyncio.wait_for(waiting, 5)
        assert gate.reason is None

    asyncio.run(steps())


def test_who_only_waits_for_the_end_is_not_refused():
    async def steps():
        gate = gate_of()
        task = asyncio.create_task(gate.until_decided())
        await asyncio.sleep(0)
        assert not task.done()
        gate.refuse("half written")
        await asyncio.wait_for(task, 5)

    asyncio.run(steps())


class Entrance(Gate):
    entries = ("add",)

    async def add(self, request: str) -> str:
        await self.pass_through()
        return type(self._owner).add(self._owner, request)


class Entries:
    def add(self, request: str) -> str:
        return f"{request} is in"


def test_an_entry_is_the_gate_s_until_it_is_opened_and_the_last_step_while_requests_are_refused():
    async def steps():
        engine, core = Entries(), Entries()
        gate = Entrance(engine, (core, "add"))
        waiting = asyncio.create_task(engine.add("early"))
        await asyncio.sleep(0)
        gate.refuse("half written")
        with pytest.raises(EngineDirtyError, match="half written"):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(EngineDirtyError, match="half written"):
            core.add("late")
        gate.close()
        assert core.add("late") == "late is in"
        gate.refuse("again")
        gate.open()
        assert (engine.add("new"), core.add("new")) == ("new is in", "new is in")
        assert (vars(engine), vars(core)) == ({}, {})

    asyncio.run(steps())


def test_messages_say_what_to_do():
    assert isinstance(refusal("why"), EngineDirtyError)
    assert isinstance(unfinished("LLM"), EngineBusyError)
    assert "a synchronous LLM cannot drain them" in str(unfinished("LLM"))
    assert isinstance(still_running(3, 0.5), EngineBusyError)
    assert str(still_running(3, 0.5)).startswith("3 request(s) did not finish within 0.5 s and keep running.")
    kept = cache_kept("X kept its cache", "sessions", said="no")
    assert isinstance(kept, CacheFlushError)
    assert str(kept).startswith("X kept its cache because blocks of it are still held; nothing was written")
    assert str(kept).endswith("(sessions), then refit again (no)")
    assert str(cache_kept("X kept its cache", "sessions")).endswith("refit again")
