"""Where requests to one AsyncLLM wait for the end of a refit, or are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fp8refit_vllm.driver import refusal


class Gate:
    """Stands in the place of an AsyncLLM's entries, until it is opened.

    While it is closed requests wait, and whoever would let the scheduler go on is told that it will, once the refit is over.

    Args:
        llm: The AsyncLLM.
        on_resume: What to do when somebody asks for generation to be resumed.
    """

    _ENTRIES = ("generate", "encode", "add_request", "resume_generation", "wake_up")

    def __init__(self, llm: Any, on_resume: Callable[[], None]) -> None:
        self._llm = llm
        self._on_resume = on_resume
        self._may_decide = asyncio.Event()
        self.reason: str | None = None
        for name in self._ENTRIES:
            llm.__dict__[name] = getattr(self, name)

    def close(self) -> None:
        """Let requests wait."""
        self._decide(None, may_decide=False)

    def refuse(self, reason: str) -> None:
        """Refuse those that wait, every one that comes, and those that were being taken in when the gate was closed."""
        self._decide(reason, may_decide=True)

        def refuse_late(*_: Any, **__: Any) -> None:
            raise refusal(reason)

        # Every request, and every part of one, passes here after its input was processed and before the core has it.
        self._llm.output_processor.__dict__["add_request"] = refuse_late

    def open(self) -> None:
        """Admit those that wait, and give the engine its own entries back."""
        self._decide(None, may_decide=True)
        for name in self._ENTRIES:
            self._llm.__dict__.pop(name, None)

    def _decide(self, reason: str | None, *, may_decide: bool) -> None:
        self._llm.output_processor.__dict__.pop("add_request", None)
        self.reason = reason
        if may_decide:
            self._may_decide.set()
        else:
            self._may_decide.clear()

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """In the place of the engine's own."""
        await self._pass()
        async for output in type(self._llm).generate(self._llm, *args, **kwargs):
            yield output

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """In the place of the engine's own."""
        await self._pass()
        async for output in type(self._llm).encode(self._llm, *args, **kwargs):
            yield output

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the engine's own."""
        await self._pass()
        return await type(self._llm).add_request(self._llm, *args, **kwargs)

    async def resume_generation(self) -> None:
        """In the place of the engine's own: takes effect when a refit has succeeded."""
        self._on_resume()

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the engine's own, which also lets the scheduler go on: waits for a refit that is under way."""
        await self._may_decide.wait()
        return await type(self._llm).wake_up(self._llm, *args, **kwargs)

    async def _pass(self) -> None:
        await self._may_decide.wait()
        if self.reason is not None:
            raise refusal(self.reason)
