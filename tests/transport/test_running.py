"""Calls that go on while their caller does something else."""

import asyncio

import pytest

from fp8refit.transport.running import begun


def test_a_call_has_sent_what_it_sends():
    sent = []

    async def call():
        for step in range(3):
            sent.append(step)
            await asyncio.sleep(0)
        return "answer"

    async def steps():
        answer = await begun(call(), num_steps=3)
        assert sent == [0, 1, 2]
        return await answer

    assert asyncio.run(steps()) == "answer"


def test_a_call_that_is_begun_ends_with_a_caller_that_is_cancelled():
    ends = []

    async def call():
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(True)

    async def steps():
        caller = asyncio.create_task(begun(call(), num_steps=1_000_000))
        await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.sleep(0)
        assert ends == [True]

    asyncio.run(steps())
