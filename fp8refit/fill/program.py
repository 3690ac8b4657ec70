"""Compiled tasks with the source tensor that each of them reads, so that what kernels flag can be named."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch

from fp8refit.kernels import Task, WorkTable, compile_table, join_tables
from fp8refit.live.slots import Op


class Flags(NamedTuple):
    """What kernels flagged, by the names of source tensors."""

    bad: frozenset[str] = frozenset()
    """Tensors with NaN or Inf, or with scales that do not fit."""
    differing: frozenset[str] = frozenset()
    """Tensors that differ from their slots: of all that were compared, or of those that came before under another name."""
    changed: tuple[int, int, int] = (0, 0, 0)
    """How many codes, scales and values that are not quantized were written over by others, if they were counted."""

    @classmethod
    def union(cls, flags: Iterable["Flags"]) -> "Flags":
        """All of several."""
        bad, differing, changed = set[str](), set[str](), (0, 0, 0)
        for each in flags:
            bad |= each.bad
            differing |= each.differing
            changed = _sum(changed, each.changed)
        return cls(frozenset(bad), frozenset(differing), changed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A table and the source tensor of each of its tasks."""

    table: WorkTable
    sources: Sequence[str]
    ops: Sequence[Op]

    @classmethod
    def compile(
        cls,
        tasks: Sequence[tuple[str, Task]],
        device: torch.device,
        places: Sequence[int] | None = None,
        *,
        num_places: int | None = None,
    ) -> "Program":
        """Compile tasks, each with the name of its source tensor. See `compile_table`."""
        table = compile_table([task for _, task in tasks], device, places, num_places=num_places)
        return cls(table=table, sources=[name for name, _ in tasks], ops=[task.op for _, task in tasks])

    @classmethod
    def join(cls, programs: Sequence["Program"]) -> "Program":
        """One program with the tasks and places of several, one after another."""
        table = join_tables([each.table for each in programs])
        sources = [name for each in programs for name in each.sources]
        return cls(table=table, sources=sources, ops=[op for each in programs for op in each.ops])

    def read_flags(self) -> Flags:
        """Wait for everything that was launched, and return what is flagged."""
        found = self.table.bad_tasks(), self.table.differing_tasks()
        bad, differing = (frozenset(self.sources[task] for task in tasks) for tasks in found)
        changed = (0, 0, 0)
        for task, (elements, scales) in self.table.changes().items():
            changed = _sum(changed, _by_kind(self.ops[task], elements, scales))
        return Flags(bad, differing, changed)


class Launched:
    """Programs that ran, or began to, and whose flags nobody has read."""

    def __init__(self) -> None:
        self._programs: dict[Program, None] = {}

    def add(self, program: Program) -> None:
        """Add a program. Call it before the launch, which may be interrupted."""
        self._programs[program] = None

    def read_flags(self) -> Flags:
        """Wait for all of them, and return what is flagged."""
        flags = Flags.union(program.read_flags() for program in self._programs)
        self._programs.clear()
        return flags

    def forget(self) -> None:
        """Wait for all of them, and drop their flags: those of one write are never another's."""
        for program in self._programs:
            program.table.forget_flags()
        self._programs.clear()


def _sum(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _by_kind(op: Op, elements: int, scales: int) -> tuple[int, int, int]:
    """What a task of an operation changed, as codes, scales and values."""
    match op:
        case Op.QUANTIZE | Op.COPY_CODES:
            return elements, scales, 0
        case Op.COPY_SCALES:
            return 0, elements, 0
        case Op.COPY:
            return 0, 0, elements
        case Op.MAXIMUM | Op.OWN_MAXIMUM:
            return 0, 0, 0
        case _:
            assert_never(op)
