"""One engine rank being refitted: what it holds, its version, and whether that is a whole policy.

`prepare` judges a source and gives a `Prepared`; `write` fills from it; `commit` declares the result whole. Between the first
byte of a write and its commit the rank is dirty; only a later complete write heals it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.errors import (
    EngineAsleepError,
    EngineLostError,
    InvalidSourceError,
    LiveTensorMovedError,
    UnsupportedEngineError,
)
from fp8refit.fill.fill import Arriving
from fp8refit.fill.fills import Fills, Prepared
from fp8refit.fill.kernels import quantize_blockwise
from fp8refit.fill.plan import RefitPlan, is_any_of
from fp8refit.live.fingerprint import fingerprint
from fp8refit.live.layout import EngineLayout
from fp8refit.live.overlaps import shared_bytes
from fp8refit.live.slots import Inventory, Slot
from fp8refit.ranks.kv.calibration import unfit_scales
from fp8refit.ranks.kv.scales import KvScales, Measured, refuse_unfit, report_of
from fp8refit.report import KvReport, RankReport
from fp8refit.sources.source import PushedSource, RandomAccess, Source

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What was read off the live model, and everything that was made of it."""

    inventory: Inventory
    """With the slots of KV scales that a source may bring."""
    fills: Fills


@dataclass(frozen=True, kw_only=True, slots=True)
class _Writing:
    """A write under way, between its first byte and the reading of the flags."""

    prepared: Prepared
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None
    start_s: float = field(default_factory=time.perf_counter)


class Target:
    """A rank in this process.

    Args:
        read_inventory: Reads the live model; called again whenever a live tensor turns out to have been replaced.
        device: Where the live tensors are.
        engine: Name of the engine, for layouts.
        versions: Package versions, for layouts.
        check_engine: Raises what keeps the engine around the live tensors from being written now.
        on_commit: Called when a policy is declared whole.

    Attributes:
        device: Where the live tensors are.
        version: Of the policy that was committed last; 0 is what the engine was booted with.
        is_dirty: Whether a write began and was not committed.
        lost_because: Why this rank cannot be healed, if it cannot.
    """

    def __init__(
        self,
        read_inventory: Callable[[], Inventory],
        *,
        device: torch.device,
        engine: str,
        versions: dict[str, str],
        check_engine: Callable[[], None] = lambda: None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._read_inventory = read_inventory
        self._check_engine = check_engine
        self._on_commit = on_commit
        self._engine = engine
        self._versions = versions
        self._held: _Held | None = None
        self._kv: KvScales | None = None
        self._torn: set[str] = set()
        """Names of slots that refits may have written which did not come to their end, while the rank is dirty."""
        self._under_way: _Writing | None = None
        self._is_whole = False
        self._has_lost_values = False
        self.device = device
        self.lost_because: str | None = None
        self.is_dirty = False
        self.version = 0

    def check_ready(self) -> Inventory:
        """What this rank holds, if it may be written now.

        Raises:
            EngineLostError: A fault ended an earlier refit.
            UnsupportedEngineError: It has layers that cannot be written; names every one.
            EngineAsleepError: Its weights are not mapped.
            RefitError: What `check_engine` raises.
        """
        if self.lost_because is not None:
            raise EngineLostError(self.lost_because)
        self.abandon()
        self._check_engine()
        inventory = self._look().inventory
        if inventory.refusals:
            raise UnsupportedEngineError(
                "this engine cannot be refitted, and nothing was written:",
                [str(refusal) for refusal in inventory.refusals],
            )
        if not _are_mapped(inventory):
            raise EngineAsleepError("the weights are asleep: their memory is not mapped; wake them up before refit")
        return inventory

    def check_kv(self, order: KvOrder, config: RefitConfig) -> None:
        """Check that KV scales can be set as ordered, after `check_ready`. Changes nothing.

        Raises:
            UnsupportedEngineError: Not on this engine; says what to set.
            InvalidCalibrationError: The batch or the scales do not fit it.
        """
        self._require_kv().check(order, config.kv)

    def prepare(
        self,
        source: Source,
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        is_ready: bool = False,
        foreign: frozenset[str] = frozenset(),
        compares: bool = False,
    ) -> Prepared:
        """Judge names, shapes, dtypes and scales, and compile what is missing. Writes nothing; may be repeated.

        Args:
            source: The whole policy.
            config: How to refit.
            kv: Which KV scales are to be set after `write`. They are checked by `check_kv`.
            is_ready: Whether `check_ready` returned just now; if not, it is called.
            foreign: Names that other ranks hold and this one does not; they may come.
            compares: Whether what would be written is compared with what is held, and nothing is written.

        Raises:
            InvalidSourceError: The source does not fit; names everything that is wrong with it.
            NonFiniteError: NaN or Inf, if they are looked for before writing.
            StagingMemoryError: No room for the buckets of a stream.
            RefitError: See `check_ready`.
        """
        if not is_ready or self._held is None:
            self.check_ready()
        held = _require(self._held)
        with self.on_device():
            if self.device.type == "cuda":
                # The trainer's and the engine's kernels run on streams of their own; a refit begins when all are done.
                torch.cuda.synchronize(self.device)
            try:
                prepared = held.fills.prepare(source, config, kv=kv, foreign=foreign, compares=compares)
                self._check(prepared)
            except BaseException:
                self.abandon()
                raise
        return prepared

    def write(self, prepared: Prepared, *, drain: bool = False) -> RankReport:
        """Write what was prepared, reading its source. The rank is dirty from the first byte until `commit`.

        Args:
            prepared: What `prepare` gave; it is used up.
            drain: See `Fill.read`.

        Raises:
            RefitError: See `finish`.
        """
        self.begin(prepared)
        with self._writing():
            for fill in prepared.fills:
                fill.read(drain=drain)
        return self.finish()

    def begin(self, prepared: Prepared) -> None:
        """Write what needs no staging, and be ready for `push`. The rank is dirty from here until `commit`."""
        is_current = self._held is not None and self._held.fills.is_current(prepared)
        assert is_current, "begin() follows the prepare() that returned last"
        if not _are_mapped(prepared.inventory):
            self.abandon()
            raise EngineAsleepError("the weights went to sleep after the refit was prepared; wake them up, then refit")
        if prepared.comparison is None:
            self._torn |= _names(prepared.inventory) - set(_kept(prepared))
            self.is_dirty = True
        with self._writing():
            self._under_way = _Writing(prepared=prepared, events=_device_events(self.device))
            self._launch(self._under_way)

    def push(self, tensors: Iterable[Arriving] = (), *, drain: bool = False) -> None:
        """Write a part of a `PushedSource`: tensors, and runs of rows; or the next bucket of a `ReceivedSource`.

        Args:
            tensors: The part. It may be overwritten by what the current stream does from then on.
            drain: See `Fill.read`.

        Raises:
            InvalidSourceError: A tensor came twice, in part, or otherwise than announced.
        """
        writing = self._under_way
        assert writing is not None, "push() follows begin()"
        with self._writing():
            writing.prepared.fills[-1].take(tensors, drain=drain)

    def finish(self) -> RankReport:
        """Complete the write, wait for the device and read its flags.

        Raises:
            InvalidSourceError: A stream was not what was announced, or, unannounced, does not fit or is incomplete.
            NonFiniteError: NaN or Inf; names the tensors.
            LiveTensorMovedError: The engine replaced a live tensor meanwhile.
            EngineLostError: A CUDA fault.
        """
        writing = self._under_way
        assert writing is not None, "finish() follows begin()"
        with self._writing():
            report = self._finish(writing)
        self.abandon()
        self._is_whole = writing.prepared.comparison is None
        return report

    def abandon(self) -> None:
        """Let go of what was prepared or is being written. A rank that was written in part stays dirty."""
        self._is_whole = False
        writing, self._under_way = self._under_way, None
        if writing is not None and writing.prepared.comparison is None:
            aliases = writing.prepared.inventory.aliases
            self._torn.update(aliases.get(name, name) for name in writing.prepared.fills[-1].came)
        if writing is not None:
            writing.prepared.release()
        if self._held is not None:
            self._held.fills.release()

    def measure_kv(self, order: KvOrder, config: RefitConfig) -> Measured:
        """Run a calibration batch through the network as it is now. Changes nothing.

        Raises:
            CalibrationError: NaN, Inf, or no memory.
            EngineLostError: A CUDA fault.
        """
        with self.on_device():
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return self._require_kv().measure(order, config.kv)

    def kv_scales_for(self, amax: Mapping[str, float], config: RefitConfig) -> tuple[dict[str, float], tuple[str, ...]]:
        """The scale of everything that some rank saw, and the names of those that stay because nobody saw anything."""
        kv = self._require_kv()
        return kv.scales_for(amax, config.kv), kv.kept(amax, config.kv)

    def write_kv(self, scales: Mapping[str, float]) -> dict[str, float]:
        """Write KV scales, and give what was written. The rank is dirty from the first one until `commit`.

        Raises:
            LiveTensorMovedError: The engine replaced a live tensor meanwhile.
            EngineLostError: A CUDA fault.
        """
        self.is_dirty, self._is_whole = True, False
        with self._writing():
            written = self._require_kv().write(scales)
            _assert_in_place(_require(self._held).inventory)
        self._is_whole = True
        return written

    def commit(self, version: int | None = None) -> int:
        """Declare a policy whole that `finish` returned for, and give its version: the next one, if none is said."""
        assert self._is_whole, "commit() follows a finish() that returned"
        version = version if version is not None else self.version + 1
        # In one line: no interrupt may come between them.
        if self._kv is not None:
            self.version, self.is_dirty, self._kv.torn = version, False, None
        else:
            self.version, self.is_dirty = version, False
        self._is_whole = False
        self._torn.clear()
        self._on_commit()
        return version

    def forget_values(self) -> None:
        """What the weights were is lost, as after a deep sleep: all of them have to come."""
        self._has_lost_values = True

    def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals."""
        inventory = self._look().inventory
        return EngineLayout.of(inventory, engine=self._engine, versions=self._versions, device=str(self.device))

    def fingerprint(self) -> str:
        """Digest of the weights that are held now; see `fp8refit.live.fingerprint`.

        Raises:
            EngineAsleepError: They are not mapped.
            EngineLostError: A CUDA fault.
        """
        inventory = self._look().inventory
        if not _are_mapped(inventory):
            raise EngineAsleepError("the weights are asleep: their memory is not mapped; wake them up first")
        with self.on_device():
            return fingerprint(inventory)

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank holds its part of a checkpoint tensor, which may come under the name of one that it is tied to.

        What came in the write that is under way counts. Waits for the device.
        """
        inventory = self._look().inventory
        canonical = inventory.aliases.get(name, name)
        with self.on_device(), torch.inference_mode():
            if self._under_way is not None:
                self._under_way.prepared.flush()
            slots = [slot for slot in inventory.slots if slot.name == canonical]
            return all(slot.full_shape == tuple(tensor.shape) and _is_held(slot, tensor) for slot in slots)

    @property
    def num_kv_scales(self) -> int:
        """How many scales the FP8 KV cache of this rank has."""
        return self._kv.num_scales if self._kv is not None else 0

    def close(self) -> None:
        """Drop what is held beyond the engine itself. KV scales that are torn stay known."""
        self.abandon()
        self._held = None
        if self._kv is not None and self._kv.torn is None:
            self._kv = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """On any error let go of what was prepared: what was written in part can only be written anew."""
        try:
            with self.on_device():
                yield
        except BaseException as error:
            self.abandon()
            if isinstance(error, LiveTensorMovedError):
                self._held = None
            if isinstance(error, InvalidSourceError) and self.is_dirty:
                raise InvalidSourceError(error.problems, written=True) from error
            raise

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the engine's device the current one, and remember a fault: nothing on a device can be trusted after one.

        Raises:
            EngineLostError: Instead of a CUDA fault.
        """
        try:
            with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
                yield
        except torch.AcceleratorError as error:
            self.lost_because = f"a CUDA fault ended a refit of this engine ({error}); restart the engine"
            raise EngineLostError(self.lost_because) from error

    def _look(self) -> _Held:
        """What this rank holds, read again if the engine replaced a live tensor since.

        Raises:
            UnsupportedEngineError: The live weights are not on one device.
        """
        if self._held is None or self._held.inventory.watch.was_any_replaced():
            self._held = None
            inventory = self._read_inventory()
            inventory = replace(inventory, refusals=(*inventory.refusals, *shared_bytes(inventory.slots)))
            devices = {slot.weight.device for slot in inventory.slots} or {self.device}
            if len(devices) > 1 or any(device.type == "meta" for device in devices):
                places = ", ".join(sorted(map(str, devices)))
                raise UnsupportedEngineError(f"the live weights lie on {places}; put the engine onto one device")
            self.device = devices.pop()
            torn = self._kv.torn if self._kv is not None else None
            self._kv = KvScales(inventory.kv, self.device, torn=torn) if inventory.kv is not None else None
            inventory = self._kv.extend(inventory) if self._kv is not None else inventory
            self._held = _Held(inventory=inventory, fills=Fills(inventory, self.device))
        return self._held

    def _require_kv(self) -> KvScales:
        if self._kv is None:
            raise UnsupportedEngineError(f"fp8refit knows no KV cache of {self._engine}, and so no scales of one")
        return self._kv

    def _check(self, prepared: Prepared) -> None:
        """Look for what a plan does not show, while nothing is written."""
        self._check_kept(prepared)
        self._check_brought_scales(prepared)
        if prepared.config.validate_values == "strict" and not isinstance(prepared.source, PushedSource):
            prepared.check_values()

    def _check_kept(self, prepared: Prepared) -> None:
        """Check that this rank has what it is to keep.

        Raises:
            InvalidSourceError: Names what it does not.
        """
        kept = _kept(prepared)
        if self._has_lost_values:
            _raise_if(f"{name}: kept, but a sleep has thrown away what this engine had of it; send it" for name in kept)
        torn = [name for name in kept if name in self._torn]
        _raise_if(f"{name}: kept, but a refit that failed has written it; send it" for name in torn)

    def _check_brought_scales(self, prepared: Prepared) -> None:
        """Judge the KV scales in a source while nothing is written, if they can be seen, or if none can be changed."""
        if self._kv is None:
            return
        source, plan = prepared.source, prepared.plan
        names = [step.source for step in self._kv.brought(plan.steps)] if plan is not None else []
        if names or self._kv.torn is not None:
            self._kv.check_writable()
        if isinstance(source, RandomAccess):
            refuse_unfit(unfit_scales({name: float(scale) for name, scale in source.pick(names).items()}))
        elif isinstance(source, PushedSource):
            refuse_unfit((name, source.unfit[name]) for name in names if name in source.unfit)

    def _launch(self, writing: _Writing) -> None:
        begun = writing.events[0] if writing.events is not None else None
        for fill in writing.prepared.fills:
            fill.launch(begun)
            begun = None

    def _finish(self, writing: _Writing) -> RankReport:
        prepared, events = writing.prepared, writing.events
        inventory, comparison = prepared.inventory, prepared.comparison
        for fill in prepared.fills:
            fill.finish()
        if comparison is None:
            self._complete(inventory)
        if events is not None:
            events[1].record()
        _assert_in_place(inventory)  # while the device is at work
        if events is not None:
            events[1].synchronize()
        filled_s = time.perf_counter()
        if bad := prepared.bad_sources():
            raise prepared.error_of(bad, written=comparison is None)
        if comparison is None:
            self._has_lost_values = False
        plan = _require(prepared.plan)
        kv = self._write_brought_scales(plan) if comparison is None else None
        held_bytes = comparison.num_device_bytes if comparison is not None else 0
        return RankReport(
            device=str(self.device),
            num_tensors=plan.num_sources,
            num_quantized=plan.num_quantized,
            ignored=plan.ignored,
            kept=plan.kept,
            bytes_read=plan.num_bytes_read,
            bytes_written=plan.num_bytes_written,
            fill_s=filled_s - writing.start_s,
            verify_s=time.perf_counter() - filled_s,
            fill_device_s=events[0].elapsed_time(events[1]) / 1e3 if events is not None else None,
            extra_bytes=held_bytes + sum(fill.num_device_bytes for fill in prepared.fills),
            is_first=any(fill.is_first for fill in prepared.fills),
            source_digest=plan.source_digest,
            kv=kv,
            differing=tuple(sorted(comparison.differing())) if comparison is not None else (),
        )

    def _complete(self, inventory: Inventory) -> None:
        """Write what no source brings: padding, what the engine derives from weights, and scales of an attempt that failed."""
        with torch.inference_mode():
            for padding in inventory.padding:
                padding.zero_()
            for refresh in inventory.refreshes:
                refresh.run()
        if self._kv is not None:
            self._kv.heal()

    def _write_brought_scales(self, plan: RefitPlan) -> KvReport | None:
        """Write the KV scales that came with the weights, if any did."""
        brought = self._kv.brought(plan.steps) if self._kv is not None else []
        if self._kv is None or not brought:
            return None
        start_s = time.perf_counter()
        self._kv.check_writable()
        scales = self._kv.write(self._kv.arrived(brought))
        return report_of(None, scales, seconds=time.perf_counter() - start_s)


def _is_held(slot: Slot, tensor: Tensor) -> bool:
    """Whether a slot holds its box of a tensor."""
    for dim, (start, length) in enumerate(zip(slot.origin, slot.weight.shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    tensor = tensor.to(slot.weight.device, torch.bfloat16 if slot.is_quantized else slot.weight.dtype)
    if slot.scale is None:
        return torch.equal(slot.weight, tensor)
    codes, scale = quantize_blockwise(tensor, block_size=slot.block_size, scale_format=slot.scale_format.value)
    return torch.equal(slot.weight.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(slot.scale, scale)


def _names(inventory: Inventory) -> set[str]:
    return {slot.name for slot in inventory.slots}


def _kept(prepared: Prepared) -> list[str]:
    """Slots that need not come: as far as that is known, those that do not."""
    if prepared.plan is not None:
        return list(prepared.plan.kept)
    return list(filter(is_any_of(prepared.config.keep), _names(prepared.inventory)))


def _raise_if(problems: Iterable[str]) -> None:
    """Raise problems of a source, if there are any."""
    found = list(problems)
    if found:
        raise InvalidSourceError(found)


def _assert_in_place(inventory: Inventory) -> None:
    """Check that no live tensor moved.

    Raises:
        LiveTensorMovedError: One did.
    """
    moved = inventory.watch.moved()
    if moved:
        raise LiveTensorMovedError(
            f"{len(moved)} live tensor(s) were replaced while they were refitted: {', '.join(moved)}. CUDA graphs may read "
            "stale memory; refit again, and if this repeats, restart the engine"
        )


def _are_mapped(inventory: Inventory) -> bool:
    """Whether there is memory behind the weights: sleep mode takes all of it away at once, and keeps the addresses."""
    slots = inventory.slots
    last = next(
        (slot for slot in reversed(slots) if not slot.is_optional), None
    )  # what is optional comes after the weights
    weights = [slot.weight for slot in (*slots[:1], last) if slot is not None and slot.weight.is_cuda]
    if not weights:
        return True
    from fp8refit.transport.memory.cuda_driver import is_mapped

    return all(is_mapped(weight.data_ptr()) for weight in weights)


def _device_events(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _require(value: T | None) -> T:
    assert value is not None, "there by now"
    return value
