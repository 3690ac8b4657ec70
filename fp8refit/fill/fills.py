"""Chooses how to write a source, and keeps what the next source with the same layout can reuse."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError, RefitError, StagingMemoryError
from fp8refit.fill.arrivals import Arrivals, Expected, by_source
from fp8refit.fill.direct import DirectFill
from fp8refit.fill.fill import Fill
from fp8refit.fill.from_buckets import ReceivedFill, ReceivedSource
from fp8refit.fill.plan import PlanBuilder, RefitPlan
from fp8refit.fill.program import Flags
from fp8refit.fill.resident import ResidentFill
from fp8refit.fill.staging import Staging, least_bucket_bytes
from fp8refit.fill.stream import StreamFill
from fp8refit.fill.tasks import Maxima, misfit_scales, scale_formats, scale_problem
from fp8refit.fill.ties import untied
from fp8refit.kernels import Action
from fp8refit.live.collector import collector_paused
from fp8refit.live.formats import ScaleFormat
from fp8refit.live.slots import SCALE_SUFFIX, Inventory
from fp8refit.sources.handover import HandedSource
from fp8refit.sources.source import MappingSource, PushedSource, RandomAccess, Source, check_can_be_read_twice

_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: raised when pinned host memory is exhausted; the device is not affected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A validated source and how to write it. Used for one refit."""

    source: Source
    config: RefitConfig
    inventory: Inventory
    fills: tuple[Fill, ...]
    """Each carries out part of one plan. Pushed tensors go to the last one."""
    writes: bool = True
    """Whether this is a refit; otherwise slots are compared with what a refit would write."""
    kv: KvOrder | None = None
    """Which KV scales are set once the weights are in place."""
    ticket: object
    """Identifies the latest preparation; see `Fills.is_current`."""

    @property
    def plan(self) -> RefitPlan | None:
        """The plan; None for an unannounced stream until all of it has arrived."""
        return self.fills[-1].plan

    def release(self) -> None:
        """Release what only this refit needs."""
        for fill in self.fills:
            fill.release()

    def read_flags(self) -> Flags:
        """Wait for the device, and return what was flagged."""
        return Flags.union(fill.read_flags() for fill in self.fills)

    def compile(self) -> None:
        """Compile the kernels that are launched first."""
        for fill in self.fills:
            fill.compile()

    def check_values(self) -> None:
        """Read everything without writing.

        Raises:
            NonFiniteError: NaN or Inf.
            InvalidSourceError: The source can be read only once.
        """
        check_can_be_read_twice(self.source)
        if bad := Flags.union(fill.look() for fill in self.fills).bad:
            raise self.error_of(bad, written=False)

    def error_of(self, bad: Iterable[str], *, written: bool) -> RefitError:
        """The error for flagged tensors: scales that do not fit their slots, or NaN or Inf."""
        bad = sorted(bad)
        if self.plan is not None and all(name.endswith(SCALE_SUFFIX) for name in bad):
            takes_any = self.config.on_scale_mismatch == "copy"
            formats = {} if takes_any else scale_formats(self.plan.steps, self.inventory.slots)
            return InvalidSourceError([scale_problem(name, formats.get(name, ScaleFormat.FP32)) for name in bad])
        return NonFiniteError(bad, written=written)


class Fills:
    """Prepares fills of one inventory.

    Keeps what was compiled for a source. The next source of the same kind reuses it if one check finds the same layout.

    Args:
        inventory: The rank's inventory.
        device: The rank's device.
    """

    def __init__(self, inventory: Inventory, device: torch.device) -> None:
        self._inventory = inventory
        self._device = device
        self._config, self._foreign = RefitConfig(), frozenset[str]()
        """Those of the last preparation."""
        self._resident: ResidentFill | None = None
        self._received: ReceivedFill | None = None
        self._direct: DirectFill | None = None
        self._ticket = object()
        self._maxima = Maxima(inventory.slots, device)

    @collector_paused()
    def prepare(
        self,
        source: Source,
        config: RefitConfig,
        *,
        foreign: frozenset[str] = frozenset(),
        compares: bool = False,
    ) -> Prepared:
        """Plan `source`, or recognize it, and compile what is missing. Writes nothing.

        Args:
            source: The whole policy.
            config: Options of the refit.
            foreign: Names that only other ranks hold. They are accepted.
            compares: Compare with the slots instead of writing to them.

        Raises:
            InvalidSourceError: The source does not fit; lists every problem.
            StagingMemoryError: There is no room for a stream's buckets.
        """
        self.release()
        if _compiled_for(config, foreign) != _compiled_for(self._config, self._foreign):
            self._resident = self._received = self._direct = None
        self._config, self._foreign = config, foreign
        usual = Action.COUNT if config.count_changes else Action.WRITE
        action = Action.COMPARE if compares else usual
        fills: tuple[Fill, ...]
        if isinstance(source, MappingSource):
            fills = self._prepare_mapping(source, action)
        elif isinstance(source, ReceivedSource):
            fills = (self._prepare_received(source),)
        else:
            fills = (self._prepare_stream(source, action),)
        return Prepared(
            source=source,
            config=config,
            inventory=self._inventory,
            fills=fills,
            writes=not compares,
            ticket=self._ticket,
        )

    def is_current(self, prepared: Prepared) -> bool:
        """Whether `prepared` is the latest preparation and has not been released."""
        return prepared.ticket is self._ticket

    def release(self) -> None:
        """Release the last source's tensors. Its preparation can no longer be used."""
        self._ticket = object()
        if self._resident is not None:
            self._resident.release()

    def _prepare_mapping(self, source: MappingSource, action: Action) -> tuple[Fill, ...]:
        slots, config, resident = self._inventory.slots, self._config, self._resident
        if resident is None or not resident.renew(source, config, action):
            metadata, problems = source.scan()
            plan = self._builder(problems).plan(metadata)
            self._resident = None
            self._resident = resident = ResidentFill(plan, slots, source, self._device, config, action, self._maxima)
        staged, misfits = resident.staged_steps, resident.misfit_scales()
        if config.on_scale_mismatch == "refuse" and staged:
            names = dict.fromkeys(step.source for step in staged)
            misfits += misfit_scales(staged, slots, ((name, source.tensors[name]) for name in names))
        misfits += untied(resident.plan.ties, source)
        if misfits:
            raise InvalidSourceError(misfits)
        if not staged:
            return (resident,)
        for device in {source.tensors[step.source].device for step in staged}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the trainer must have finished computing what is read
        rest = Expected(plan=resident.plan, steps=by_source(staged))
        return resident, StreamFill(source, Arrivals(rest), self._staging(source, action))

    def _prepare_received(self, source: ReceivedSource) -> ReceivedFill:
        received, slots = self._received, self._inventory.slots
        if received is None or not received.renew(source, self._config):
            plan = self._builder(source.problems).plan(source.metadata or {})
            self._received = None
            self._received = received = ReceivedFill(plan, slots, source, self._device, self._config, self._maxima)
        self._check_scales(received.plan, source)
        return received

    def _prepare_stream(self, source: Source, action: Action) -> StreamFill:
        """Plan a stream before it is written, unless it is unannounced and can be read only once."""
        if self._direct is None:
            self._direct = DirectFill(self._inventory.slots, self._device, self._maxima)
        direct, scanned, is_first = self._direct, source.scan(), False
        if scanned is None:
            arrivals = Arrivals(direct.expected, make_builder=self._builder)
        else:
            metadata, problems = scanned
            expected = direct.expected
            if expected is None or problems or expected.metadata != metadata:
                expected, is_first = Expected.of(self._builder(problems).plan(metadata), metadata), True
                direct.expect(expected)
            self._check_scales(expected.plan, source)
            if isinstance(source, RandomAccess) and (problems := untied(expected.plan.ties, source)):
                raise InvalidSourceError(problems)
            arrivals = Arrivals(expected)
        return StreamFill(source, arrivals, self._staging(source, action), direct=direct, is_first=is_first)

    def _staging(self, source: Source, action: Action) -> Staging:
        """Make a stream's staging memory, before anything is written.

        Raises:
            StagingMemoryError: There is not enough memory.
        """
        staging = Staging(self._inventory.slots, self._device, self._config, action, self._maxima)
        if action is Action.COMPARE or isinstance(source, HandedSource):
            return staging
        try:
            staging.reserve(self._least_bucket_bytes)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _OUT_OF_MEMORY:
                raise
            raise StagingMemoryError(
                f"no room for two staging buckets of {self._config.bucket_bytes >> 20} MiB on {self._device} and in pinned "
                "host memory; lower bucket_bytes or leave the engine less memory. Nothing was written"
            ) from error
        return staging

    @cached_property
    def _least_bucket_bytes(self) -> int:
        return least_bucket_bytes(self._inventory.slots)

    def _builder(self, problems: Sequence[str] = ()) -> PlanBuilder:
        inventory = self._inventory
        return PlanBuilder(
            inventory.slots,
            aliases=inventory.aliases,
            unneeded=self._foreign.union(inventory.unneeded, self._config.ignore),
            stacked=inventory.stacked,
            problems=problems,
            keep=self._config.keep,
        )

    def _check_scales(self, plan: RefitPlan, source: Source) -> None:
        """Check scales in a stream, as far as they can be read before it is written.

        Raises:
            InvalidSourceError: Some do not fit their slots.
        """
        slots = self._inventory.slots
        need_powers = {name for name, found in scale_formats(plan.steps, slots).items() if found.has_powers_of_two}
        if not need_powers or self._config.on_scale_mismatch != "refuse":
            return
        misfits: list[str] = []
        if isinstance(source, PushedSource):
            misfits = [scale_problem(name, ScaleFormat.UE8M0) for name in sorted(need_powers & source.odd_scales)]
        elif source.is_repeatable:
            scales = source.pick(need_powers).items() if isinstance(source, RandomAccess) else source
            misfits = misfit_scales(plan.steps, slots, scales)
        if misfits:
            raise InvalidSourceError(misfits)


def _compiled_for(config: RefitConfig, foreign: frozenset[str]) -> tuple[object, ...]:
    """What plans and tables depend on, beside the inventory and the source."""
    return config.keep, config.ignore, config.fp32_sources, config.on_scale_mismatch, foreign
