"""Plans what to read from which source tensor and write to which slot, from names, shapes and dtypes only.

`PlanBuilder` takes one source tensor at a time, so that a stream can be planned while it arrives. At the end it raises all
problems at once.
"""

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from fp8refit.errors import MISSING, UNEXPECTED, InvalidSourceError
from fp8refit.fill.fitting import Fit, fit_maxima, fit_scale, fit_weight
from fp8refit.live.names import is_adapter_weight, is_kv_scale, is_not_a_weight, other_spellings, stack_of
from fp8refit.live.slots import SCALE_SUFFIX, Op, Slot, Stacked, TensorMeta, cut_groups, dtype_name


class Step(NamedTuple):
    """One box of one source tensor, bound for one slot."""

    op: Op
    source: str
    """Checkpoint name of the tensor that is read."""
    slot: int
    """Index into the inventory's slots."""
    offset: tuple[int, ...]
    """Where the box starts in the source tensor."""
    shape: tuple[int, ...]
    """Shape of the box."""
    dtype: str
    """dtype of the source tensor."""
    select: tuple[int, ...] = ()
    """Indexes into the leading dimensions of the source tensor, before `offset`: one expert of a stack."""
    is_transposed: bool = False
    """Whether to transpose the source tensor before applying `offset`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitPlan:
    """Every step of one refit, in slot order."""

    steps: tuple[Step, ...]
    seconds: tuple[Step, ...]
    """Steps of tensors that came before under another name. Their slots are compared, not written."""
    ties: Mapping[str, tuple[str, torch.dtype]]
    """For each of these tensors, the one that came first, and the dtype in which both must be equal."""
    ignored: tuple[str, ...]
    kept: tuple[str, ...]
    """Names of slots that were not sent and keep their values."""
    num_sources: int
    """Number of source tensors that steps read."""
    num_quantized: int
    """How many of them are quantized."""
    num_bytes_read: int
    num_bytes_written: int
    digest: str
    """SHA-256 over the steps: equal for equal sources on the same engine."""
    source_digest: str
    """SHA-256 over names, shapes and dtypes of the source: equal on all ranks of a refit."""


def is_any_of(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A function that tells whether a name matches any pattern."""
    matchers = [re.compile(fnmatch.translate(pattern)) for pattern in patterns]
    return lambda name: any(matcher.match(name) for matcher in matchers)


def are_unneeded(names: Iterable[str]) -> Callable[[str], bool]:
    """A function that tells whether a tensor may be sent although no slot takes it.

    Args:
        names: See `Inventory.unneeded`.
    """
    known = frozenset(names)
    is_like = is_any_of([name for name in known if "*" in name or "?" in name])
    return lambda name: (
        name in known or name.removesuffix(SCALE_SUFFIX) in known or is_not_a_weight(name) or is_like(name)
    )


class PlanBuilder:
    """Collects steps tensor by tensor; `finish` checks that nothing is missing.

    Args:
        slots: The inventory's slots.
        aliases: Names that share another name's slot.
        unneeded: Names that a source may send although no slot takes them; see `Inventory.unneeded`.
        stacked: Tensors that may replace those of single experts.
        problems: Problems already found in the source (duplicates), to be raised with the others.
        keep: Patterns of names that may be missing.
    """

    def __init__(
        self,
        slots: tuple[Slot, ...],
        *,
        aliases: Mapping[str, str] | None = None,
        unneeded: Iterable[str] = (),
        stacked: Iterable[Stacked] = (),
        problems: Iterable[str] = (),
        keep: Sequence[str] = (),
    ) -> None:
        self._slots = slots
        self._aliases = dict(aliases or {})
        self._by_name: dict[str, list[int]] = {}
        for index, slot in enumerate(slots):
            self._by_name.setdefault(slot.name, []).append(index)
        self._is_unneeded = are_unneeded(unneeded)
        self._stacked = {stack.name: stack for stack in stacked}
        self._has_kv_scales = any(slot.is_optional for slot in slots)
        self._problems = list(problems)
        self._is_kept = is_any_of(keep)
        self._kept: dict[str, None] = {}
        self._ignored: list[str] = []
        self._apart: dict[str, tuple[str, ...]] = {}
        """Tensors of single experts, and the slots that hold all experts."""
        self.seen: dict[str, TensorMeta] = {}
        """All tensors that arrived."""
        self.seconds: dict[str, list[Step]] = {}
        """Steps of those that came before under another name."""
        self._weights: dict[int, Step] = {}
        self._scales: dict[int, Step] = {}
        self._maxima: dict[int, list[Step]] = {}

    def plan(self, sources: Mapping[str, TensorMeta]) -> RefitPlan:
        """Plan a source whose tensors are all known.

        Raises:
            InvalidSourceError: See `finish`.
        """
        for name, meta in sources.items():
            self.add(name, meta)
        return self.finish()

    def add(self, name: str, meta: TensorMeta) -> list[Step]:
        """Check one source tensor and return its steps: none if it is ignored or does not fit."""
        if name in self.seen:
            self._problems.append(f"{name}: sent twice (as {self.seen[name]} and as {meta}); send it once")
            return []
        self.seen[name] = meta
        is_scale = name.endswith(SCALE_SUFFIX)
        weight_name = name.removesuffix(SCALE_SUFFIX)
        canonical = self._aliases.get(weight_name, weight_name)
        if canonical in self._stacked:
            return self._add_stack(name, meta, self._stacked[canonical], is_scale=is_scale)
        indexes = self._by_name.get(canonical)
        if indexes is None:
            self._add_unknown(name)
            return []
        return self._add_own(name, meta, indexes, is_scale=is_scale)

    def _add_unknown(self, name: str) -> None:
        """Record a tensor whose name no slot has."""
        if self._is_unneeded(name) or (is_kv_scale(name) and not self._has_kv_scales):
            self._ignored.append(name)
        elif stacked := self._held_stacked(name):
            self._apart[name] = stacked
        else:
            self._problems.append(why_unknown(name))

    def _add_own(self, name: str, meta: TensorMeta, indexes: Sequence[int], *, is_scale: bool) -> list[Step]:
        """Return the steps of a tensor that has slots under its own name."""
        found, fit = (self._scales, fit_scale) if is_scale else (self._weights, fit_weight)
        steps = []
        for index in indexes:
            verdict = fit(meta, self._slots[index])
            if not isinstance(verdict, str) and index in found and found[index].select:
                verdict = f"came in {found[index].source} too; send it once"
            if isinstance(verdict, str):
                self._problems.append(f"{name}: {verdict}")
                return []
            steps.append(_step(name, meta, index, verdict))
            if maxima := fit_maxima(verdict, self._slots[index], is_cut=self._is_cut(index)):
                self._maxima[index] = [_step(name, meta, index, each) for each in maxima]
        if indexes[0] in found:
            is_alias = name.removesuffix(SCALE_SUFFIX) in self._aliases
            self._ignored.append(name if is_alias else found[indexes[0]].source)
            self.seconds[name] = steps
        else:
            found.update((step.slot, step) for step in steps)
        return steps if is_scale else self._with_maxima(steps)

    def _add_stack(self, name: str, meta: TensorMeta, stack: Stacked, *, is_scale: bool) -> list[Step]:
        """The steps of a tensor with a matrix of every expert."""
        found, fit = (self._scales, fit_scale) if is_scale else (self._weights, fit_weight)
        steps: dict[int, Step] = {}
        for part, (expert, first_row) in stack.parts.items():
            for index in self._by_name[part]:
                if index in found:
                    self._problems.append(f"{name}: holds {part}, which came as {found[index].source}; send it once")
                    return []
                verdict = fit(meta, self._slots[index], stack, first_row)
                if isinstance(verdict, str):
                    self._problems.append(f"{name}: {verdict}")
                    return []
                steps[index] = _step(name, meta, index, verdict, expert)
                if maxima := fit_maxima(verdict, self._slots[index], first_row, is_cut=self._is_cut(index)):
                    self._maxima[index] = [_step(name, meta, index, each, expert) for each in maxima]
        found.update(steps)
        return list(steps.values()) if is_scale else self._with_maxima(list(steps.values()))

    def _is_cut(self, index: int) -> bool:
        """Whether the rank holds only parts of the matrices that share a slot's scale, and a kernel needs to know."""
        slot = self._slots[index]
        return slot.format is not None and slot.format.needs_own_maximum and slot.group in self._cut

    @cached_property
    def _cut(self) -> frozenset[tuple[int, int]]:
        return cut_groups(self._slots)

    def _with_maxima(self, steps: Sequence[Step]) -> list[Step]:
        """Steps, after those that find the maxima that they need."""
        return [*(maximum for step in steps for maximum in self._maxima.get(step.slot, ())), *steps]

    def _held_stacked(self, name: str) -> tuple[str, ...]:
        """The slots for a tensor whose name occurs only in files: those of all experts of its layer, or its own."""
        for spelled in (name, *other_spellings(name)):
            if spelled in self._by_name:
                return (spelled,)
            stack = stack_of(spelled)
            if stack in self._stacks:
                return self._stacks[stack]
        return ()

    @cached_property
    def _stacks(self) -> dict[str | None, tuple[str, ...]]:
        """The slots that hold all experts of a layer, by layer."""
        stacks: dict[str | None, tuple[str, ...]] = {}
        for name, indexes in self._by_name.items():
            if len(self._slots[indexes[0]].full_shape) == 3 and (stack := stack_of(name)):
                stacks[stack] = (*stacks.get(stack, ()), name)
        return stacks

    def finish(self) -> RefitPlan:
        """Check that nothing is missing, and return the plan.

        Raises:
            InvalidSourceError: Names every missing, unexpected or ill-fitting tensor.
        """
        problems = [*self._problems, *self._come_apart(), *self._incomplete(), *self._parted()]
        if problems:
            raise InvalidSourceError(problems)
        steps = tuple(
            step
            for index in range(len(self._slots))
            for step in (*self._maxima.get(index, ()), self._weights.get(index), self._scales.get(index))
            if step
        )
        digest = hashlib.sha256()
        for step in steps:
            slot = self._slots[step.slot]
            said = *step, slot.name, slot.format, slot.weight.dtype
            digest.update(repr(said).encode())
        return RefitPlan(
            steps=steps,
            seconds=tuple(step for second in self.seconds.values() for step in second),
            ties={name: self._tie(second[0]) for name, second in self.seconds.items()},
            ignored=tuple(self._ignored),
            kept=tuple(self._kept),
            num_sources=len({step.source for step in steps}),
            num_quantized=len({step.source for step in steps if step.op is Op.QUANTIZE}),
            num_bytes_read=sum(prod(step.shape) * self.seen[step.source].dtype.itemsize for step in steps),
            num_bytes_written=sum(_bytes_written(step, self._slots[step.slot]) for step in steps),
            digest=digest.hexdigest(),
            source_digest=hashlib.sha256(repr(sorted(f"{n}|{m}" for n, m in self.seen.items())).encode()).hexdigest(),
        )

    def _tie(self, second: Step) -> tuple[str, torch.dtype]:
        is_scale = second.op is Op.COPY_SCALES
        first = (self._scales if is_scale else self._weights)[second.slot]
        return first.source, torch.float32 if is_scale else self._slots[second.slot].source_dtype

    def _come_apart(self) -> Iterable[str]:
        if self._apart:
            name, held = next(iter(self._apart.items()))
            yield (
                f"{name}: it and {len(self._apart) - 1} more are in the form that save_pretrained() writes, but this "
                f"engine holds all experts of a layer in one tensor ({held[0]}); load the files with from_pretrained() "
                "and send the state_dict()"
            )

    def _parted(self) -> Iterable[str]:
        """Of slots that share a scale, either all change or none."""
        sent: dict[tuple[int, int], str] = {}
        for index, step in self._weights.items():
            if (group := self._slots[index].group) is not None:
                sent.setdefault(group, step.source)
        for slot in self._slots if sent else ():
            if slot.name in self._kept and slot.group in sent:
                yield f"{slot.name}: is kept, but shares one scale with {sent[slot.group]}; send both or keep both"

    def _incomplete(self) -> Iterable[str]:
        blamed = {problem.split(":", 1)[0] for problem in self._problems}
        blamed.update(*self._apart.values())
        aliases: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            aliases.setdefault(name, []).append(alias)
        absent_stacks: dict[str, Stacked] = {}
        for stack in self._stacked.values():
            blamed_parts = stack.parts if {stack.name, *aliases.get(stack.name, ())} & blamed else ()
            blamed.update(blamed_parts)
            if all(index not in self._weights for part in stack.parts for index in self._by_name[part]):
                absent_stacks |= dict.fromkeys(stack.parts, stack)
        yield from dict.fromkeys(self._incomplete_slots(blamed, aliases, absent_stacks))

    def _incomplete_slots(
        self, blamed: set[str], aliases: Mapping[str, list[str]], absent_stacks: Mapping[str, Stacked]
    ) -> Iterable[str]:
        for name, indexes in self._by_name.items():
            for index in indexes:
                weight, scale = self._weights.get(index), self._scales.get(index)
                if weight is None:
                    names = {name, *aliases.get(name, ())}
                    if not self._slots[index].is_optional and not blamed & names:
                        stack = absent_stacks.get(name)
                        if any(map(self._is_kept, (*names, *([stack.name] if stack else [])))):
                            self._kept[name] = None
                            continue
                        yield f"{stack.name}: missing, whole and expert by expert" if stack else f"{name}: {MISSING}"
                elif weight.op is Op.COPY_CODES and scale is None:
                    if weight.source + SCALE_SUFFIX not in blamed:
                        yield f"{weight.source}: is FP8 without its scales; send {weight.source}{SCALE_SUFFIX} too"
                elif scale is not None and weight.op is not Op.COPY_CODES:
                    yield f"{scale.source}: is a scale, but {weight.source} is {weight.dtype}; leave the scale out"


def why_unknown(name: str) -> str:
    """Say why a tensor is not taken that no slot has a name for."""
    if is_adapter_weight(name):
        return (
            f"{name}: belongs to a LoRA adapter; send fp8refit.training.peft.merged(model), which merges it on the way"
        )
    return f"{name}: {UNEXPECTED}"


def _step(name: str, meta: TensorMeta, index: int, fit: Fit, expert: int | None = None) -> Step:
    return Step(
        op=fit.op,
        source=name,
        slot=index,
        offset=fit.offset,
        shape=fit.shape,
        dtype=dtype_name(meta.dtype),
        select=() if expert is None else (expert,),
        is_transposed=fit.is_transposed,
    )


def _bytes_written(step: Step, slot: Slot) -> int:
    if step.op.finds_maximum:
        return 0
    target = slot.scale if step.op is Op.COPY_SCALES else slot.weight
    assert target is not None, f"{step=}"
    return target.nbytes + (slot.scale.nbytes if step.op is Op.QUANTIZE and slot.scale is not None else 0)
