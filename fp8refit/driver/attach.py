"""Attaches one adapter to each live engine, and admits one refit at a time."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from fp8refit.driver.adapters import connect, find_adapters, name_adapters
from fp8refit.driver.engine import Engine
from fp8refit.errors import UnsupportedEngineError

_ATTACHED = "_fp8refit_engine"
_HOLDER = "_fp8refit_holder"


class Turn:
    """A lock that one refit at a time holds.

    It knows its holder, so `end` is safe to call even if an interrupt hit `take` or `end` halfway.
    """

    def __init__(self) -> None:
        self._holders: dict[str, object] = {}

    def take(self, holder: object) -> bool:
        """Take the lock for `holder`; False if another holder has it."""
        return self._holders.setdefault("holder", holder) is holder

    def end(self, holder: object) -> None:
        """Release the lock, if `holder` has it. May be repeated."""
        if self._holders.get("holder") is holder:
            del self._holders["holder"]


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """An adapter on its engine, with the engine's lock. Not copied or pickled with the engine."""

    engine: Engine
    turn: Turn = field(default_factory=Turn)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """Restores a pickled attachment as None."""


class _Holder(weakref.ref[Any]):
    """A reference to what runs a network. Not copied or pickled with it."""

    __deepcopy__, __reduce__ = AttachedEngine.__deepcopy__, AttachedEngine.__reduce__


def hold(network: object, holder: object) -> None:
    """Make `attach_engine(network)` return the engine of `holder`, which runs the network."""
    object.__setattr__(network, _HOLDER, _Holder(holder))


def attach_engine(candidate: object) -> AttachedEngine:
    """Return the adapter attached to `candidate`, attaching one first if necessary.

    It is stored on the candidate, so all `Refitter`s of one engine share plan, version and state. For a URL, the server
    is detected every time.

    Raises:
        UnsupportedEngineError: No installed adapter accepts it.
        EngineLostError: It is a URL where no server answers.
    """
    if isinstance(candidate, str) and "://" in candidate:
        candidate = connect(candidate)
    holder: _Holder | None = getattr(candidate, _HOLDER, None)
    candidate = holder() or candidate if holder is not None else candidate
    attached: AttachedEngine | None = getattr(candidate, _ATTACHED, None)
    if attached is not None:
        return attached
    adapters, broken = find_adapters()
    for adapter in adapters.values():
        if adapter.accepts(candidate):
            attached = AttachedEngine(adapter(candidate))
            object.__setattr__(candidate, _ATTACHED, attached)
            return attached
    kind = type(candidate)
    raise UnsupportedEngineError(
        f"{kind.__module__}.{kind.__qualname__} is not an engine that an installed adapter knows ({name_adapters(adapters)})",
        broken,
    )
