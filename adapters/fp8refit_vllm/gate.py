"""Holds or refuses new requests to an AsyncLLM during a refit."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from typing_extensions import override

from fp8refit.driver.admission import Gate
from fp8refit_vllm.compat import http_refusal, late_refusal


class LlmGate(Gate):
    """Replaces the entry points of an AsyncLLM until it is opened.

    While it is closed, requests wait, and a call that would resume the scheduler takes effect only after the refit.

    Args:
        llm: The AsyncLLM.
        on_resume: Called when a user resumes generation.
    """

    entries = ("generate", "encode", "add_request", "resume_generation", "wake_up")

    def __init__(self, llm: Any, on_resume: Callable[[], None]) -> None:
        self._on_resume = on_resume
        # Every request, and every part of one, passes the output processor after input processing.
        super().__init__(llm, (llm.output_processor, "add_request"), http_refusal)

    @override
    def refuse_late(self, reason: str, *_: Any, **__: Any) -> None:
        raise late_refusal(reason)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Wait at the gate, then call the engine's own method."""
        await self.pass_through()
        async for output in type(self._owner).generate(self._owner, *args, **kwargs):
            yield output

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Wait at the gate, then call the engine's own method."""
        await self.pass_through()
        async for output in type(self._owner).encode(self._owner, *args, **kwargs):
            yield output

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Wait at the gate, then call the engine's own method."""
        await self.pass_through()
        return await type(self._owner).add_request(self._owner, *args, **kwargs)

    async def resume_generation(self) -> None:
        """Record the request; it takes effect once a refit has succeeded."""
        self._on_resume()

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the refit in progress, because waking up also resumes the scheduler."""
        await self.until_decided()
        return await type(self._owner).wake_up(self._owner, *args, **kwargs)
