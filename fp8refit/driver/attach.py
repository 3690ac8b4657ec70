"""Attaches one adapter to each live engine, and admits one refit at a time."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fp8refit.driver.adapters import connect, find_adapters, name_adapters
from fp8refit.driver.engine import Engine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.turn import Turn, Turns

T = TypeVar("T")

_ATTACHED = "_fp8refit_engine"
_HOLDER = "_fp8refit_holder"


_guard = threading.Lock()
_making: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
"""By the id of an object: the lock of whoever makes something for it."""


def made_once(owner: object, name: str, make: Callable[[], T]) -> T:
    """The attribute `name` of `owner`, made at the first call. Other threads wait for it. If `make` raises, nothing is kept."""
    found: T | None = getattr(owner, name, None)
    if found is not None:
        return found
    with _guard:
        lock = _making.setdefault(id(owner), threading.RLock())
    with lock:
        found = getattr(owner, name, None)
        if found is None:
            found = make()
            object.__setattr__(owner, name, found)
        return found


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """An adapter on its engine, with the engine's lock. Not copied or pickled with the engine."""

    engine: Engine
    turn: Turn = field(default_factory=Turn)
    idle: set[str] = field(default_factory=set)
    """Patterns of names that matched nothing, which was said."""

    @property
    def turns(self) -> Turn:
        """What a refit holds: the engine, and its live model if that is here, whoever else is attached to it."""
        ranks = self.engine.ranks
        return Turns((self.turn, ranks.rank.target.turn)) if isinstance(ranks, LocalRanks) else self.turn

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
    if isinstance(candidate, str):
        candidate = connect(candidate)
    holder: _Holder | None = getattr(candidate, _HOLDER, None)
    candidate = holder() or candidate if holder is not None else candidate
    return made_once(candidate, _ATTACHED, lambda: AttachedEngine(_adapt(candidate)))


def _adapt(candidate: object) -> Engine:
    adapters, broken = find_adapters()
    for adapter in adapters.values():
        if adapter.accepts(candidate):
            return adapter(candidate)
    kind = type(candidate)
    raise UnsupportedEngineError(
        f"{kind.__module__}.{kind.__qualname__} is not an engine that an installed adapter knows ({name_adapters(adapters)})",
        broken,
    )
