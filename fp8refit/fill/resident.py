"""Fills from tensors on the engine's device through one table, which is compiled once.

For later sources of the same layout, only its addresses change.
"""

from collections.abc import Sequence

import torch
from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.fill.fill import Fill
from fp8refit.fill.plan import RefitPlan
from fp8refit.fill.program import Flags, Program
from fp8refit.fill.tasks import Maxima, bind, scale_formats, scale_problem
from fp8refit.kernels import Action, Task
from fp8refit.kernels.work import have_layouts, source_layout
from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.slots import Op, Slot
from fp8refit.sources.source import MappingSource


class ResidentFill(Fill):
    """Carries out the steps whose tensors are on the engine's device, as one table. The others are `staged_steps`."""

    plan: RefitPlan

    def __init__(
        self,
        plan: RefitPlan,
        slots: Sequence[Slot],
        source: MappingSource,
        device: torch.device,
        config: RefitConfig,
        action: Action = Action.WRITE,
        maxima: Maxima | None = None,
    ) -> None:
        tensors, self._maxima = source.tensors, maxima
        self.plan, self.is_first = plan, True
        self._config, self._action = config, action
        self._layouts = {name: source_layout(tensor) for name, tensor in tensors.items()}
        elsewhere = {name for name, tensor in tensors.items() if tensor.device != device}
        parted = {slots[step.slot].group for step in plan.steps if step.source in elsewhere} - {None}
        self.staged_steps = [
            step for step in plan.steps if step.source in elsewhere or slots[step.slot].group in parted
        ]
        staged = set(self.staged_steps)
        steps = [step for step in plan.steps if step not in staged]
        self._read = list(dict.fromkeys(step.source for step in steps))
        """The tensors that the program reads, in the order of its places."""
        self._recognise(source)
        tasks = [(step.source, bind(step, slots[step.slot], tensors[step.source], config, maxima)) for step in steps]
        strict = config.on_scale_mismatch == "refuse"
        scales = [(name, task) for name, task in tasks if strict and task.op is Op.COPY_SCALES]
        self._program = _compile(tasks, device)
        self._scale_formats = scale_formats(steps, slots) if strict else {}
        self._scales = _compile(scales, device) if scales else None
        """Checks the scales of prequantized tensors before anything is written."""

    def renew(self, source: MappingSource, config: RefitConfig, action: Action = Action.WRITE) -> bool:
        """Point the tables at the tensors of `source` if the layout is the same; otherwise return False.

        `config` may differ in nothing that tables depend on.
        """
        if not self._guard.holds(source.sent_names, source.sent):
            is_same = len(source.tensors) == len(self._layouts) and have_layouts(source.tensors, self._layouts)
            if source.problems or not is_same:
                return False
            self._recognise(source)
        tensors = [source.sent[place] for place in self._places]
        if not self._program.table.refresh(tensors, self._guard.addresses[self._places]):
            return False
        if self._scales is not None:
            self._scales.table.refresh([source.tensors[name] for name in self._scale_formats])
        self.is_first, self._config, self._action = False, config, action
        return True

    def _recognise(self, source: MappingSource) -> None:
        """Remember this source's layout, if it has no problems."""
        place_of = {name: place for place, name in enumerate(source.tensors)}
        places, guard = [place_of[name] for name in self._read], LayoutGuard(source.sent_names, source.sent)
        self._places, self._guard = places, guard  # one statement, so that no interrupt can separate them

    def misfit_scales(self) -> list[str]:
        """Return one line per prequantized tensor whose scales do not fit its slot. Writes nothing."""
        if self._scales is None:
            return []
        self._scales.table.launch(check=True, action=Action.CHECK)
        return [scale_problem(name, self._scale_formats[name]) for name in sorted(self._scales.read_flags().bad)]

    @override
    def look(self) -> Flags:
        self._clear_maxima()
        self._program.table.launch(check=True, action=Action.CHECK)
        return self.read_flags()

    @override
    def compile(self) -> None:
        self._program.table.compile(check=self._checks, action=self._action)

    @override
    def launch(self, begun: torch.cuda.Event | None) -> None:
        self._clear_maxima()
        self._program.table.launch(check=self._checks, action=self._action, begun=begun)

    @property
    def _checks(self) -> bool:
        return self._config.validate_values != "off"

    def _clear_maxima(self) -> None:
        if self._maxima is not None:
            self._maxima.clear()

    @override
    def read_flags(self) -> Flags:
        return self._program.read_flags()

    @override
    def release(self) -> None:
        """Release the source's tensors. Call `renew` before the next use."""
        for program in self._programs:
            program.table.release()

    @property
    @override
    def num_device_bytes(self) -> int:
        """Device memory held between refits, in bytes."""
        return sum(program.table.num_device_bytes for program in self._programs)

    @property
    def _programs(self) -> list[Program]:
        return [self._program] if self._scales is None else [self._program, self._scales]


def _compile(tasks: Sequence[tuple[str, Task]], device: torch.device) -> Program:
    """Compile tasks, with one place for each distinct source, in order."""
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in tasks))}
    return Program.compile(tasks, device, [places[name] for name, _ in tasks])
