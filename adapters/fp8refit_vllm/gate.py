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

    _ENTRIES = ("generate", "encode", "add_request", "resume_generation", "wake_up")

    def __init__(self, llm: Any, on_resume: Callable[[], None]) -> None:
        super().__init__(http_refusal)
        self._llm = llm
        self._on_resume = on_resume
        for name in self._ENTRIES:
            llm.__dict__[name] = getattr(self, name)

    @override
    def close(self) -> None:
        super().close()
        self._llm.output_processor.__dict__.pop("add_request", None)

    @override
    def refuse(self, reason: str) -> None:
        """Also refuse requests that were past the gate but not yet in the engine core when it closed."""
        super().refuse(reason)

        def refuse_late(*_: Any, **__: Any) -> None:
            raise late_refusal(reason)

        # Every request, and every part of one, passes here after input processing and before the core receives it.
        self._llm.output_processor.__dict__["add_request"] = refuse_late

    @override
    def open(self) -> None:
        """Also restore the engine's own entry points."""
        super().open()
        self._llm.output_processor.__dict__.pop("add_request", None)
        for name in self._ENTRIES:
            self._llm.__dict__.pop(name, None)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Wait at the gate, then call the engine's own method."""
        await self.pass_through()
        async for output in type(self._llm).generate(self._llm, *args, **kwargs):
            yield output

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Wait at the gate, then call the engine's own method."""
        await self.pass_through()
        async for output in type(self._llm).encode(self._llm, *args, **kwargs):
            yield output

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Wait at the gate, then call the engine's own method."""
        await self.pass_through()
        return await type(self._llm).add_request(self._llm, *args, **kwargs)

    async def resume_generation(self) -> None:
        """Record the request; it takes effect once a refit has succeeded."""
        self._on_resume()

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the refit in progress, because waking up also resumes the scheduler."""
        await self.until_decided()
        return await type(self._llm).wake_up(self._llm, *args, **kwargs)
