"""Layers of experts that are alike: a loader shows with one of them where it puts thousands of tensors.

Of every further layer only some experts are traced: those between which the first layer's lie evenly, and a few others. Where
they go to the same places, so do the rest; a layer of which one does not is traced whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.layers.trace import Copy, Load, Traced, trace_loader
from fp8refit.slots import TensorMeta

Run: TypeAlias = Callable[[Load, Mapping[str, Tensor], Mapping[str, TensorMeta]], Traced]
_EXPERT = re.compile(r"^(.*\.\d+\..*\.)(\d+)(\.[^\d.][^.]*(?:\.[^\d.][^.]*)*)$")
"""A layer, an expert of it, and one of that one's tensors."""
_NUMBER = re.compile(r"\.\d+\.")
_MIN_EXPERTS = 8
"""Fewer are traced in every layer."""
_NUM_PROBES = 3
"""Experts of every further layer that are traced beside those, other ones in each."""


@dataclass(kw_only=True, slots=True)
class _Layer:
    """Tensors of one layer's experts."""

    names: dict[tuple[int, str], str] = field(default_factory=dict)
    """Checkpoint names by expert and tensor."""


def trace_alike(
    load: Load, parameters: Mapping[str, Tensor], sources: Mapping[str, TensorMeta], trace: Run = trace_loader
) -> Traced:
    """What `trace` says of `sources`, in less time if many of them are experts'.

    Args:
        load: A model's `load_weights`.
        parameters: Of that model, its buffers too, by name.
        sources: The checkpoint's tensors.
        trace: `trace_loader`, or `trace_once`.
    """
    groups = _groups(sources)
    later = {name for _, *others in groups for layer in others for name in layer.names.values()}
    traced = trace(load, parameters, {name: meta for name, meta in sources.items() if name not in later})
    if not later:
        return traced
    asked: dict[str, TensorMeta] = {}
    of_first = _Places(traced)
    picked = [[*_picked(first, of_first, len(others))] for first, *others in groups]
    for (_, *others), keys in zip(groups, picked, strict=True):
        for layer, of_layer in zip(others, keys, strict=True):
            asked |= {layer.names[key]: sources[layer.names[key]] for key in of_layer}
    of_asked = _Places(trace(load, parameters, asked))
    found: list[Copy] = list(traced.copies)
    unlike: dict[str, TensorMeta] = {}
    for (first, *others), keys in zip(groups, picked, strict=True):
        for layer, of_layer in zip(others, keys, strict=True):
            renamed = _same_places(first, layer, of_layer, of_first, of_asked)
            if renamed is not None and all(_are_alike(parameters, *pair) for pair in renamed.items()):
                found += _copied(first, layer, renamed, of_first)
            else:
                unlike |= {name: sources[name] for name in layer.names.values()}
    rest = trace(load, parameters, unlike) if unlike else Traced(copies=())
    return Traced(
        copies=(*found, *rest.copies),
        computed=(*traced.computed, *rest.computed),
        objections=(*traced.objections, *rest.objections),
    )


class _Places:
    """Where a trace put every tensor that it copied and did nothing else with."""

    def __init__(self, traced: Traced) -> None:
        self._copies: dict[str, list[Copy]] = {}
        for copy in traced.copies:
            self._copies.setdefault(copy.source, []).append(copy)
        bases = {base.name for each in traced.computed for base in each.recipe.bases()}
        self._others = bases.union(objection.source for objection in traced.objections)
        written = [each.parameter for each in traced.computed]
        self._written = {*written, *(copy.parameter for copy in self._copies.get("", ()))}
        self._written |= {objection.parameter for objection in traced.objections}

    def of(self, source: str) -> list[Copy] | None:
        """The copies of a tensor; None if something else was done with it, or with a parameter that it is copied to."""
        copies = self._copies.get(source, [])
        is_plain = source not in self._others and all(copy.parameter not in self._written for copy in copies)
        return copies if is_plain else None


def _groups(sources: Mapping[str, TensorMeta]) -> list[list[_Layer]]:
    """Layers with the same experts, of the same shapes."""
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


def _picked(first: _Layer, places: _Places, num_others: int) -> Iterator[list[tuple[int, str]]]:
    """Experts' tensors that are traced of each further layer."""
    ends, every = _ends_of_stretches(first, places), sorted(first.names)
    step = max(1, len(every) // _NUM_PROBES)
    for index in range(num_others):
        yield [*dict.fromkeys([*ends, *every[index * 5 % step :: step]])]


def _ends_of_stretches(layer: _Layer, places: _Places) -> list[tuple[int, str]]:
    """Experts' tensors between which all others lie as far from each other as those two from their neighbours."""
    picked: list[tuple[int, str]] = []
    for rest in dict.fromkeys(rest for _, rest in layer.names):
        experts = sorted(expert for expert, held in layer.names if held == rest)
        steps = [_step(*(places.of(layer.names[e, rest]) for e in pair)) for pair in pairwise(experts)]
        is_end = [True, *(a is None or a != b for a, b in pairwise(steps)), True]
        picked += [(expert, rest) for expert, end in zip(experts, is_end, strict=True) if end]
    return picked


def _step(before: Sequence[Copy] | None, after: Sequence[Copy] | None) -> tuple[object, ...] | None:
    """How far two tensors' copies are from each other, if they differ in nothing else."""
    if before is None or after is None or len(before) != len(after):
        return None
    pairs = list(zip(before, after, strict=True))
    if any((a.parameter, a.start, a.runs) != (b.parameter, b.start, b.runs) for a, b in pairs):
        return None
    return tuple(b.into - a.into for a, b in pairs)


def _same_places(
    first: _Layer, layer: _Layer, keys: Iterable[tuple[int, str]], of_first: _Places, of_asked: _Places
) -> dict[str, str] | None:
    """Of the first layer's parameters, those that take their place in another; None if tensors go to other places there."""
    renamed: dict[str, str] = {}
    for key in keys:
        model, copies = of_first.of(first.names[key]), of_asked.of(layer.names[key])
        if model is None or copies is None or len(model) != len(copies):
            return None
        for a, b in zip(model, copies, strict=True):
            if (a.into, a.start, a.runs) != (b.into, b.start, b.runs):
                return None
            if renamed.setdefault(a.parameter, b.parameter) != b.parameter:
                return None
    return renamed if len(set(renamed.values())) == len(renamed) else None


def _are_alike(parameters: Mapping[str, Tensor], first: str, other: str) -> bool:
    """Whether two parameters have one form, and what lies beside them the same values: which experts a rank holds."""
    beside = [_beside(parameters, name) for name in (first, other)]
    if beside[0].keys() != beside[1].keys():
        return False
    for name, a in beside[0].items():
        b = beside[1][name]
        if (a.shape, a.dtype, a.stride(), a.is_meta) != (b.shape, b.dtype, b.stride(), b.is_meta):
            return False
        if not (a.is_meta or a.dtype.is_floating_point or torch.equal(a, b)):
            return False
    return True


def _beside(parameters: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = name.rpartition(".")[0] + "."
    return {other.removeprefix(prefix): tensor for other, tensor in parameters.items() if other.startswith(prefix)}


def _copied(first: _Layer, layer: _Layer, renamed: Mapping[str, str], places: _Places) -> list[Copy]:
    """The first layer's copies, as those of another."""
    return [
        Copy(parameter=renamed[copy.parameter], into=copy.into, source=name, start=copy.start, runs=copy.runs)
        for key, name in layer.names.items()
        for copy in places.of(first.names[key]) or ()
    ]
