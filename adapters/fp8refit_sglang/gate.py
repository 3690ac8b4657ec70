"""Holds or refuses new requests to an SGLang engine during a refit."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from typing_extensions import override

from fp8refit.driver.admission import Gate


class TokenizerGate(Gate):
    """Replaces the entry points of a tokenizer manager until it is opened.

    Calls that pause or resume generation in the meantime return at once and take effect after the refit.

    Args:
        manager: The tokenizer manager.
        on_decision: Called when a user pauses (True) or resumes (False) generation.
        refuse_with: Makes the error for a refused request, from the reason and the request.
    """

    entries = ("generate_request", "pause_generation", "continue_generation")

    def __init__(
        self, manager: Any, on_decision: Callable[[bool], None], refuse_with: Callable[[str, Any], Exception]
    ) -> None:
        self._refuse_request = refuse_with
        self._on_decision = on_decision
        # Every request, and every part of one, passes this method after waiting for pauses.
        super().__init__(manager, (manager, "_validate_and_resolve_lora"))

    @override
    async def refuse_late(self, reason: str, request: Any) -> None:
        raise self._refuse_request(reason, request)

    async def generate_request(self, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Wait at the gate, then call the manager's own method."""
        await self.until_decided()
        if self.reason is not None:
            raise self._refuse_request(self.reason, obj)
        async for output in type(self._owner).generate_request(self._owner, obj, *args, **kwargs):
            yield output

    async def pause_generation(self, *_: Any, **__: Any) -> None:
        """Record the pause; it takes effect when the refit is over."""
        self._on_decision(True)

    async def continue_generation(self, *_: Any, **__: Any) -> None:
        """Record the resumption; it takes effect once a refit has succeeded."""
        self._on_decision(False)
