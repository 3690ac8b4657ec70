"""What an adapter implements, and how the core finds it.

The control plane is `Engine`: one object per live engine, on the driver's side. The data plane is `Ranks`: prepare, write
and commit on every rank of that engine. The core never imports an engine; adapters register in the entry-point group
`fp8refit.engines`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from typing_extensions import override

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.errors import RankFailedError, RefitError, UnsupportedEngineError
from fp8refit.fill.fills import Prepared
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.rank import Rank
from fp8refit.remote.servers.control import ControlPlane
from fp8refit.remote.servers.http_client import Server
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.handover import HandedSource
from fp8refit.sources.source import Source
from fp8refit.transport.caught import Caught

ENTRY_POINT_GROUP = "fp8refit.engines"
_ATTACHED = "_fp8refit_engine"
_HOLDER = "_fp8refit_holder"


class Ranks(Protocol):
    """Every rank of one engine, as one. `prepare` may be repeated; `write` follows a `prepare` that returned.

    A driver that fails at a step hands its error to the next one as an objection, so that the drivers of the other ranks,
    if each rank has one, hear of it there instead of waiting.
    """

    @property
    def version(self) -> int:
        """Policy version held; 0 is what the engine was booted with."""
        ...

    @property
    def is_dirty(self) -> bool:
        """Whether a write began and was not committed."""
        ...

    @property
    def drops_caches(self) -> bool:
        """Whether `write` has the engine drop its caches, once every rank can take what was prepared; nobody else need then."""
        ...

    async def prepare(
        self,
        make_source: Callable[[], Source],
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        objection: BaseException | None = None,
    ) -> None:
        """Judge names, shapes, dtypes, scales and readiness on every rank, and compile what is missing. Writes nothing.

        Where the ranks know the source's layout already, they may be asked together with the write: then that raises what they
        refuse, and nothing is written either.

        Args:
            make_source: Gives the policy; called only when every rank is ready.
            config: How to refit.
            kv: Which KV scales `write` sets once the weights are in place, measured or given.
            objection: Why the engine may not be refitted now; raised here, and by the drivers of the other ranks.

        Raises:
            InvalidSourceError: The source does not fit; names everything that is wrong with it.
            NonFiniteError: NaN or Inf, if they are looked for before writing.
            UnsupportedEngineError: The engine cannot be refitted, or its KV scales not be set; names every module and the
                setting that helps.
            InvalidCalibrationError: A calibration batch, or KV scales, that do not fit the engine.
            EngineAsleepError: The weights are not mapped.
            EngineLostError: A rank is gone.
        """
        ...

    async def write(self, *, objection: BaseException | None = None) -> Sequence[RankReport]:
        """Write what was prepared on every rank, and commit it there once it is whole on all; one report per rank.

        Args:
            objection: Why nothing may be written (caches that stayed); raised here, and by the drivers of the other ranks.

        Raises:
            NonFiniteError: NaN or Inf in the source. This and every later error leaves all ranks dirty.
            CalibrationError: NaN or Inf in the network, or no memory to measure it.
            RefitError: See `fp8refit.ranks.target.Target.finish`.
        """
        ...

    async def check_calibration(
        self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None
    ) -> None:
        """Check that KV scales can be set on every rank, while requests still run. Changes nothing.

        Args:
            kv: What to measure, or which scales to set.
            config: How.
            objection: Why not; raised here, and by the drivers of the other ranks.

        Raises:
            EngineDirtyError: No whole policy is served.
            RefitError: See `prepare`.
        """
        ...

    async def calibrate(self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None) -> KvReport:
        """Set KV scales on every rank for the policy that is served, and say which.

        Args:
            kv: What to measure, or which scales to set.
            config: How.
            objection: Why nothing may be written; raised here, and by the drivers of the other ranks.

        Raises:
            EngineDirtyError: No whole policy is served.
            CalibrationError: NaN or Inf in the network, or no memory to measure it; nothing was written.
            RefitError: See `prepare`. An error after the first scale was written leaves all ranks dirty.
        """
        ...

    async def verify(self, make_source: Callable[[], Source], config: RefitConfig) -> Sequence[RankReport]:
        """Compare what every rank holds with what it would write of a policy; one report per rank. Changes nothing.

        Raises:
            RefitError: See `prepare`, and `fp8refit.ranks.target.Target.finish`.
        """
        ...

    async def abandon(self) -> None:
        """Let go of what was prepared."""
        ...

    async def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals of all ranks."""
        ...

    async def fingerprints(self) -> Sequence[str]:
        """A digest of the weights of each rank, in order of rank."""
        ...

    async def close(self) -> None:
        """Drop what is held beyond the engine itself."""
        ...


class LocalRanks(Ranks):
    """Implements `Ranks` for a rank in this process: alone, or one of several whose drivers call alike.

    Args:
        rank: The rank.
    """

    drops_caches = False

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._prepared: Prepared | None = None

    @property
    def rank(self) -> Rank:
        """The rank itself."""
        return self._rank

    @property
    @override
    def version(self) -> int:
        return self._rank.target.version

    @property
    @override
    def is_dirty(self) -> bool:
        return self._rank.target.is_dirty

    @override
    async def prepare(
        self,
        make_source: Callable[[], Source],
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        objection: BaseException | None = None,
    ) -> None:
        self._prepared = None
        self._prepared = self._rank.prepare(make_source, config, kv=kv, objection=objection)

    @override
    async def write(self, *, objection: BaseException | None = None) -> Sequence[RankReport]:
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "write() follows a prepare() that returned"
        self._rank.agree(prepared, objection=objection)
        if isinstance(prepared.source, HandedSource):
            return await self._take(prepared, prepared.source)
        return self._rank.write(prepared)

    async def _take(self, prepared: Prepared, source: HandedSource) -> Sequence[RankReport]:
        """Write what is handed over.

        A rank that cannot goes on taking it, if there are others: they may wait for it where the buckets come from.
        """
        rank, error = self._rank, None
        with Caught() as failed:
            rank.begin(prepared)
        while failed.error is None or rank.group.size > 1:
            with Caught() as ended:
                bucket = await source.next_bucket()
            if ended.error is not None:
                error = ended.take()
                if isinstance(error, GeneratorExit):
                    error = RankFailedError("an update was left in its middle")
                break
            if bucket is None:
                break
            if failed.error is not None:
                for _ in bucket:
                    pass
                continue
            with Caught() as failed:
                rank.push(bucket, drain=rank.group.size > 1)
            del bucket
        error = failed.error if failed.error is not None else error
        return rank.finish(prepared, objection=error)

    @override
    async def check_calibration(
        self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None
    ) -> None:
        self._rank.check_calibration(kv, config, objection=objection)

    @override
    async def calibrate(self, kv: KvOrder, config: RefitConfig, *, objection: BaseException | None = None) -> KvReport:
        return self._rank.calibrate(kv, config, objection=objection)

    @override
    async def verify(self, make_source: Callable[[], Source], config: RefitConfig) -> Sequence[RankReport]:
        return self._rank.write(self._rank.prepare(make_source, config, compares=True))

    @override
    async def abandon(self) -> None:
        self._prepared = None
        self._rank.target.abandon()

    @override
    async def layout(self) -> EngineLayout:
        return self._rank.layout()

    @override
    async def fingerprints(self) -> Sequence[str]:
        return [self._rank.fingerprint()]

    @override
    async def close(self) -> None:
        self._rank.close()


class Engine(ControlPlane, Protocol):
    """One live engine. The methods of a synchronous one never suspend: `Refitter.refit` runs them without an event loop."""

    name: str
    ranks: Ranks

    @property
    def is_asynchronous(self) -> bool:
        """Whether the engine is driven from an event loop, and so refitted by `await refitter.refit_async(...)` alone."""
        ...

    async def check_ready(self) -> None:
        """Refuse to begin while weights may not be written.

        Raises:
            EngineBusyError: Requests are unfinished, and the engine cannot wait for them.
            EngineAsleepError: The weights are not mapped.
        """
        ...


class Adapter(Engine, Protocol):
    """What an entry point names: a kind of engine, each instance of which is attached to a live one.

    An adapter whose engine has servers of its own says so by a class attribute `server`, an `http_client.Server`.
    """

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


def connect(url: str, *, api_key: str | None = None, token: str | None = None) -> Server:
    """Find out which engine's server listens at `url`.

    Args:
        url: As `http://127.0.0.1:8000`.
        api_key: See `fp8refit.remote.servers.http_client.Server`.
        token: See there.

    Raises:
        EngineLostError: Nobody answers.
        UnsupportedEngineError: None that an installed adapter knows, or it asks for another API key.
    """
    adapters, broken = find_adapters()
    kinds: dict[str, type[Server]] = {
        name: adapter.server for name, adapter in adapters.items() if hasattr(adapter, "server")
    }
    for kind in kinds.values():
        server = kind(url, api_key=api_key, token=token)
        if server.recognise():
            return server
    raise UnsupportedEngineError(
        f"{url} is no server of an engine that an installed adapter knows ({name_adapters(kinds)})", broken
    )


def find_adapters() -> tuple[dict[str, type[Adapter]], list[str]]:
    """Every installed adapter by name, and one line for each that cannot be imported."""
    adapters, broken = {}, []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            adapters[point.name] = point.load()
        except ImportError as error:
            broken.append(f"the adapter {point.name} cannot be imported: {error}")
    return adapters, broken


def find_adapter(name: str) -> type[Adapter]:
    """The adapter that is installed under `name`.

    Raises:
        UnsupportedEngineError: There is none.
    """
    adapters, broken = find_adapters()
    if name not in adapters:
        raise UnsupportedEngineError(f"no adapter is called {name!r}; installed are {name_adapters(adapters)}", broken)
    return adapters[name]


@contextmanager
def booting(engine: str, model: object, *, act: str = "boot") -> Iterator[None]:
    """Around an engine's own code: what it raises over a model or setting that it does not know is its own affair.

    Raises:
        UnsupportedEngineError: It raised something, which is named.
    """
    try:
        yield
    except RefitError:
        raise
    except Exception as error:
        raise UnsupportedEngineError(f"{engine} cannot {act} {model}: {type(error).__name__}: {error}") from error


def name_adapters(adapters: Iterable[str]) -> str:
    """The names, for a message."""
    return ", ".join(sorted(adapters)) or "none: install fp8refit, a path alone has no entry points"
