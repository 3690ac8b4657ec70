"""Where requests to one AsyncLLM wait for the end of a refit, or are refused."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from typing_extensions import override

from fp8refit.driver.admission import Gate, refusal


class LlmGate(Gate):
    """Replaces an AsyncLLM's entries, until it is opened.

    While it is closed requests wait, and whoever would let the scheduler go on is told that it will, once the refit is over.

    Args:
        llm: The AsyncLLM.
        on_resume: What to do when somebody asks for generation to be resumed.
        refuse_with: Gives the error for a reason to refuse requests.
    """

    _ENTRIES = ("generate", "encode", "add_request", "resume_generation", "wake_up")

    def __init__(
        self, llm: Any, on_resume: Callable[[], None], refuse_with: Callable[[str], Exception] = refusal
    ) -> None:
        super().__init__(refuse_with)
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
        """Those that were being taken in when the gate was closed are refused too."""
        super().refuse(reason)

        def refuse_late(*_: Any, **__: Any) -> None:
            raise self._refuse_with(reason)

        # Every request, and every part of one, passes here after its input was processed and before the core has it.
        self._llm.output_processor.__dict__["add_request"] = refuse_late

    @override
    def open(self) -> None:
        """The engine gets its own entries back."""
        super().open()
        self._llm.output_processor.__dict__.pop("add_request", None)
        for name in self._ENTRIES:
            self._llm.__dict__.pop(name, None)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Replaces the engine's own."""
        await self.pass_through()
        async for output in type(self._llm).generate(self._llm, *args, **kwargs):
            yield output

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Replaces the engine's own."""
        await self.pass_through()
        async for output in type(self._llm).encode(self._llm, *args, **kwargs):
            yield output

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the engine's own."""
        await self.pass_through()
        return await type(self._llm).add_request(self._llm, *args, **kwargs)

    async def resume_generation(self) -> None:
        """Replaces the engine's own: takes effect when a refit has succeeded."""
        self._on_resume()

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the engine's own, which also lets the scheduler go on: waits for a refit that is under way."""
        await self.until_decided()
        return await type(self._llm).wake_up(self._llm, *args, **kwargs)
