"""Moves tensors to the engine's device through two buckets of bounded size: one is written to slots while the other
fills.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.fill.plan import Step
from fp8refit.fill.program import Flags, Program
from fp8refit.fill.row_tasks import Seams, cut_to_run
from fp8refit.fill.tasks import Maxima, bind, split
from fp8refit.kernels import Action, Task
from fp8refit.live.slots import Op, Slot

_BUCKET_ALIGNMENT_BYTES = 256

ReadBox: TypeAlias = Callable[[Tensor, Tensor], None]
"""Reads the bytes that a view of a meta tensor stands for, into memory of its shape and dtype."""


class Staging:
    """Carries out steps on tensors that arrive one after another, through two buckets.

    Peak memory: two buckets on the engine's device and, for a GPU, two in pinned host memory. A bucket has
    `config.bucket_bytes`, or one row of blocks of the widest tensor if that is larger. A tensor whose runs of rows cut
    its blocks needs one more row of blocks.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        config: RefitConfig,
        action: Action = Action.WRITE,
        maxima: Maxima | None = None,
    ) -> None:
        self._slots = slots
        self._maxima = maxima
        self.config = config
        self.device = device
        self.action = action
        self._check = config.validate_values != "off"
        self._buckets: list[_Bucket] = []
        self._seams = Seams()
        self._flags = Flags()
        """Of what has been written since they were read."""

    def clear_maxima(self) -> None:
        """Forget the maxima of an earlier refit."""
        if self._maxima is not None:
            self._maxima.clear()

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of the planned inventory."""
        return self._slots

    @property
    def bucket_bytes(self) -> int:
        """Intended size of a bucket."""
        return self.config.bucket_bytes

    def reserve(self, least_bytes: int | None = None) -> None:
        """Allocate the buckets now, before the first tensor is staged.

        Args:
            least_bytes: `least_bucket_bytes` of the slots, if known. Computing it takes a microsecond per slot.
        """
        if not self._buckets:
            least_bytes = least_bucket_bytes(self._slots) if least_bytes is None else least_bytes
            num_bytes = max(self.config.bucket_bytes, least_bytes)
            self._buckets = [_Bucket(num_bytes, self.device) for _ in range(2)]

    @property
    def num_device_bytes(self) -> int:
        """Device memory of the buckets, in bytes."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def add(self, step: Step, tensor: Tensor, *, is_stable: bool, read_box: ReadBox | None = None) -> None:
        """Stage what `step` reads of `tensor`.

        Args:
            step: The step.
            tensor: The whole source tensor.
            is_stable: Whether its bytes stay unchanged until `read_flags` returns.
            read_box: Reads the bytes, for a tensor without bytes of its own.
        """
        task = bind(step, self._slots[step.slot], tensor, self.config, self._maxima)
        self._stage(step.source, task, is_stable=is_stable, read_box=read_box)

    def add_rows(self, step: Step, rows: Tensor, first_row: int) -> None:
        """Stage what `step` reads of some rows of its tensor, from `first_row`. Runs of rows arrive in order."""
        for first, run in self.runs_of(step, rows, first_row):
            whole = bind(step, self._slots[step.slot], run, self.config, self._maxima)
            task = cut_to_run(whole, first, run.shape[0])
            if task is not None:
                self._stage(step.source, task, is_stable=False)

    def runs_of(self, step: Step, rows: Tensor, first_row: int) -> Iterable[tuple[int, Tensor]]:
        """Split rows of a step's tensor so that no run cuts a block: first row and rows of each complete run."""
        slot = self._slots[step.slot]
        if step.op is not Op.QUANTIZE or step.select or slot.format is None or slot.format.is_shared:
            return [(first_row, rows)]
        wanted = range(step.offset[0], step.offset[0] + step.shape[0])
        return self._seams.runs_of_blocks(step.slot, wanted, slot.format.row_step, first_row, rows)

    @contextmanager
    def doing(self, action: Action) -> Iterator[None]:
        """While active, do something else with what is staged."""
        self.flush()
        usual, self.action = self.action, action
        yield
        self.flush()
        self.action = usual

    def comparing(self) -> AbstractContextManager[None]:
        """While active, compare with what was written; without effect if nothing is written."""
        return self.doing(Action.COMPARE if self.action.writes else self.action)

    def _stage(self, name: str, task: Task, *, is_stable: bool, read_box: ReadBox | None = None) -> None:
        self.reserve()
        for piece in split(task, self._buckets[0].num_bytes):
            box = piece.box(task.source.detach())
            if not self._buckets[0].has_room(box):
                self.flush()
            self._buckets[0].put(name, piece, box, is_stable=is_stable, read_box=read_box)

    def read_flags(self) -> Flags:
        """Write what is staged, wait, and return what was flagged since the last call."""
        for _ in self._buckets:
            self.flush()
        flags, self._flags = self._flags, Flags()
        return flags

    def release(self) -> None:
        """Free the buckets with their contents."""
        self._buckets, self._seams = [], Seams()

    def flush(self) -> None:
        """Write what is staged, and switch to the other bucket once that has been written."""
        if not self._buckets:
            return
        self._buckets[0].launch(check=self._check, action=self.action)
        self._buckets.reverse()
        self._flags = Flags.union((self._flags, self._buckets[0].drain()))


class _Bucket:
    """One staging buffer, the tasks that read it, and their program while it runs."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host = (
            torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True) if device.type == "cuda" else None
        )
        self._used = 0
        self._tasks: list[tuple[str, Task]] = []
        self._program: Program | None = None

    def has_room(self, box: Tensor) -> bool:
        return self._used + box.numel() * box.element_size() <= self.num_bytes

    @torch.inference_mode()
    def put(self, name: str, task: Task, box: Tensor, *, is_stable: bool, read_box: ReadBox | None = None) -> None:
        """Copy or read `box` into the buffer, and queue `task` on the copy."""
        num_bytes = box.numel() * box.element_size()
        staged = _view(self._memory, self._used, box)
        if read_box is not None:
            into = staged if self._host is None else _view(self._host, self._used, box)
            read_box(box, into)
            box = into
        elif box.device.type == "cpu" and self._host is not None and not (is_stable and box.is_pinned()):
            box = _view(self._host, self._used, box).copy_(box)
        if box is not staged:
            staged.copy_(box, non_blocking=True)
        self._used += -(-num_bytes // _BUCKET_ALIGNMENT_BYTES) * _BUCKET_ALIGNMENT_BYTES
        task = replace(task, source=staged, offset=(0,) * staged.ndim, select=(), is_transposed=False)
        self._tasks.append((name, task))

    def launch(self, *, check: bool, action: Action) -> None:
        if self._tasks:
            self._program = Program.compile(self._tasks, self._device)
            self._program.table.launch(check=check, action=action)

    def drain(self) -> Flags:
        """Wait until the bucket may be reused, and return what was flagged."""
        flags = self._program.read_flags() if self._program is not None else Flags()
        self._used, self._tasks, self._program = 0, [], None
        return flags


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """A contiguous tensor of `like`'s shape and dtype in `memory`."""
    num_bytes = like.numel() * like.element_size()
    return memory[start : start + num_bytes].view(like.dtype).view(like.shape)


def least_bucket_bytes(slots: Iterable[Slot]) -> int:
    """Bytes of the smallest bucket that can take a piece of every slot's source."""
    return max(map(_least_bytes, slots), default=0)


def _least_bytes(slot: Slot) -> int:
    """Bytes of the smallest piece that a slot's source can be cut into, in the widest dtype."""
    if slot.weight.ndim < 2:
        return slot.weight.numel() * 4
    rows = 1 if slot.format is None else min(slot.format.row_step, slot.shape[0])
    *others, columns = slot.shape[1:]
    if slot.format is not None:
        _, columns = slot.format.columns_read(slot.origin[-1], columns, slot.full_shape[-1])
    return rows * prod(others) * columns * 4
