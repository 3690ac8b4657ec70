"""One engine rank being refitted: its inventory, compiled plan, version, and whether it holds a whole policy.

Prepare judges and compiles, write fills, commit declares the result whole. Between the first byte of a write and its
commit the rank is dirty; only a later complete write heals it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.errors import (
    EngineLostError,
    InvalidSourceError,
    LiveTensorMovedError,
    NonFiniteError,
    RefitError,
    StagingMemoryError,
    UnsupportedEngineError,
)
from fp8refit.fill import ResidentFill, StreamFill, misfit_scales, required_format, scale_problem
from fp8refit.layout import EngineLayout
from fp8refit.plan import PlanBuilder, RefitPlan, Step, compile_plan
from fp8refit.report import WriteResult
from fp8refit.slots import SCALE_SUFFIX, Inventory, Op, ScaleFormat, TensorMeta, was_any_replaced
from fp8refit.sources import MappingSource, Source

_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: pinned host memory is refused with it, and the device is as healthy as before."""


class Target:
    """A rank in this process. Implements `fp8refit.engine.Ranks` for an engine that has only this one.

    Args:
        read_inventory: Reads the live model; called again whenever a live tensor turns out to have been replaced.
        device: Where the live tensors are.
        engine: Name of the engine, for layouts.
        versions: Package versions, for layouts.
    """

    def __init__(
        self,
        read_inventory: Callable[[], Inventory],
        *,
        device: torch.device,
        engine: str,
        versions: dict[str, str],
    ) -> None:
        self._read_inventory = read_inventory
        self._device = device
        self._engine = engine
        self._versions = versions
        self._inventory: Inventory | None = None
        self._resident: ResidentFill | None = None
        self._stream_plan: tuple[Mapping[str, TensorMeta], RefitPlan] | None = None
        self._job: _Job | None = None
        self._is_lost = False
        self.is_dirty = False
        self.version = 0

    def prepare(self, source: Source, config: RefitConfig) -> None:
        """See `fp8refit.engine.Ranks`."""
        if self._is_lost:
            raise EngineLostError("a CUDA fault ended an earlier refit of this engine; start the engine again")
        self._job = None
        inventory = self._current_inventory()
        with self._on_device():
            if self._device.type == "cuda":
                # The trainer's and the engine's kernels run on streams of their own; a refit begins when all are done.
                torch.cuda.synchronize(self._device)
            try:
                self._job = self._prepare(source, config, inventory)
            finally:
                if self._job is None and self._resident is not None:
                    self._resident.release()

    def write(self) -> WriteResult:
        """See `fp8refit.engine.Ranks`."""
        job, self._job = self._job, None
        assert job is not None, "write() follows a prepare() that returned"
        self.is_dirty = True
        with self._on_device():
            try:
                return self._write(job)
            except LiveTensorMovedError:
                self._inventory = None
                raise
            except InvalidSourceError as error:
                raise InvalidSourceError(error.problems, written=True) from error
            finally:
                if job.resident is not None:
                    job.resident.release()

    def commit(self) -> int:
        """See `fp8refit.engine.Ranks`."""
        self.version += 1
        self.is_dirty = False
        return self.version

    def layout(self) -> EngineLayout:
        """See `fp8refit.engine.Ranks`."""
        inventory = self._current_inventory()
        return EngineLayout.of(inventory, engine=self._engine, versions=self._versions, device=str(self._device))

    def close(self) -> None:
        """See `fp8refit.engine.Ranks`."""
        self._inventory = self._resident = self._stream_plan = self._job = None

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
            self._is_lost = True
            raise EngineLostError(f"a CUDA fault ended the refit ({error}); start the engine again") from error

    def _current_inventory(self) -> Inventory:
        """The inventory, read again if the engine replaced a live tensor since.

        Raises:
            UnsupportedEngineError: The live weights are not on one device.
        """
        if self._inventory is None or was_any_replaced(self._inventory.live):
            self._inventory = self._resident = self._stream_plan = None
            inventory = self._read_inventory()
            devices = {slot.weight.device for slot in inventory.slots} or {self._device}
            if len(devices) > 1 or any(device.type == "meta" for device in devices):
                places = ", ".join(sorted(map(str, devices)))
                raise UnsupportedEngineError(f"the live weights lie on {places}; put the engine onto one device")
            self._device, self._inventory = devices.pop(), inventory
        return self._inventory

    def _prepare(self, source: Source, config: RefitConfig, inventory: Inventory) -> "_Job":
        if inventory.refusals:
            raise UnsupportedEngineError(
                "this engine cannot be refitted, and nothing was written:",
                [str(refusal) for refusal in inventory.refusals],
            )
        job = _Job(source=source, config=config, inventory=inventory)
        if isinstance(source, MappingSource):
            self._prepare_mapping(source, job)
        else:
            self._prepare_stream(job)
        if config.validate_values == "strict":
            self._look_for_bad_values(job)
        if job.streams:
            job.stream = self._make_stream(job)
        return job

    def _prepare_mapping(self, source: MappingSource, job: "_Job") -> None:
        resident = self._resident
        if resident is None or source.problems or resident.config != job.config or not resident.rebind(source.tensors):
            plan = job.compile(*source.scan())
            self._resident = None
            self._resident = resident = ResidentFill(
                plan, job.inventory.slots, source.tensors, self._device, job.config
            )
            job.is_first = True
        job.plan, job.resident = resident.plan, resident
        if resident.staged_steps:
            job.stream_steps = _by_source(resident.staged_steps)
        misfits = resident.misfit_scales()
        if job.config.on_scale_mismatch == "refuse":
            staged = ((name, source.tensors[name]) for name in job.stream_steps or ())
            misfits += misfit_scales(resident.staged_steps, job.inventory.slots, staged)
        if misfits:
            raise InvalidSourceError(misfits)

    def _prepare_stream(self, job: "_Job") -> None:
        """Plan a stream before it is written, unless it can be read only once and nothing is known of it."""
        source, inventory = job.source, job.inventory
        scanned = source.scan()
        if scanned is None:
            job.is_first = True
            return
        job.metadata, problems = scanned
        known, plan = self._stream_plan or (None, None)
        if plan is None or problems or known != job.metadata:
            plan = job.compile(job.metadata, problems)
            self._stream_plan = job.metadata, plan
            job.is_first = True
        job.plan, job.stream_steps = plan, _by_source(plan.steps)
        needs_powers = any(
            step.op is Op.COPY_SCALES and inventory.slots[step.slot].scale_format is ScaleFormat.UE8M0
            for step in plan.steps
        )
        if needs_powers and source.is_repeatable and job.config.on_scale_mismatch == "refuse":
            misfits = misfit_scales(plan.steps, inventory.slots, source)
            if misfits:
                raise InvalidSourceError(misfits)

    def _make_stream(self, job: "_Job", *, write: bool = True) -> StreamFill:
        """Take staging memory, while nothing is written yet.

        Raises:
            StagingMemoryError: There is not enough.
        """
        try:
            return StreamFill(job.inventory.slots, self._device, job.config, write=write)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _OUT_OF_MEMORY:
                raise
            raise StagingMemoryError(
                f"no room for two staging buckets of {job.config.bucket_bytes >> 20} MiB on {self._device} and in pinned "
                "host memory; lower bucket_bytes or leave the engine less memory. Nothing was written"
            ) from error

    def _look_for_bad_values(self, job: "_Job") -> None:
        """Read everything without writing.

        Raises:
            NonFiniteError: NaN or Inf.
            InvalidSourceError: The source can be read only once.
        """
        if not job.source.is_repeatable:
            raise InvalidSourceError(
                [
                    'source: validate="strict" reads everything twice; pass a mapping, files, or a function that returns '
                    "a fresh iterator"
                ]
            )
        bad: list[str] = []
        if job.resident is not None:
            job.resident.table.launch(check=True, write=False)
            bad += job.resident.bad_sources()
        if job.streams:
            stream = self._make_stream(job, write=False)
            _feed(job, stream)
            bad += stream.bad_sources()
        if bad:
            raise _bad_values(bad, job, written=False)

    def _write(self, job: "_Job") -> WriteResult:
        inventory, config = job.inventory, job.config
        check = config.validate_values != "off"
        start_s = time.perf_counter()
        stream = job.stream
        begin, end = _device_events(self._device)
        if begin is not None:
            begin.record()
        if job.resident is not None:
            job.resident.table.launch(check=check)
        if stream is not None:
            _feed(job, stream)
            stream.flush()
        with torch.inference_mode():
            for padding in inventory.padding:
                padding.zero_()
            for refresh in inventory.refreshes:
                refresh.run()
        if end is not None:
            end.record()
        launched_s = time.perf_counter()
        _assert_in_place(inventory)
        bad = job.resident.bad_sources() if job.resident is not None else []
        bad += stream.bad_sources() if stream is not None else []
        if end is not None:
            end.synchronize()
        if bad:
            raise _bad_values(bad, job, written=True)
        plan = _require(job.plan)
        return WriteResult(
            num_tensors=len({step.source for step in plan.steps}),
            ignored=plan.ignored,
            num_bytes_read=plan.num_bytes_read,
            num_bytes_written=plan.num_bytes_written,
            fill_s=launched_s - start_s,
            verify_s=time.perf_counter() - launched_s,
            device_s=begin.elapsed_time(end) / 1e3 if begin is not None and end is not None else None,
            extra_bytes=(job.resident.num_device_bytes if job.resident is not None else 0)
            + (stream.num_device_bytes if stream is not None else 0),
            is_first=job.is_first,
        )


@dataclass(kw_only=True, slots=True)
class _Job:
    """What one prepare hands to its write."""

    source: Source
    config: RefitConfig
    inventory: Inventory
    metadata: Mapping[str, TensorMeta] | None = None
    """What a stream was announced to hold."""
    plan: RefitPlan | None = None
    """None for a one-shot stream without manifest, which is planned while it arrives."""
    resident: ResidentFill | None = None
    stream_steps: dict[str, list[Step]] | None = None
    stream: StreamFill | None = None
    is_first: bool = False

    @property
    def streams(self) -> bool:
        """Whether any tensor goes through staging."""
        return self.resident is None or bool(self.stream_steps)

    @property
    def is_stable(self) -> bool:
        """Whether tensors keep their bytes until the refit is over."""
        return isinstance(self.source, MappingSource)

    def compile(self, metadata: Mapping[str, TensorMeta], problems: Sequence[str]) -> RefitPlan:
        """Plan what was announced.

        Raises:
            InvalidSourceError: It does not fit; names every problem, `problems` among them.
        """
        inventory = self.inventory
        return compile_plan(
            inventory.slots, metadata, aliases=inventory.aliases, unneeded=inventory.unneeded, problems=problems
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that go through staging."""
        if isinstance(self.source, MappingSource):
            tensors = self.source.tensors
            return ((name, tensors[name]) for name in self.stream_steps or ())
        return iter(self.source)

    def arrivals(self) -> Iterator[tuple[str, Tensor]]:
        """`tensors()`, held against what was announced.

        Raises:
            InvalidSourceError: A tensor came twice, otherwise than announced, or not at all.
        """
        arrived = set()
        for name, tensor in self.tensors():
            if name in arrived:
                raise InvalidSourceError([f"{name}: sent twice; send it once"])
            arrived.add(name)
            if self.metadata is not None and self.metadata.get(name) != (meta := TensorMeta.of(tensor)):
                announced = self.metadata.get(name, "nothing of that name")
                raise InvalidSourceError([f"{name}: came as {meta}, announced was {announced}"])
            yield name, tensor
        absent = [name for name in self.stream_steps or () if name not in arrived]
        if absent:
            raise InvalidSourceError([f"{name}: was announced but did not come" for name in absent])


def _feed(job: _Job, stream: StreamFill) -> None:
    """Give `stream` everything that goes through staging, in the order in which it comes.

    Raises:
        InvalidSourceError: The stream is not what was announced, or, unannounced, does not fit or is incomplete.
    """
    if job.stream_steps is None:
        inventory = job.inventory
        builder = PlanBuilder(inventory.slots, aliases=inventory.aliases, unneeded=inventory.unneeded)
        for name, tensor in job.tensors():
            for step in builder.add(name, TensorMeta.of(tensor)):
                stream.add(step, tensor, is_stable=False)
        job.plan = builder.finish()
        return
    for name, tensor in job.arrivals():
        for step in job.stream_steps.get(name, ()):
            stream.add(step, tensor, is_stable=job.is_stable)


def _by_source(steps: Sequence[Step]) -> dict[str, list[Step]]:
    grouped: dict[str, list[Step]] = {}
    for step in steps:
        grouped.setdefault(step.source, []).append(step)
    return grouped


def _bad_values(names: Sequence[str], job: _Job, *, written: bool) -> RefitError:
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
    moved = [live.name for live in inventory.live if live.has_moved]
    if moved:
        raise LiveTensorMovedError(
            f"{len(moved)} live tensor(s) were replaced while they were refitted: {', '.join(moved)}. CUDA graphs may read "
            "stale memory; refit again, and if this repeats, start the engine again"
        )


def _device_events(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Event] | tuple[None, None]:
    if device.type != "cuda":
        return None, None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _require(plan: RefitPlan | None) -> RefitPlan:
    assert plan is not None, "planned by now"
    return plan
