"""Where requests to one SGLang engine wait for the end of a refit, or are refused."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from typing_extensions import override

from fp8refit.driver.admission import Gate


class TokenizerGate(Gate):
    """Replaces a tokenizer manager's entries, until it is opened.

    Whoever pauses generation meanwhile, or lets it go on, is told that it will be so, once the refit is over.

    Args:
        manager: The tokenizer manager.
        on_decision: What to do when somebody wants generation paused (True) or to go on (False).
        refuse_with: Gives the error for a reason to refuse requests, and for one of them.
    """

    _ENTRIES = ("generate_request", "pause_generation", "continue_generation")
    _LAST_STEP = "_validate_and_resolve_lora"
    """Every request, and every part of one, passes here after it waited for pauses and before the schedulers have it."""

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
        """Those that were being taken in when the gate was closed are refused too."""
        super().refuse(reason)

        async def refuse_late(request: Any) -> None:
            raise self._refuse_with(reason, request)

        self._manager.__dict__[self._LAST_STEP] = refuse_late

    @override
    def open(self) -> None:
        """The manager gets its own entries back."""
        super().open()
        for name in (*self._ENTRIES, self._LAST_STEP):
            self._manager.__dict__.pop(name, None)

    async def generate_request(self, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Replaces the manager's own."""
        await self.until_decided()
        if self.reason is not None:
            raise self._refuse_with(self.reason, obj)
        async for output in type(self._manager).generate_request(self._manager, obj, *args, **kwargs):
            yield output

    async def pause_generation(self, *_: Any, **__: Any) -> None:
        """Replaces the manager's own: takes effect when a refit is over."""
        self._on_decision(True)

    async def continue_generation(self, *_: Any, **__: Any) -> None:
        """Replaces the manager's own: takes effect when a refit has succeeded."""
        self._on_decision(False)
