"""One engine rank as the target of refits: its version, and whether it holds a whole policy.

`prepare` checks a source and returns a `Prepared`, `write` fills from it, and `commit` declares the result whole. From
the first byte of a write until its commit the rank is dirty; only a later complete write heals it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.errors import (
    EngineAsleepError,
    EngineBusyError,
    EngineLostError,
    InvalidSourceError,
    LiveTensorMovedError,
    NonFiniteError,
    UnsupportedEngineError,
)
from fp8refit.fill.fill import Arriving
from fp8refit.fill.fills import Fills, Prepared
from fp8refit.fill.plan import is_any_of
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import Inventory, Refusal
from fp8refit.live.turn import IN_USE, DisplacedError, Turn
from fp8refit.ranks.live_model import LiveModel, are_mapped, assert_in_place
from fp8refit.ranks.write import Write
from fp8refit.report import RankReport
from fp8refit.sources.source import MappingSource, PushedSource, Source

logger = logging.getLogger(__name__)

_targets: "WeakValueDictionary[int, Target]" = WeakValueDictionary()
"""All of this process, by id. The memory of one may be another's too: that of a model, and of a part of it."""


class Target:
    """A rank in this process.

    Args:
        read_inventory: Reads the live model; called again whenever a live tensor was replaced.
        device: Device of the live tensors.
        engine: Name of the engine, for layouts.
        versions: Package versions, for layouts.
        check_engine: Raises if the engine cannot be written now.
        on_commit: Called when a policy is declared whole.
        has_constants: Whether the engine was booted with weights; a dummy boot fills everything with noise.

    Attributes:
        live: The live model.
        version: Version of the last committed policy; 0 is what the engine was booted with.
        is_dirty: Whether a write began and was not committed.
        is_watched: Whether `was_written` is asked.
        turn: Whoever prepares, writes or commits holds it, however it came to this target.
    """

    def __init__(
        self,
        read_inventory: Callable[[], Inventory],
        *,
        device: torch.device,
        engine: str,
        versions: Mapping[str, str],
        check_engine: Callable[[], None] = lambda: None,
        on_commit: Callable[[], None] = lambda: None,
        has_constants: bool = False,
    ) -> None:
        self.live = LiveModel(read_inventory, device=device, engine=engine, versions=versions)
        self.live.has_constants = has_constants
        self.version = 0
        self.is_dirty = False
        self.is_watched = False
        self.turn = Turn()
        self._check_engine = check_engine
        self._on_commit = on_commit
        self._write: Write | None = None
        """The current write."""
        self._torn: set[str] = set()
        """Names of slots that unfinished refits may have written, while the rank is dirty."""
        self._is_whole = False
        self._has_lost_values = False
        self._accepted: Tensor | None = None
        _targets[id(self)] = self

    def check_ready(self) -> Inventory:
        """Return the inventory, if the rank can be written now. Changes nothing.

        Raises:
            EngineLostError: A fault ended an earlier refit.
            UnsupportedEngineError: It has layers that cannot be written; names every one.
            EngineAsleepError: Its weights are not mapped.
            EngineBusyError: Its memory is also another target's, which somebody writes.
            RefitError: Whatever `check_engine` raises.
        """
        if self.live.lost_because is not None:
            raise EngineLostError(self.live.lost_because)
        self._check_engine()
        # What a glance misses is found while the policy is written, when the device is busy anyway.
        refusals = self.live.refusals(inventory := self.live.read(), at_a_glance=self.version > 0 and not self.is_dirty)
        if refusals and not inventory.refusals:  # since it was read, the engine may have replaced what a refresh writes
            self.live.forget()
            refusals = self.live.refusals(inventory := self.live.read())
        _check(refusals)
        if not are_mapped(inventory):
            raise EngineAsleepError("the weights are asleep: their memory is not mapped; wake them up before refit")
        others = (reference() for reference in _targets.valuerefs())
        for busy in (other for other in others if other not in (None, self) and not other.turn.is_free):
            if not self.live.memory.isdisjoint(busy.live.memory):
                raise EngineBusyError(IN_USE)
        return inventory

    def check_proved(self) -> None:
        """Check that the engine's own loader does what the inventory says. Looks at it once for an inventory.

        Raises:
            EngineLostError: A CUDA fault.
            UnsupportedEngineError: It does not; names every tensor.
        """
        _check(self.live.prove(_write_apart))

    def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals, and whether the engine's loader does what they say.

        Raises:
            EngineLostError: A CUDA fault.
        """
        if not self.live.read().refusals:
            self.live.prove(_write_apart)
        return self.live.layout()

    def read_ahead(self) -> None:
        """Read the inventory for a refit that is about to be prepared. If it cannot be read now, `check_ready` says why."""
        try:
            if self.live.lost_because is None:
                self._check_engine()
                self.live.read()
        except Exception:
            logger.debug("the layout cannot be read yet", exc_info=True)

    def prepare(
        self,
        source: Source,
        config: RefitConfig,
        *,
        is_ready: bool = False,
        foreign: frozenset[str] = frozenset(),
        compares: bool = False,
    ) -> Prepared:
        """Check names, shapes, dtypes and scales, and compile what is missing. Writes nothing; may be repeated.

        Args:
            source: The whole policy.
            config: Options of the refit.
            is_ready: Whether `check_ready` has just returned; otherwise it is called.
            foreign: Names that only other ranks hold. They are accepted.
            compares: Compare with the slots instead of writing to them.

        Raises:
            InvalidSourceError: The source does not fit; lists every problem.
            NonFiniteError: NaN or Inf, with `validate="strict"`.
            StagingMemoryError: There is no room for a stream's buckets.
            RefitError: See `check_ready`.
        """
        if not is_ready or self.live.fills is None:
            self.check_ready()
            self.abandon()
            if config.prove_trace:
                self.check_proved()
        fills = self.live.fills
        assert fills is not None, "ready"
        with self.live.on_device():
            self.live.synchronize()
            try:
                prepared = fills.prepare(source, config, foreign=foreign, compares=compares)
                self._check_kept(prepared)
                if self.live.source_scales is not None:
                    self.live.source_scales.check(source, prepared.plan)
                if config.validate_values == "strict" and not isinstance(source, PushedSource):
                    prepared.check_values()
                prepared.compile()
            except BaseException as error:
                self.abandon(error)
                raise
        return prepared

    def is_current(self, prepared: Prepared) -> bool:
        """Whether `prepared` is what was prepared last, and neither given up nor finished."""
        return self.live.fills is not None and self.live.fills.is_current(prepared)

    def write(self, prepared: Prepared, *, drain: bool = False) -> RankReport:
        """Write what was prepared, reading its source. The rank is dirty from the first byte until `commit`.

        Args:
            prepared: The result of `prepare`, which can be used only once.
            drain: See `Fill.read`.

        Raises:
            RefitError: See `finish`.
        """
        write = self.begin(prepared)
        with self._undone_on_error():
            write.read(drain=drain)
        return self.finish()

    def begin(self, prepared: Prepared) -> Write:
        """Write what needs no staging, and get ready for `push`. The rank is dirty from here until `commit`.

        Raises:
            DisplacedError: `prepared` is not current.
        """
        if not self.is_current(prepared):
            raise DisplacedError
        if not are_mapped(prepared.inventory):
            self.abandon()
            raise EngineAsleepError("the weights went to sleep after the refit was prepared; wake them up, then refit")
        if prepared.writes:
            if self.version == 0:  # its first requests may have run since it was prepared
                with self._undone_on_error():
                    _check(self.live.refusals())
            self._torn |= _names(prepared.inventory) - set(_kept(prepared))
            self.is_dirty = True
        with self._undone_on_error():
            self._write = write = Write(prepared, self.live)
            write.begin()
        return write

    def push(self, tensors: Iterable[Arriving] = (), *, drain: bool = False) -> None:
        """Write a part of a `PushedSource` (tensors or runs of rows), or the next bucket of a `ReceivedSource`.

        Args:
            tensors: The part. Later work on the current stream may overwrite it.
            drain: See `Fill.read`.

        Raises:
            InvalidSourceError: A tensor arrived twice, incomplete, or not as announced.
            DisplacedError: The write was given up.
        """
        write = self._current()
        with self._undone_on_error():
            write.take(tensors, drain=drain)

    def finish(self) -> RankReport:
        """Complete the write, wait for the device and read its flags.

        Raises:
            RefitError: See `Write.finish`.
            DisplacedError: The write was given up.
            EngineLostError: A CUDA fault.
        """
        write = self._current()
        with self._undone_on_error():
            report = write.finish()
        self.abandon()
        if write.prepared.writes:
            self._is_whole, self._has_lost_values, self.live.has_constants = True, False, True
        return report

    def holds(self, tensors: Mapping[str, Tensor], *, foreign: frozenset[str] = frozenset()) -> bool:
        """Whether the slots hold what a refit would write from some tensors. In the middle of a write, what has come counts.

        Args:
            tensors: By checkpoint name.
            foreign: Names that only other ranks hold.

        Raises:
            EngineAsleepError: The weights are not mapped.
        """
        inventory = self.live.read_mapped().part(tensors)
        with self.live.on_device():
            if self._write is not None:
                self._write.flush()
            self.live.synchronize()
            fills, config = Fills(inventory, self.live.device), RefitConfig(keep=("*",))
            try:
                prepared = fills.prepare(MappingSource(tensors), config, foreign=foreign, compares=True)
                write = Write(prepared, self.live)
                write.begin()
                write.read(drain=False)
                return not write.finish().differing
            except (InvalidSourceError, NonFiniteError):
                return False

    def trust(self, names: Iterable[str]) -> None:
        """Note that the slots of some tensors hold what the next refit would write, although a refit that failed wrote them."""
        self._torn.difference_update(slot.name for slot in self.live.read().part(names).slots)

    def abandon(self, because: BaseException | None = None) -> None:
        """Drop what was prepared or is being written, unless `because` says that it is somebody else's.

        A partly written rank stays dirty.
        """
        if isinstance(because, EngineBusyError | DisplacedError):
            return
        self._is_whole = False
        write, self._write = self._write, None
        if write is not None and write.prepared.writes:
            self._torn.update(write.came())
        if write is not None:
            write.prepared.release()
        if self.live.fills is not None:
            self.live.fills.release()

    def write_kv(self, scales: Mapping[str, float]) -> dict[str, float]:
        """Write KV scales, and return what was written. The rank is dirty from the first one until `commit`.

        Raises:
            LiveTensorMovedError: The engine replaced a live tensor in the meantime.
            EngineLostError: A CUDA fault.
        """
        self.is_dirty, self._is_whole = True, False
        with self._undone_on_error():
            written = self.live.require_kv().write(scales)
            assert self.live.inventory is not None, "read"
            assert_in_place(self.live.inventory)
        self._is_whole = True
        return written

    def commit(self, version: int | None = None) -> int:
        """Declare the policy whole, after `finish` has returned, and return its version; by default the next one."""
        if not self._is_whole:
            raise DisplacedError
        version, kv = version if version is not None else self.version + 1, self.live.kv
        self.accept()
        # One statement, so that no interrupt can separate them.
        if kv is not None:
            self.version, self.is_dirty, kv.torn = version, False, None
        else:
            self.version, self.is_dirty = version, False
        self._is_whole = False
        self._torn.clear()
        self._on_commit()
        return version

    def forget_values(self) -> None:
        """Note that all weights are lost, as after level-2 sleep: the next refit must bring all of them."""
        self.abandon()
        self._has_lost_values, self.live.has_constants = True, False
        self._accepted = None

    def accept(self) -> None:
        """Remember what the weights hold, for `was_written`."""
        if self.is_watched:
            with self.live.on_device():
                self._accepted = self.live.read().watch.sample()

    def was_written(self) -> bool:
        """Whether somebody else has written the weights since the last commit; False while they are dirty or asleep."""
        if self._accepted is None or self.is_dirty or not are_mapped(inventory := self.live.read()):
            return False
        with self.live.on_device():
            return not torch.equal(inventory.watch.sample(), self._accepted)

    def distrust(self) -> None:
        """Note that somebody else has written the weights: the next refit must bring all of them."""
        self.is_dirty, self._torn = True, self._torn | _names(self.live.read())

    def close(self) -> None:
        """Release everything except the engine itself."""
        self.abandon()
        self.live.close()

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """On an error, drop what was prepared: after a partial write only a new refit helps."""
        try:
            with self.live.on_device():
                yield
        except BaseException as error:
            self.abandon(error)
            if isinstance(error, LiveTensorMovedError):
                self.live.forget()
            if isinstance(error, InvalidSourceError) and self.is_dirty:
                raise InvalidSourceError(error.problems, written=True) from error
            raise

    def _current(self) -> Write:
        if self._write is None:
            raise DisplacedError
        return self._write

    def _check_kept(self, prepared: Prepared) -> None:
        """Check that this rank still has the values it is to keep.

        Raises:
            InvalidSourceError: It does not; names each.
        """
        kept = _kept(prepared)
        problems = [
            f"{name}: kept, but a failed refit has overwritten it; send it" for name in kept if name in self._torn
        ]
        if self._has_lost_values:
            problems = [f"{name}: kept, but sleep mode has discarded this engine's values; send it" for name in kept]
        if problems:
            raise InvalidSourceError(problems)


def _check(refusals: Sequence[Refusal]) -> None:
    if refusals:
        raise UnsupportedEngineError(
            "this engine cannot be refitted, and nothing was written:", [str(refusal) for refusal in refusals]
        )


def _write_apart(inventory: Inventory, policy: Mapping[str, Tensor]) -> None:
    """Write a policy into tensors that no engine serves."""
    device = inventory.slots[0].weight.device
    target = Target(lambda: inventory, device=device, engine="", versions={})
    target.write(target.prepare(MappingSource(policy), RefitConfig(prove_trace=False)))


def _names(inventory: Inventory) -> set[str]:
    return {slot.name for slot in inventory.slots}


def _kept(prepared: Prepared) -> list[str]:
    """Names of slots that are kept, as far as known."""
    if prepared.plan is not None:
        return list(prepared.plan.kept)
    if not prepared.config.keep:
        return []
    return list(filter(is_any_of(prepared.config.keep), _names(prepared.inventory)))
