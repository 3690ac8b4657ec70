"""Traces layers of experts faster: one layer shows where a loader puts the tensors of all similar layers.

In every further layer only a few experts are traced: those at the ends of evenly spaced stretches in the first layer, and
some others. If they go to the same places, so does the rest. Otherwise the whole layer is traced.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from fp8refit.live.slots import TensorMeta
from fp8refit.live.tracing.trace import Copy, Load, Traced, trace_loader

Run: TypeAlias = Callable[[Load, Mapping[str, Tensor], Mapping[str, TensorMeta]], Traced]
_EXPERT = re.compile(r"^(.*\.\d+\..*\.)(\d+)(\.[^\d.][^.]*(?:\.[^\d.][^.]*)*)$")
"""A layer, one of its experts, and a tensor of that expert."""
_NUMBER = re.compile(r"\.\d+\.")
_MIN_EXPERTS = 8
"""With fewer experts, every layer is traced whole."""
_NUM_PROBES = 3
"""Additional experts to trace in every further layer, different ones in each."""


@dataclass(kw_only=True, slots=True)
class _Layer:
    """The tensors of one layer's experts."""

    names: dict[tuple[int, str], str] = field(default_factory=dict)
    """Checkpoint names by expert and tensor."""


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
    """Where a trace put every tensor that it only copied."""

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
        """Return a tensor's copies; None if the loader did anything else with it or with a parameter it goes to."""
        copies = self._copies.get(source, [])
        is_plain = source not in self._others and all(copy.parameter not in self._written for copy in copies)
        return copies if is_plain else None


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


def _picked(first: _Layer, places: _Places, num_others: int) -> Iterator[list[tuple[int, str]]]:
    """Yield, for each further layer, the expert tensors to trace."""
    ends, every = _ends_of_stretches(first, places), sorted(first.names)
    step = max(1, len(every) // _NUM_PROBES)
    for index in range(num_others):
        yield [*dict.fromkeys([*ends, *every[index * 5 % step :: step]])]


def _ends_of_stretches(layer: _Layer, places: _Places) -> list[tuple[int, str]]:
    """Find the tensors between which all others are evenly spaced.

    If one tensor of an expert is such an end, all its tensors are: the first layer's loader may skip a tensor that
    another layer's loader reads.
    """
    ends: dict[int, None] = {}
    for rest in dict.fromkeys(rest for _, rest in layer.names):
        experts = sorted(expert for expert, held in layer.names if held == rest)
        steps = [_step(*(places.of(layer.names[e, rest]) for e in pair)) for pair in pairwise(experts)]
        is_end = [True, *(a is None or a != b for a, b in pairwise(steps)), True]
        ends |= dict.fromkeys(expert for expert, end in zip(experts, is_end, strict=True) if end)
    return [key for key in layer.names if key[0] in ends]


def _step(before: Sequence[Copy] | None, after: Sequence[Copy] | None) -> tuple[object, ...] | None:
    """Return how far the copies of two tensors are apart; None if they differ in anything else."""
    if before is None or after is None or len(before) != len(after):
        return None
    pairs = list(zip(before, after, strict=True))
    if any((a.parameter, a.start, a.runs) != (b.parameter, b.start, b.runs) for a, b in pairs):
        return None
    return tuple(b.into - a.into for a, b in pairs)


def _same_places(
    first: _Layer, layer: _Layer, keys: Iterable[tuple[int, str]], of_first: _Places, of_asked: _Places
) -> dict[str, str] | None:
    """Map the first layer's parameters to another's; None if tensors go to different places there."""
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
    """Whether two parameters have the same form and the tensors beside them the same values, such as which experts a rank
    holds.
    """
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
    """Rename the first layer's copies for another layer."""
    return [
        Copy(parameter=renamed[copy.parameter], into=copy.into, source=name, start=copy.start, runs=copy.runs)
        for key, name in layer.names.items()
        for copy in places.of(first.names[key]) or ()
    ]
