"""One engine rank being refitted: its inventory, compiled plan, version, and whether it holds a whole policy.

Prepare judges and compiles, write fills, commit declares the result whole. Between the first byte of a write and its
commit the rank is dirty; only a later complete write heals it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fp8refit.calibration import unfit_scales
from fp8refit.compare import Comparison
from fp8refit.config import KvOrder, RefitConfig
from fp8refit.direct import DirectFill
from fp8refit.errors import (
    EngineAsleepError,
    EngineLostError,
    InvalidSourceError,
    LiveTensorMovedError,
    NonFiniteError,
    RefitError,
    StagingMemoryError,
    UnsupportedEngineError,
)
from fp8refit.fill import ResidentFill, StreamFill, misfit_scales, required_format, scale_problem
from fp8refit.fingerprint import fingerprint
from fp8refit.handed import HandedSource
from fp8refit.job import Arrivals, Arriving, Job, Known, Write, by_source
from fp8refit.kv_scales import KvScales, Measured, refuse_unfit, report_of
from fp8refit.layout import EngineLayout
from fp8refit.pieces import Piece
from fp8refit.plan import RefitPlan, is_any_of
from fp8refit.received import ReceivedFill, ReceivedSource
from fp8refit.report import KvReport, RankReport
from fp8refit.sharing import shared_bytes
from fp8refit.slots import SCALE_SUFFIX, Inventory, Op, ScaleFormat, TensorMeta
from fp8refit.sources import (
    MappingSource,
    PushedSource,
    RandomAccess,
    Source,
    check_can_be_read_twice,
)

T = TypeVar("T")

_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: pinned host memory is refused with it, and the device is as healthy as before."""


class Target:
    """A rank in this process.

    Args:
        read_inventory: Reads the live model; called again whenever a live tensor turns out to have been replaced.
        device: Where the live tensors are.
        engine: Name of the engine, for layouts.
        versions: Package versions, for layouts.
        check_engine: Raises what keeps the engine around the live tensors from being written now.
        on_commit: Called when a policy is declared whole.
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
        self._device = device
        self._engine = engine
        self._versions = versions
        self._inventory: Inventory | None = None
        self._resident: ResidentFill | None = None
        self._stream_plan: tuple[Mapping[str, TensorMeta], tuple[str, ...], RefitPlan] | None = None
        self._known: Known | None = None
        self._torn: set[str] = set()
        """Names of slots that a refit wrote which did not come to its end, while the rank is dirty."""
        self._has_lost_values = False
        self._directs: dict[bool, DirectFill] = {}
        """For writing, and for comparing."""
        self._received: ReceivedFill | None = None
        self._job: Job | None = None
        self._write: Write | None = None
        self._is_whole = False
        self._kv: KvScales | None = None
        self.lost_because: str | None = None
        self.is_dirty = False
        self.version = 0

    @property
    def device(self) -> torch.device:
        """Where the live tensors are."""
        return self._device

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
        inventory = self._current_inventory()
        if inventory.refusals:
            raise UnsupportedEngineError(
                "this engine cannot be refitted, and nothing was written:",
                [str(refusal) for refusal in inventory.refusals],
            )
        if not _are_mapped(inventory):
            raise EngineAsleepError("the weights sleep: their memory is not mapped; wake them up before refit")
        return inventory

    def check_kv(self, order: KvOrder, config: RefitConfig) -> None:
        """Hold that KV scales can be set as ordered, after `check_ready`. Changes nothing.

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
        inventory: Inventory | None = None,
        foreign: frozenset[str] = frozenset(),
        compares: bool = False,
    ) -> str:
        """Judge names, shapes, dtypes and scales, and compile what is missing. Writes nothing; may be repeated.

        Args:
            source: The whole policy.
            config: How to refit.
            inventory: What `check_ready` gave just now; it is asked if none is given.
            foreign: Names that other ranks hold and this one does not; they may come.
            compares: Whether what would be written is compared with what is held, and nothing is written.

        Returns:
            Digest of the source, equal on every rank; empty if it cannot be known yet.

        Raises:
            InvalidSourceError: The source does not fit; names everything that is wrong with it.
            NonFiniteError: NaN or Inf, if they are looked for before writing.
            StagingMemoryError: No room for the buckets of a stream.
            RefitError: See `check_ready`.
        """
        inventory = inventory if inventory is not None else self.check_ready()
        with self._on_device():
            if self._device.type == "cuda":
                # The trainer's and the engine's kernels run on streams of their own; a refit begins when all are done.
                torch.cuda.synchronize(self._device)
            try:
                comparison = Comparison(self._device) if compares else None
                job = Job(source=source, config=config, inventory=inventory, foreign=foreign, comparison=comparison)
                self._job = self._prepare(job)
            finally:
                if self._job is None and self._resident is not None:
                    self._resident.release()
        return self._job.plan.source_digest if self._job.plan is not None else ""

    def write(self, *, drain: bool = False) -> RankReport:
        """Write what was prepared, reading its source. The rank is dirty from the first byte until `commit`.

        Args:
            drain: Read a stream to its end even if a part of it does not fit. Reading may be a collective operation of the
                trainer, in which the other ranks would wait for this one.

        Raises:
            RefitError: See `finish`.
        """
        self.begin()
        job = _require(self._job)
        with self._writing():
            if job.streams:
                _take_all(_require(_require(self._write).arrivals), job.staged_tensors(), drain=drain)
        return self.finish()

    def begin(self) -> None:
        """Write what needs no staging, and be ready for `push`. The rank is dirty from here until `commit`."""
        assert self._job is not None, "begin() follows a prepare() that returned"
        if not _are_mapped(self._job.inventory):
            self.abandon()
            raise EngineAsleepError("the weights went to sleep after the refit was prepared; wake them up, then refit")
        if self._job.comparison is None:
            self._note_torn(self._job)
            self.is_dirty = True
        with self._writing():
            self._write = self._begin(self._job)

    def _note_torn(self, job: Job) -> None:
        """From here on nothing is what it was that this job may write; what comes although it is kept is noted when it came."""
        is_kept = is_any_of(job.config.keep)
        kept = job.plan.kept if job.plan is not None else filter(is_kept, _names(job.inventory))
        self._torn |= _names(job.inventory) - set(kept)

    def push(self, tensors: Iterable[tuple[str, Tensor] | Piece], *, drain: bool = False) -> None:
        """Write a part of a `PushedSource`: tensors, and runs of rows. They may be overwritten as soon as this returns; those
        of a `HandedSource` by what the current stream does from then on.

        Args:
            tensors: The part.
            drain: See `write`.

        Raises:
            InvalidSourceError: A tensor came twice, in part, or otherwise than announced.
        """
        write = self._write
        assert write is not None and write.arrivals is not None, "push() follows begin()"
        with self._writing():
            _take_all(write.arrivals, tensors, drain=drain)
            if self._device.type == "cuda" and not isinstance(write.job.source, HandedSource):
                torch.cuda.current_stream().synchronize()

    def fill(self) -> None:
        """Write the next bucket of a `ReceivedSource`, which has arrived, on the current stream: what comes after it there may
        overwrite the bucket.
        """
        write = self._write
        assert write is not None and write.job.received is not None, "fill() follows begin()"
        with self._writing():
            write.job.received.fill()

    def finish(self) -> RankReport:
        """Complete the write, wait for the device and read its status word.

        Raises:
            InvalidSourceError: A stream was not what was announced, or, unannounced, does not fit or is incomplete.
            NonFiniteError: NaN or Inf; names the tensors.
            LiveTensorMovedError: The engine replaced a live tensor meanwhile.
            EngineLostError: A CUDA fault.
        """
        write = self._write
        assert write is not None, "finish() follows begin()"
        with self._writing():
            report = self._finish(write)
        is_written = write.job.comparison is None
        self.abandon()
        self._is_whole = is_written
        return report

    def measure_kv(self, order: KvOrder, config: RefitConfig) -> Measured:
        """Run a calibration batch through the network as it is now. Changes nothing.

        Raises:
            CalibrationError: NaN, Inf, or no memory.
            EngineLostError: A CUDA fault.
        """
        with self._on_device():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
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
            _assert_in_place(_require(self._inventory))
        self._is_whole = True
        return written

    def commit(self, version: int | None = None) -> int:
        """Declare the written policy whole, and give its version: the next one, if none is said."""
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

    def abandon(self) -> None:
        """Let go of what was prepared. A rank that was written in part stays dirty."""
        write = self._write
        if write is not None and write.arrivals is not None and write.job.comparison is None:
            aliases = write.job.inventory.aliases
            self._torn.update(aliases.get(name, name) for name in write.arrivals.names)
        self._is_whole = False
        job, self._job, self._write = self._job, None, None
        if job is not None and job.resident is not None:
            job.resident.release()

    def layout(self) -> EngineLayout:
        """Describe slots, kernels, formats and refusals."""
        inventory = self._current_inventory()
        return EngineLayout.of(inventory, engine=self._engine, versions=self._versions, device=str(self._device))

    def fingerprint(self) -> str:
        """Digest of the weights that are held now; see `fp8refit.fingerprint`.

        Raises:
            EngineAsleepError: They are not mapped.
            EngineLostError: A CUDA fault.
        """
        inventory = self._current_inventory()
        if not _are_mapped(inventory):
            raise EngineAsleepError("the weights sleep: their memory is not mapped; wake them up first")
        with self._on_device():
            return fingerprint(inventory)

    def close(self) -> None:
        """Drop what is held beyond the engine itself."""
        self.abandon()
        self._inventory = self._resident = self._stream_plan = self._received = self._known = None
        self._directs.clear()
        if self._kv is not None and self._kv.torn is None:
            self._kv = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """On any error let go of the job: what was written in part can only be written anew."""
        try:
            with self._on_device():
                yield
        except BaseException as error:
            self.abandon()
            if isinstance(error, LiveTensorMovedError):
                self._inventory = None
            if isinstance(error, InvalidSourceError) and self.is_dirty:
                raise InvalidSourceError(error.problems, written=True) from error
            raise

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the engine's device the current one, and remember a fault: nothing on a device can be trusted after one.

        Raises:
            EngineLostError: In place of a CUDA fault.
        """
        try:
            with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
                yield
        except torch.AcceleratorError as error:
            self.lost_because = f"a CUDA fault ended a refit of this engine ({error}); start the engine again"
            raise EngineLostError(self.lost_because) from error

    def _current_inventory(self) -> Inventory:
        """The inventory, read again if the engine replaced a live tensor since.

        Raises:
            UnsupportedEngineError: The live weights are not on one device.
        """
        if self._inventory is None or self._inventory.watch.was_any_replaced():
            self._inventory = self._resident = self._stream_plan = self._received = self._known = None
            self._directs.clear()
            inventory = self._read_inventory()
            inventory = replace(inventory, refusals=(*inventory.refusals, *shared_bytes(inventory.slots)))
            devices = {slot.weight.device for slot in inventory.slots} or {self._device}
            if len(devices) > 1 or any(device.type == "meta" for device in devices):
                places = ", ".join(sorted(map(str, devices)))
                raise UnsupportedEngineError(f"the live weights lie on {places}; put the engine onto one device")
            self._device = devices.pop()
            torn = self._kv.torn if self._kv is not None else None
            self._kv = KvScales(inventory.kv, self._device, torn=torn) if inventory.kv is not None else None
            self._inventory = self._kv.extend(inventory) if self._kv is not None else inventory
        return self._inventory

    def _require_kv(self) -> KvScales:
        if self._kv is None:
            raise UnsupportedEngineError(f"fp8refit knows no KV cache of {self._engine}, and so no scales of one")
        return self._kv

    def _prepare(self, job: Job) -> Job:
        if isinstance(job.source, MappingSource) and job.comparison is None:
            self._prepare_mapping(job.source, job)
        elif isinstance(job.source, ReceivedSource):
            self._prepare_received(job.source, job)
        else:
            self._prepare_stream(job)
        self._check_kept(job)
        self._check_brought_scales(job)
        if job.config.validate_values == "strict" and not isinstance(job.source, PushedSource):
            self._look_for_bad_values(job)
        if job.streams:
            if job.comparison is not None or not isinstance(job.source, MappingSource):
                job.direct = self._make_direct(job)
            job.stream = self._make_stream(job)
        return job

    def _check_kept(self, job: Job) -> None:
        """Check that this rank has what it is to keep.

        Raises:
            InvalidSourceError: Names what it does not.
        """
        is_kept = is_any_of(job.config.keep)
        kept = job.plan.kept if job.plan is not None else [name for name in _names(job.inventory) if is_kept(name)]
        if self._has_lost_values:
            _raise_if(f"{name}: kept, but a sleep has thrown away what this engine had of it; send it" for name in kept)
        torn = [name for name in kept if name in self._torn]
        _raise_if(f"{name}: kept, but a refit that failed has written it; send it" for name in torn)

    def forget_values(self) -> None:
        """What the weights were is lost, as after a deep sleep: all of them have to come."""
        self._has_lost_values = True

    def _check_brought_scales(self, job: Job) -> None:
        """Judge the KV scales in a source while nothing is written, if they can be seen, or if none can be changed."""
        if self._kv is None:
            return
        names = [step.source for step in self._kv.brought(job.plan.steps)] if job.plan is not None else []
        if names or self._kv.torn is not None:
            self._kv.check_writable()
        if isinstance(job.source, RandomAccess):
            refuse_unfit(unfit_scales({name: float(scale) for name, scale in job.source.pick(names).items()}))
        elif isinstance(job.source, PushedSource):
            refuse_unfit((name, job.source.unfit[name]) for name in names if name in job.source.unfit)

    def _prepare_mapping(self, source: MappingSource, job: Job) -> None:
        resident = self._resident
        if resident is None or resident.config != job.config or not resident.rebind(source):
            plan = job.compile(*source.scan())
            self._resident = None
            self._resident = resident = ResidentFill(plan, job.inventory.slots, source, self._device, job.config)
            job.is_first = True
        job.plan, job.resident = resident.plan, resident
        if resident.staged_steps:
            job.stream_steps = by_source(resident.staged_steps)
        misfits = resident.misfit_scales()
        if job.config.on_scale_mismatch == "refuse":
            staged = ((name, source.tensors[name]) for name in job.stream_steps or ())
            misfits += misfit_scales(resident.staged_steps, job.inventory.slots, staged)
        if misfits:
            raise InvalidSourceError(misfits)

    def _prepare_stream(self, job: Job) -> None:
        """Plan a stream before it is written, unless it can be read only once and nothing is known of it."""
        source = job.source
        scanned = source.scan()
        if scanned is None:
            last = self._known
            is_like = last is not None and (last.config, last.foreign) == (job.config, job.foreign)
            job.known = last if is_like else None
            job.is_first = job.known is None
            return
        job.metadata, problems = scanned
        known, keep, plan = self._stream_plan or (None, (), None)
        if plan is None or problems or known != job.metadata or keep != job.config.keep:
            plan = job.compile(job.metadata, problems)
            self._stream_plan = job.metadata, job.config.keep, plan
            job.is_first = True
        job.plan, job.stream_steps = plan, by_source(plan.steps)
        self._check_scales_of_stream(plan, job)

    def _prepare_received(self, source: ReceivedSource, job: Job) -> None:
        received = self._received
        if received is None or received.source is not source or received.config != job.config:
            metadata, problems = _require(source.scan())
            plan = job.compile(metadata, problems)
            self._received = None
            self._received = received = ReceivedFill(plan, job.inventory.slots, source, self._device, job.config)
            job.is_first = True
        job.plan, job.received = received.plan, received
        self._check_scales_of_stream(received.plan, job)

    def _check_scales_of_stream(self, plan: RefitPlan, job: Job) -> None:
        """Judge scales that come with a stream, as far as they can be seen before it is written."""
        source, inventory = job.source, job.inventory
        need_powers = {
            step.source
            for step in plan.steps
            if step.op is Op.COPY_SCALES and inventory.slots[step.slot].scale_format is ScaleFormat.UE8M0
        }
        if need_powers and job.config.on_scale_mismatch == "refuse":
            misfits = []
            if isinstance(source, PushedSource):
                odd = sorted(need_powers & source.odd_scales)
                misfits = [scale_problem(name, ScaleFormat.UE8M0) for name in odd]
            elif source.is_repeatable:
                scales = source.pick(need_powers).items() if isinstance(source, RandomAccess) else source
                misfits = misfit_scales(plan.steps, inventory.slots, scales)
            if misfits:
                raise InvalidSourceError(misfits)

    def _make_stream(self, job: Job, *, write: bool = True) -> StreamFill:
        """Take staging memory, while nothing is written yet.

        Raises:
            StagingMemoryError: There is not enough.
        """
        try:
            comparison = job.comparison
            stream = StreamFill(job.inventory.slots, self._device, job.config, write=write, comparison=comparison)
            if comparison is None and not isinstance(job.source, HandedSource):
                stream.reserve()
            return stream
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _OUT_OF_MEMORY:
                raise
            raise StagingMemoryError(
                f"no room for two staging buckets of {job.config.bucket_bytes >> 20} MiB on {self._device} and in pinned "
                "host memory; lower bucket_bytes or leave the engine less memory. Nothing was written"
            ) from error

    def _make_direct(self, job: Job) -> DirectFill:
        """What is known of tensors that come to this device, if they are those of a stream such as the last one."""
        compares = job.comparison is not None
        direct = self._directs.get(compares)
        if direct is None or direct.device != self._device or direct.config != job.config:
            slots = job.inventory.slots
            direct = self._directs[compares] = DirectFill(slots, self._device, job.config, job.comparison)
        job.comparison = direct.comparison
        return direct

    def _look_for_bad_values(self, job: Job) -> None:
        """Read everything without writing.

        Raises:
            NonFiniteError: NaN or Inf.
            InvalidSourceError: The source can be read only once.
        """
        check_can_be_read_twice(job.source)
        bad: list[str] = []
        if job.resident is not None:
            job.resident.table.launch(check=True, write=False)
            bad += job.resident.bad_sources()
        if job.streams:
            stream = self._make_stream(job, write=False)
            arrivals = Arrivals(job, stream)
            arrivals.take(job.staged_tensors())
            arrivals.finish()
            bad += stream.bad_sources()
        if bad:
            raise _bad_values(bad, job, written=False)

    def _begin(self, job: Job) -> Write:
        if job.direct is not None:
            job.direct.begin(job.known.plan if job.known is not None else job.plan)
        events = _device_events(self._device)
        write = Write(job=job, arrivals=Arrivals(job, job.stream) if job.stream is not None else None, events=events)
        begun = events[0] if events is not None else None
        if job.resident is not None:
            job.resident.table.launch(check=job.config.validate_values != "off", begun=begun)
        elif begun is not None:
            begun.record()
        if job.received is not None:
            job.received.begin()
        return write

    def _finish(self, write: Write) -> RankReport:
        job, inventory = write.job, write.job.inventory
        if job.stream is not None and write.arrivals is not None:
            write.arrivals.finish()
            job.stream.flush()
        if job.received is not None and not job.received.is_complete:
            raise InvalidSourceError(["source: ended before everything came that was announced"])
        if job.comparison is None:
            with torch.inference_mode():
                for padding in inventory.padding:
                    padding.zero_()
                for refresh in inventory.refreshes:
                    refresh.run()
            if self._kv is not None:
                self._kv.heal()
        if write.events is not None:
            write.events[1].record()
        _assert_in_place(inventory)  # while the device is at work
        if write.events is not None:
            write.events[1].synchronize()
        filled_s = time.perf_counter()
        bad = job.resident.bad_sources() if job.resident is not None else []
        bad += job.stream.bad_sources() if job.stream is not None else []
        bad += job.direct.bad_sources() if job.direct is not None else []
        bad += job.received.bad_sources() if job.received is not None else []
        if bad:
            raise _bad_values(bad, job, written=job.comparison is None)
        if job.comparison is None:
            self._has_lost_values = False
        if job.known is not None:
            self._known = job.known
        plan = _require(job.plan)
        if job.direct is not None:
            job.direct.end(plan)
        kv = self._write_brought_scales(plan) if job.comparison is None else None
        return RankReport(
            device=str(self._device),
            num_tensors=plan.num_sources,
            num_quantized=plan.num_quantized,
            ignored=plan.ignored,
            kept=plan.kept,
            bytes_read=plan.num_bytes_read,
            bytes_written=plan.num_bytes_written,
            fill_s=filled_s - write.start_s,
            verify_s=time.perf_counter() - filled_s,
            fill_device_s=write.events[0].elapsed_time(write.events[1]) / 1e3 if write.events is not None else None,
            extra_bytes=(job.resident.num_device_bytes if job.resident is not None else 0)
            + (job.stream.num_device_bytes if job.stream is not None else 0)
            + (job.direct.num_device_bytes if job.direct is not None else 0)
            + (job.comparison.num_device_bytes if job.comparison is not None else 0)
            + (job.received.num_device_bytes if job.received is not None else 0),
            is_first=job.is_first,
            source_digest=plan.source_digest,
            kv=kv,
            differing=tuple(sorted(job.comparison.differing())) if job.comparison is not None else (),
        )

    def _write_brought_scales(self, plan: RefitPlan) -> KvReport | None:
        """Write the KV scales that came with the weights, if any did."""
        brought = self._kv.brought(plan.steps) if self._kv is not None else []
        if self._kv is None or not brought:
            return None
        start_s = time.perf_counter()
        self._kv.check_writable()
        scales = self._kv.write(self._kv.arrived(brought))
        return report_of(None, scales, seconds=time.perf_counter() - start_s)


def _names(inventory: Inventory) -> set[str]:
    return {slot.name for slot in inventory.slots}


def _raise_if(problems: Iterable[str]) -> None:
    """Raise problems of a source, if there are any."""
    found = list(problems)
    if found:
        raise InvalidSourceError(found)


def _bad_values(names: Sequence[str], job: Job, *, written: bool) -> RefitError:
    """The error for tensors that a fill flagged: scales that fit no slot, else NaN or Inf."""
    if all(name.endswith(SCALE_SUFFIX) for name in names):
        slots = job.inventory.slots
        formats = {step.source: required_format(slots[step.slot], job.config) for step in _require(job.plan).steps}
        return InvalidSourceError([scale_problem(name, formats[name]) for name in names])
    return NonFiniteError(sorted(names), written=written)


def _assert_in_place(inventory: Inventory) -> None:
    """Hold that no live tensor moved.

    Raises:
        LiveTensorMovedError: One did.
    """
    moved = inventory.watch.moved()
    if moved:
        raise LiveTensorMovedError(
            f"{len(moved)} live tensor(s) were replaced while they were refitted: {', '.join(moved)}. CUDA graphs may read "
            "stale memory; refit again, and if this repeats, start the engine again"
        )


def _take_all(arrivals: Arrivals, tensors: Iterable[Arriving], *, drain: bool) -> None:
    try:
        arrivals.take(tensors)
    except Exception:
        if drain and isinstance(tensors, Iterator):
            for _ in tensors:
                pass
        raise


def _are_mapped(inventory: Inventory) -> bool:
    """Whether there is memory behind the weights: sleep mode takes all of it away at once, and keeps the addresses."""
    slots = inventory.slots
    last = next(
        (slot for slot in reversed(slots) if not slot.is_optional), None
    )  # what is optional comes after the weights
    weights = [slot.weight for slot in (*slots[:1], last) if slot is not None and slot.weight.is_cuda]
    if not weights:
        return True
    from fp8refit.transport.cuda_driver import is_mapped

    return all(is_mapped(weight.data_ptr()) for weight in weights)


def _device_events(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _require(value: T | None) -> T:
    assert value is not None, "there by now"
    return value
