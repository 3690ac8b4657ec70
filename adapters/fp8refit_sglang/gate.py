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

    _ENTRIES = ("generate_request", "pause_generation", "continue_generation")
    _LAST_STEP = "_validate_and_resolve_lora"
    """Every request, and every part of one, passes this method after waiting for pauses and before the schedulers get
    it."""

    def __init__(
        self, manager: Any, on_decision: Callable[[bool], None], refuse_with: Callable[[str, Any], Exception]
    ) -> None:
        super().__init__()
        self._refuse_with = refuse_with
        self._manager = manager
        self._on_decision = on_decision
        for name in self._ENTRIES:
            manager.__dict__[name] = getattr(self, name)

    @override
    def close(self) -> None:
        super().close()
        self._manager.__dict__.pop(self._LAST_STEP, None)

    @override
    def refuse(self, reason: str) -> None:
        """Also refuse requests that were past the gate but not yet with the schedulers when it closed."""
        super().refuse(reason)

        async def refuse_late(request: Any) -> None:
            raise self._refuse_with(reason, request)

        self._manager.__dict__[self._LAST_STEP] = refuse_late

    @override
    def open(self) -> None:
        """Also restore the manager's own entry points."""
        super().open()
        for name in (*self._ENTRIES, self._LAST_STEP):
            self._manager.__dict__.pop(name, None)

    async def generate_request(self, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Wait at the gate, then call the manager's own method."""
        await self.until_decided()
        if self.reason is not None:
            raise self._refuse_with(self.reason, obj)
        async for output in type(self._manager).generate_request(self._manager, obj, *args, **kwargs):
            yield output

    async def pause_generation(self, *_: Any, **__: Any) -> None:
        """Record the pause; it takes effect when the refit is over."""
        self._on_decision(True)

    async def continue_generation(self, *_: Any, **__: Any) -> None:
        """Record the resumption; it takes effect once a refit has succeeded."""
        self._on_decision(False)
