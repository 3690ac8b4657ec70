"""Traces models with many experts faster: one layer shows where a loader puts the tensors of all similar layers.

Only the first of several similar layers is traced whole. Of each later layer, the loader gets one tensor per expert, a
different one in each layer, and its plain copies of them are compared with those of the first layer. This takes a third of
the time of a trace. If they match, so does the rest of the layer, because a loader keeps the tensors of an expert together.
Otherwise the layer is traced whole.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8refit.live.slots import TensorMeta
from fp8refit.live.tracing.records import Copy, Traced
from fp8refit.live.tracing.trace import Load, by_operation, storage_of, trace_loader

aten = torch.ops.aten

Run: TypeAlias = Callable[[Load, Mapping[str, Tensor], Mapping[str, TensorMeta]], Traced]
Seen: TypeAlias = Mapping[str, Sequence[tuple[str, tuple[object, ...]]]]
"""For each checkpoint tensor, the parameters it is copied to, with offset, shape and stride on both sides."""
_EXPERT = re.compile(r"^(.*\.\d+\..*\.)(\d+)(\.[^\d.][^.]*(?:\.[^\d.][^.]*)*)$")
"""A layer, one of its experts, and a tensor of that expert."""
_NUMBER = re.compile(r"\.\d+\.")
_MIN_EXPERTS = 8
"""With fewer experts, every layer is traced whole."""


@dataclass(kw_only=True, slots=True)
class _Layer:
    """The tensors of one layer's experts."""

    names: dict[tuple[int, str], str] = field(default_factory=dict)
    """Checkpoint names by expert and tensor."""

    def one_of_each(self, turn: int) -> Iterator[str]:
        """Yield the name of one tensor of each expert. `turn` decides which one."""
        held: dict[int, list[str]] = {}
        for (expert, _), name in self.names.items():
            held.setdefault(expert, []).append(name)
        yield from (names[(expert + turn) % len(names)] for expert, names in held.items())


def trace_alike(
    load: Load, parameters: Mapping[str, Tensor], sources: Mapping[str, TensorMeta], trace: Run = trace_loader
) -> Traced:
    """Return what `trace` returns for `sources`, in less time if many of them are experts' tensors.

    Args:
        load: A model's `load_weights`.
        parameters: The model's parameters and buffers, by name.
        sources: The checkpoint's tensors.
        trace: `trace_loader`, or `trace_once`.
    """
    groups = _groups(sources)
    later = {name for _, *others in groups for layer in others for name in layer.names.values()}
    traced = trace(load, parameters, {name: meta for name, meta in sources.items() if name not in later})
    if not later:
        return traced
    looked_at = [name for first, *_ in groups for name in first.names.values()]
    looked_at += (
        name for _, *others in groups for turn, layer in enumerate(others) for name in layer.one_of_each(turn)
    )
    seen = _look(load, parameters, {name: sources[name] for name in looked_at})
    copies_of = _copies_of(traced)
    found: list[Copy] = list(traced.copies)
    unlike: dict[str, TensorMeta] = {}
    for first, *others in groups:
        for layer in others:
            copies = _copied(first, layer, copies_of, seen)
            if copies is None:
                unlike |= {name: sources[name] for name in layer.names.values()}
            else:
                found += copies
    rest = trace(load, parameters, unlike) if unlike else Traced(copies=())
    return Traced(
        copies=(*found, *rest.copies),
        computed=(*traced.computed, *rest.computed),
        objections=(*traced.objections, *rest.objections),
    )


def _copies_of(traced: Traced) -> Callable[[str], list[Copy] | None]:
    """Return a function that gives a checkpoint tensor's copies, or None if the loader does anything but copy it."""
    copies: dict[str, list[Copy]] = {}
    for copy in traced.copies:
        copies.setdefault(copy.source, []).append(copy)
    bases = {base.name for each in traced.computed for base in each.recipe.bases()}
    others = bases.union(objection.source for objection in traced.objections)
    return lambda source: None if source in others else copies.get(source, [])


def _groups(sources: Mapping[str, TensorMeta]) -> list[list[_Layer]]:
    """Group layers with the same experts and shapes."""
    layers: dict[str, _Layer] = {}
    for name in sources:
        found = _EXPERT.match(name)
        if found is not None:
            prefix, expert, rest = found.groups()
            layers.setdefault(prefix, _Layer()).names[int(expert), rest] = name
    groups: dict[object, list[_Layer]] = {}
    for prefix, layer in layers.items():
        if len({expert for expert, _ in layer.names}) >= _MIN_EXPERTS:
            held = frozenset((key, sources[name]) for key, name in layer.names.items())
            groups.setdefault((_NUMBER.sub(".*.", prefix), held), []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records plain copies into parameters, and writes to none of them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters: dict[int, str] = {}
        for name, tensor in parameters.items():
            self._parameters.setdefault(storage_of(tensor), name)
        self.copies: list[tuple[int, str, tuple[object, ...]]] = []
        """The storage that is read, the parameter that is written, and the layouts of both."""
        self.changed: set[int | str] = set()
        """Storages and parameters that were changed in another way."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping dynamo out costs as much as an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record a write."""
        if not _writes(func):
            # What calling `func` does, in half the time.
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        into = args[0]
        name = self._parameters.get(storage_of(into))
        if name is None:
            self.changed.add(storage_of(into))
            return func(*args, **(kwargs or {}))
        if func is aten.copy_.default:
            read = args[1]
            layouts = (
                into.storage_offset(),
                into.shape,
                into.stride(),
                read.storage_offset(),
                read.shape,
                read.stride(),
            )
            self.copies.append((storage_of(read), name, layouts))
        else:
            self.changed.add(name)
        return into


@by_operation
def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _look(load: Load, parameters: Mapping[str, Tensor], sources: Mapping[str, TensorMeta]) -> Seen:
    """Return each tensor's plain copies: none if the loader does anything else with it. Empty if the loader fails."""
    given = [(name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")) for name, meta in sources.items()]
    look = _Look(parameters)
    try:
        with torch.no_grad(), look:
            load(iter(given))
    except Exception:  # noqa: BLE001 - a loader may raise anything; tracing the layers whole reports it
        return {}
    names = {storage_of(tensor): name for name, tensor in given}
    changed = look.changed | {parameter for read, parameter, _ in look.copies if read not in names}
    seen: dict[str, list[tuple[str, tuple[object, ...]]]] = {name: [] for name in sources}
    for read, parameter, layouts in look.copies:
        if read in names and not {read, parameter} & changed:
            seen[names[read]].append((parameter, layouts))
    return seen


def _copied(
    first: _Layer, layer: _Layer, copies_of: Callable[[str], list[Copy] | None], seen: Seen
) -> list[Copy] | None:
    """Rename the first layer's copies for another layer; None if tensors go to different places there."""
    renamed: dict[str, str] = {}
    copies = [(copies_of(first.names[key]), first.names[key], name) for key, name in layer.names.items()]
    for model, of_first, name in copies:
        if model is None or of_first not in seen:
            return None
        if name not in seen:
            continue
        if not len(model) == len(seen[of_first]) == len(seen[name]):
            return None
        for (a, a_layouts), (b, b_layouts) in zip(seen[of_first], seen[name], strict=True):
            if a_layouts != b_layouts or renamed.setdefault(a, b) != b:
                return None
    parameters = {copy.parameter for model, *_ in copies for copy in model or ()}
    if renamed.keys() != parameters or len(set(renamed.values())) != len(renamed):
        return None
    return [
        Copy(renamed[copy.parameter], copy.into, name, copy.start, copy.runs)
        for model, _, name in copies
        for copy in model or ()
    ]
