"""Chooses how to write a source, and keeps what the next source with the same layout can reuse."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fp8refit.config import KvOrder, RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError, RefitError, StagingMemoryError
from fp8refit.fill.arrivals import Arrivals, Expected, by_source
from fp8refit.fill.direct import DirectFill
from fp8refit.fill.fill import Fill
from fp8refit.fill.from_buckets import ReceivedFill, ReceivedSource
from fp8refit.fill.kernels import Action
from fp8refit.fill.plan import PlanBuilder, RefitPlan, compile_plan
from fp8refit.fill.program import Flags
from fp8refit.fill.resident import ResidentFill
from fp8refit.fill.staging import Staging, least_bucket_bytes
from fp8refit.fill.stream import StreamFill
from fp8refit.fill.tasks import misfit_scales, required_format, scale_problem
from fp8refit.fill.ties import untied
from fp8refit.live.collector import collector_paused
from fp8refit.live.slots import SCALE_SUFFIX, Inventory, Op, ScaleFormat, TensorMeta
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
            slots = self.inventory.slots
            formats = {step.source: required_format(slots[step.slot], self.config) for step in self.plan.steps}
            return InvalidSourceError([scale_problem(name, formats[name]) for name in bad])
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
        self._resident: ResidentFill | None = None
        self._received: ReceivedFill | None = None
        self._expected: tuple[tuple[str, ...], Expected] | None = None
        """`keep` patterns and expectations of the last stream."""
        self._foreign: frozenset[str] = frozenset()
        """The `foreign` names that everything kept was compiled for."""
        self._directs: dict[Action, DirectFill] = {}
        self._ticket = object()

    @collector_paused()
    def prepare(
        self,
        source: Source,
        config: RefitConfig,
        *,
        kv: KvOrder | None = None,
        foreign: frozenset[str] = frozenset(),
        compares: bool = False,
    ) -> Prepared:
        """Plan `source`, or recognize it, and compile what is missing. Writes nothing.

        Args:
            source: The whole policy.
            config: Options of the refit.
            kv: The KV scales to set after the weights.
            foreign: Names that only other ranks hold. They are accepted.
            compares: Compare with the slots instead of writing to them.

        Raises:
            InvalidSourceError: The source does not fit; lists every problem.
            StagingMemoryError: There is no room for a stream's buckets.
        """
        self.release()
        if foreign is not self._foreign and foreign != self._foreign:
            self._resident = self._received = self._expected = None
        self._foreign = foreign
        action = Action.COMPARE if compares else Action.WRITE
        fills: tuple[Fill, ...]
        if isinstance(source, MappingSource):
            fills = self._prepare_mapping(source, config, foreign, action)
        elif isinstance(source, ReceivedSource):
            fills = (self._prepare_received(source, config, foreign),)
        else:
            fills = (self._prepare_stream(source, config, foreign, action),)
        return Prepared(
            source=source,
            config=config,
            inventory=self._inventory,
            fills=fills,
            writes=not compares,
            kv=kv,
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

    def _prepare_mapping(
        self, source: MappingSource, config: RefitConfig, foreign: frozenset[str], action: Action
    ) -> tuple[Fill, ...]:
        slots, resident = self._inventory.slots, self._resident
        if resident is None or not resident.renew(source, config, action):
            plan = self._compile(*source.scan(), config, foreign)
            self._resident = None
            self._resident = resident = ResidentFill(plan, slots, source, self._device, config, action)
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
        return resident, self._stream(source, rest, config, foreign, action, is_announced=True, is_first=False)

    def _prepare_received(self, source: ReceivedSource, config: RefitConfig, foreign: frozenset[str]) -> ReceivedFill:
        received = self._received
        if received is None or not received.renew(source, config):
            plan = self._compile(source.metadata or {}, source.problems, config, foreign)
            self._received = None
            self._received = received = ReceivedFill(plan, self._inventory.slots, source, self._device, config)
        self._check_scales(received.plan, source, config)
        return received

    def _prepare_stream(
        self, source: Source, config: RefitConfig, foreign: frozenset[str], action: Action
    ) -> StreamFill:
        """Plan a stream before it is written, unless it is unannounced and can be read only once."""
        scanned, is_first = source.scan(), False
        known = self._expected[1] if self._expected is not None and self._expected[0] == config.keep else None
        if scanned is None:
            is_first = known is None
        else:
            metadata, problems = scanned
            if known is None or problems or known.metadata != metadata:
                plan = self._compile(metadata, problems, config, foreign)
                known, is_first = Expected.of(plan, metadata), True
                self._expected = config.keep, known
            self._check_scales(known.plan, source, config)
            if isinstance(source, RandomAccess) and (problems := untied(known.plan.ties, source)):
                raise InvalidSourceError(problems)

        def learn(came: Expected) -> None:
            self._expected = config.keep, came

        return self._stream(
            source,
            known,
            config,
            foreign,
            action,
            is_announced=scanned is not None,
            is_first=is_first,
            direct=self._direct_for(config, action),
            learn=learn,
        )

    def _stream(
        self,
        source: Source,
        expected: Expected | None,
        config: RefitConfig,
        foreign: frozenset[str],
        action: Action,
        *,
        is_announced: bool,
        is_first: bool,
        direct: DirectFill | None = None,
        learn: Callable[[Expected], None] = lambda _: None,
    ) -> StreamFill:
        """Make a stream's fill with its staging memory, before anything is written.

        Raises:
            StagingMemoryError: There is not enough memory.
        """
        slots = self._inventory.slots

        def make_builder() -> PlanBuilder:
            return PlanBuilder(
                slots,
                aliases=self._inventory.aliases,
                unneeded=foreign.union(self._inventory.unneeded),
                stacked=self._inventory.stacked,
                keep=config.keep,
            )

        def make_staging(action: Action) -> Staging:
            with _room_for_buckets(config, self._device):
                staging = Staging(slots, self._device, config, action)
                if action is not Action.COMPARE and not isinstance(source, HandedSource):
                    staging.reserve(self._least_bucket_bytes)
            return staging

        def make(action: Action, **options: Any) -> StreamFill:
            arrivals = Arrivals(expected, is_announced=is_announced, make_builder=make_builder)
            return StreamFill(source, arrivals, make_staging(action), make_scout=make_scout, **options)

        def make_scout() -> StreamFill:
            return make(Action.CHECK, is_first=False)

        return make(action, direct=direct, is_first=is_first, learn=learn)

    @cached_property
    def _least_bucket_bytes(self) -> int:
        return least_bucket_bytes(self._inventory.slots)

    def _direct_for(self, config: RefitConfig, action: Action) -> DirectFill:
        """The fill for stream tensors on this device, with the table of earlier streams."""
        direct = self._directs.get(action)
        if direct is None or direct.config != config:
            direct = self._directs[action] = DirectFill(self._inventory.slots, self._device, config, action)
        return direct

    def _compile(
        self,
        metadata: Mapping[str, TensorMeta],
        problems: Sequence[str],
        config: RefitConfig,
        foreign: frozenset[str],
    ) -> RefitPlan:
        inventory = self._inventory
        return compile_plan(
            inventory.slots,
            metadata,
            aliases=inventory.aliases,
            unneeded=foreign.union(inventory.unneeded),
            stacked=inventory.stacked,
            problems=problems,
            keep=config.keep,
        )

    def _check_scales(self, plan: RefitPlan, source: Source, config: RefitConfig) -> None:
        """Check scales in a stream, as far as they can be read before it is written.

        Raises:
            InvalidSourceError: Some do not fit their slots.
        """
        slots = self._inventory.slots
        need_powers = {
            step.source
            for step in plan.steps
            if step.op is Op.COPY_SCALES and slots[step.slot].scale_format is ScaleFormat.UE8M0
        }
        if not need_powers or config.on_scale_mismatch != "refuse":
            return
        misfits: list[str] = []
        if isinstance(source, PushedSource):
            misfits = [scale_problem(name, ScaleFormat.UE8M0) for name in sorted(need_powers & source.odd_scales)]
        elif source.is_repeatable:
            scales = source.pick(need_powers).items() if isinstance(source, RandomAccess) else source
            misfits = misfit_scales(plan.steps, slots, scales)
        if misfits:
            raise InvalidSourceError(misfits)


@contextmanager
def _room_for_buckets(config: RefitConfig, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _OUT_OF_MEMORY:
            raise
        raise StagingMemoryError(
            f"no room for two staging buckets of {config.bucket_bytes >> 20} MiB on {device} and in pinned host memory; lower "
            "bucket_bytes or leave the engine less memory. Nothing was written"
        ) from error
