"""What an adapter implements, and how the core finds it.

The control plane is `Engine`: one object a live engine, on the driver's side. The data plane is `Ranks`: prepare, write
and commit on every rank of that engine. The core never imports an engine; adapters register in the entry-point group
`fp8refit.engines`.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from fp8refit.config import RefitConfig
from fp8refit.errors import UnsupportedEngineError
from fp8refit.layout import EngineLayout
from fp8refit.report import WriteResult
from fp8refit.sources import Source

ENTRY_POINT_GROUP = "fp8refit.engines"
_ATTACHED = "_fp8refit_engine"


class Ranks(Protocol):
    """Every rank of one engine, as one. `prepare` may be repeated; `write` follows a `prepare` that returned."""

    @property
    def version(self) -> int:
        """Policy version held; 0 is what the engine was booted with."""
        ...

    @property
    def is_dirty(self) -> bool:
        """Whether a write began and was not committed."""
        ...

    def prepare(self, source: Source, config: RefitConfig) -> None:
        """Judge names, shapes, dtypes, scales and readiness, and compile what is missing. Writes nothing.

        Raises:
            InvalidSourceError: The source does not fit; names everything that is wrong with it.
            NonFiniteError: NaN or Inf, if they are looked for before writing.
            UnsupportedEngineError: The engine cannot be refitted; names every module and the setting that helps.
        """
        ...

    def write(self) -> WriteResult:
        """Write what was prepared. The ranks are dirty from the first byte until `commit`."""
        ...

    def commit(self) -> int:
        """Declare the written policy whole, and give its version."""
        ...

    def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals."""
        ...

    def close(self) -> None:
        """Drop what is held beyond the engine itself."""
        ...


class Engine(Protocol):
    """One live engine, as its adapter presents it."""

    name: str
    ranks: Ranks

    @classmethod
    def accepts(cls, candidate: object) -> bool:
        """Whether `candidate` is this adapter's kind of engine. Must not import the engine."""
        ...

    def __init__(self, candidate: Any) -> None:
        """Attach to `candidate`.

        Raises:
            UnsupportedEngineError: It is of the right kind, but cannot be refitted.
        """
        ...

    @classmethod
    def boot(cls, model: str) -> Any:
        """Start an engine of this kind, in this process, on a model folder; for the command line.

        Raises:
            UnsupportedEngineError: The engine is not installed.
        """
        ...

    def check_ready(self) -> None:
        """Refuse to begin while weights may not be written.

        Raises:
            EngineBusyError: Requests are unfinished.
            EngineAsleepError: The weights are not mapped.
        """
        ...

    def block_requests(self, reason: str) -> None:
        """From now on refuse every request at admission with `EngineDirtyError(reason)`; may be repeated."""
        ...

    def unblock_requests(self) -> None:
        """Admit requests again, leaving no trace of the block."""
        ...

    def flush_caches(self) -> None:
        """Drop everything computed under the previous policy: prefix, multimodal and encoder caches.

        Raises:
            CacheFlushError: The engine kept some of it.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """An adapter on its engine, and the lock that one refit at a time holds. A copied or pickled engine has none."""

    engine: Engine
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """What an attached engine is restored as."""


def attach_engine(candidate: object) -> AttachedEngine:
    """Give the adapter attached to `candidate`, attaching one if there is none yet.

    It stays on the candidate, so that every `Refitter` of one engine shares its plan, version and state.

    Raises:
        UnsupportedEngineError: No installed adapter takes it.
    """
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


def find_adapters() -> tuple[dict[str, type[Engine]], list[str]]:
    """Every installed adapter by name, and one line for each that cannot be imported."""
    adapters, broken = {}, []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            adapters[point.name] = point.load()
        except ImportError as error:
            broken.append(f"the adapter {point.name} cannot be imported: {error}")
    return adapters, broken


def name_adapters(adapters: Iterable[str]) -> str:
    """The names, for a message."""
    return ", ".join(sorted(adapters)) or "none: install fp8refit, a path alone has no entry points"
