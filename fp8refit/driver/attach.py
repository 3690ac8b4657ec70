"""Attaches one adapter to each live engine, and lets one refit at a time have it."""

import weakref
from dataclasses import dataclass, field
from typing import Any

from fp8refit.driver.adapters import connect, find_adapters, name_adapters
from fp8refit.driver.engine import Engine
from fp8refit.errors import UnsupportedEngineError

_ATTACHED = "_fp8refit_engine"
_HOLDER = "_fp8refit_holder"


class Turn:
    """What one refit of an engine at a time holds.

    A lock whose holder is known: after an interrupt that comes in the middle of `take` or `end`, `end` is right in any case.
    """

    def __init__(self) -> None:
        self._holders: dict[str, object] = {}

    def take(self, holder: object) -> bool:
        """Whether `holder` has it now; False if another has."""
        return self._holders.setdefault("holder", holder) is holder

    def end(self, holder: object) -> None:
        """Let go of it, if `holder` has it. May be repeated."""
        if self._holders.get("holder") is holder:
            del self._holders["holder"]


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """An adapter on its engine, and the turn that one refit at a time takes. A copied or pickled engine has none."""

    engine: Engine
    turn: Turn = field(default_factory=Turn)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """What an attached engine, or a holder, is restored as."""


class _Holder(weakref.ref[Any]):
    """What runs a network. That of a copied or pickled one is not known."""

    __deepcopy__, __reduce__ = AttachedEngine.__deepcopy__, AttachedEngine.__reduce__


def hold(network: object, holder: object) -> None:
    """Let whoever asks for the engine of `network` be given that of `holder`, which runs it."""
    object.__setattr__(network, _HOLDER, _Holder(holder))


def attach_engine(candidate: object) -> AttachedEngine:
    """Give the adapter attached to `candidate`, attaching one if there is none yet.

    It stays on the candidate, so that every `Refitter` of one engine shares its plan, version and state. A URL is no
    candidate for that: each time it is given, it is asked anew who answers there.

    Raises:
        UnsupportedEngineError: No installed adapter takes it.
        EngineLostError: It is a URL at which nobody answers.
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
        f"{kind.__module__}.{kind.__qualname__} is no engine that an installed adapter knows ({name_adapters(adapters)})",
        broken,
    )
