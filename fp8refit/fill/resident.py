"""Fills from tensors on the engine's device through one table, which is compiled once.

For later sources of the same layout, only its addresses change.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.fill.fill import Fill
from fp8refit.fill.kernels import Action, compile_table
from fp8refit.fill.kernels.work import have_layouts, source_layout
from fp8refit.fill.plan import RefitPlan
from fp8refit.fill.tasks import bind, scale_problem
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import Op, Slot
from fp8refit.sources.source import MappingSource


class ResidentFill(Fill):
    """Carries out the steps whose tensors are on the engine's device, as one table. The others are `staged_steps`."""

    def __init__(
        self,
        plan: RefitPlan,
        slots: Sequence[Slot],
        source: MappingSource,
        device: torch.device,
        config: RefitConfig,
        action: Action = Action.WRITE,
    ) -> None:
        self._action, self._differing = action, set[str]()
        tensors = source.tensors
        self._plan = plan
        self._config = config
        self.is_first = True
        self._num_names = len(tensors)
        elsewhere = {name for name, tensor in tensors.items() if tensor.device != device}
        self._unbound = {name: _meta(tensors[name]) for name in elsewhere.union(plan.ignored)}
        steps = [step for step in plan.steps if step.source not in elsewhere]
        self.staged_steps = [step for step in plan.steps if step.source in elsewhere]
        self._sources = [step.source for step in steps]
        self._layouts = {name: source_layout(tensors[name]) for name in dict.fromkeys(self._sources)}
        self._recognise(source)
        tasks = [bind(step, slots[step.slot], tensors[step.source], config) for step in steps]
        self._table = compile_table(tasks, device, _places(self._sources))
        strict_scales = [
            index
            for index, task in enumerate(tasks)
            if task.op is Op.COPY_SCALES and config.on_scale_mismatch == "refuse"
        ]
        self._scale_sources = [self._sources[index] for index in strict_scales]
        self._scale_formats = [tasks[index].scale_format for index in strict_scales]
        self._scale_table = None
        if strict_scales:
            places = _places(self._scale_sources)
            self._scale_table = compile_table([tasks[index] for index in strict_scales], device, places)

    def renew(self, source: MappingSource, config: RefitConfig, action: Action = Action.WRITE) -> bool:
        """Point the tables at the tensors of `source` if the layout is the same; otherwise return False."""
        if config != self._config:
            return False
        if not self._guard.holds(source.sent_names, source.sent):
            if source.problems or not self._fits(source.tensors):
                return False
            self._recognise(source)
        if not self._table.refresh([source.sent[place] for place in self._places], self._guard.addresses[self._places]):
            return False
        if self._scale_table is not None:
            tensors = source.tensors
            self._scale_table.refresh([tensors[name] for name in dict.fromkeys(self._scale_sources)])
        self.is_first, self._action = False, action
        return True

    def _recognise(self, source: MappingSource) -> None:
        """Remember this source's layout, if it has no problems."""
        place_of = {name: place for place, name in enumerate(source.tensors)}
        places, guard = [place_of[name] for name in self._layouts], LayoutGuard(source.sent_names, source.sent)
        self._places, self._guard = places, guard  # one statement, so that no interrupt can separate them

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return (
            len(tensors) == self._num_names
            and have_layouts(tensors, self._layouts)
            and all(name in tensors and _meta(tensors[name]) == meta for name, meta in self._unbound.items())
        )

    def misfit_scales(self) -> list[str]:
        """Return one line per prequantized tensor whose scales do not fit its slot. Writes nothing."""
        if self._scale_table is None:
            return []
        self._scale_table.launch(check=True, action=Action.CHECK)
        bad = self._scale_table.bad_tasks()
        return [scale_problem(self._scale_sources[index], self._scale_formats[index]) for index in bad]

    @property
    @override
    def plan(self) -> RefitPlan:
        return self._plan

    @override
    def look(self) -> list[str]:
        self._table.launch(check=True, action=Action.CHECK)
        return self.bad_sources()

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        self._table.launch(check=self._config.validate_values != "off", action=self._action, begun=begun)

    @override
    def bad_sources(self) -> list[str]:
        self._differing = {self._sources[index] for index in self._table.differing_tasks()}
        return sorted({self._sources[index] for index in self._table.bad_tasks()})

    @property
    @override
    def differing(self) -> set[str]:
        return self._differing

    @override
    def release(self) -> None:
        """Release the source's tensors. Call `renew` before the next use."""
        for table in (self._table, self._scale_table):
            if table is not None:
                table.release()

    @property
    @override
    def num_device_bytes(self) -> int:
        """Device memory held between refits, in bytes."""
        tables = [table for table in (self._table, self._scale_table) if table is not None]
        return sum(table.num_device_bytes for table in tables)


def _places(sources: Sequence[str]) -> list[int]:
    """For each step, the index of its source among the distinct sources, in order."""
    places = {name: place for place, name in enumerate(dict.fromkeys(sources))}
    return [places[name] for name in sources]


def _meta(tensor: Tensor) -> tuple[torch.Size, torch.dtype, int]:
    return tensor.shape, tensor.dtype, tensor.get_device()
