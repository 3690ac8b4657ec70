"""Traces models with many experts faster: one layer shows where a loader puts the tensors of all similar layers.

Only the first of several similar layers is traced whole. Of each later layer, the loader gets all tensors of one expert that
this rank holds, and one tensor of each other expert, a different one in each layer. Its plain copies of them are compared with
those of the first layer. If they match, so does the rest of the layer, because a loader keeps an expert's tensors together.
Otherwise the layer is traced whole.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.records import Copy, Traced
from fp8refit.tracing.trace import Load, trace_loader

Run: TypeAlias = Callable[[Load, Mapping[str, Tensor], Mapping[str, TensorMeta]], Traced]
_EXPERT = re.compile(r"^(.*\.\d+\..*\.)(\d+)(\.[^\d.][^.]*(?:\.[^\d.][^.]*)*)$")
"""A layer, one of its experts, and a tensor of that expert."""
_NUMBER = re.compile(r"\.\d+\.")
_MIN_EXPERTS = 8
"""With fewer experts, every layer is traced whole."""
_Layer: TypeAlias = dict[tuple[int, str], str]
"""The checkpoint names of one layer's experts, by expert and tensor."""


def trace_similar(
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
    later = {name for _, *others in groups for layer in others for name in layer.values()}
    traced = trace(load, parameters, {name: meta for name, meta in sources.items() if name not in later})
    if not later:
        return traced
    copies_of = _copies_of(traced)
    looked_at: dict[str, TensorMeta] = {}
    for first, *others in groups:
        whole = next((expert for (expert, _), name in first.items() if copies_of(name)), None)
        for turn, layer in enumerate(others):
            looked_at |= {name: sources[name] for name in _some_of_each(layer, turn, whole)}
    looked = trace(load, parameters, looked_at)
    copies_seen = _copies_of(looked)
    found: list[Copy] = list(traced.copies)
    casts, unlike = traced.casts | looked.casts, dict[str, TensorMeta]()
    for first, *others in groups:
        for layer in others:
            copies = _copied(first, layer, copies_of, {n: copies_seen(n) for n in layer.values() if n in looked_at})
            if copies is None:
                unlike |= {name: sources[name] for name in layer.values()}
            else:
                found += copies
                names = {first[key]: name for key, name in layer.items()} if traced.casts else {}
                casts |= {(names[name], dtype) for name, dtype in traced.casts if name in names}
    rest = trace(load, parameters, unlike) if unlike else Traced(copies=())
    return replace(traced, copies=tuple(found), casts=casts).with_all([rest])


def _copies_of(traced: Traced) -> Callable[[str], list[Copy] | None]:
    """Return a function that gives a checkpoint tensor's copies, or None if the loader does anything but copy it."""
    copies: dict[str, list[Copy]] = {}
    others = {base.name for each in traced.computed for base in each.recipe.bases()}
    others |= {objection.source for objection in traced.objections}
    changed = {each.parameter for each in traced.computed} | {each.parameter for each in traced.objections}
    for copy in traced.copies:
        copies.setdefault(copy.source, []).append(copy)
        if copy.parameter in changed:
            others.add(copy.source)
    return lambda source: None if source in others else copies.get(source, [])


def _some_of_each(layer: _Layer, turn: int, whole: int | None) -> Iterator[str]:
    """Yield the names of all tensors of the expert `whole`, and of one of each other expert. `turn` decides which one."""
    held: dict[int, list[str]] = {}
    for (expert, _), name in layer.items():
        held.setdefault(expert, []).append(name)
    for expert, names in held.items():
        yield from names if expert == whole else [names[(expert + turn) % len(names)]]


def _groups(sources: Mapping[str, TensorMeta]) -> list[list[_Layer]]:
    """Group layers with the same experts and shapes."""
    layers: dict[str, _Layer] = {}
    for name in sources:
        found = _EXPERT.match(name)
        if found is not None:
            prefix, expert, rest = found.groups()
            layers.setdefault(prefix, {})[int(expert), rest] = name
    groups: dict[object, list[_Layer]] = {}
    for prefix, layer in layers.items():
        if len({expert for expert, _ in layer}) >= _MIN_EXPERTS:
            held = frozenset((key, sources[name]) for key, name in layer.items())
            groups.setdefault((_NUMBER.sub(".*.", prefix), held), []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


def _copied(
    first: _Layer,
    layer: _Layer,
    copies_of: Callable[[str], list[Copy] | None],
    seen: Mapping[str, list[Copy] | None],
) -> list[Copy] | None:
    """Rename the first layer's copies for another layer; None if tensors go to different places there."""
    renamed: dict[str, str] = {}
    copies = [(copies_of(first[key]), name) for key, name in layer.items()]
    for model, name in copies:
        found = seen.get(name, model)
        if model is None or found is None or len(found) != len(model):
            return None
        for a, b in zip(model, found, strict=True) if name in seen else ():
            if (a.into, a.start, a.runs) != (b.into, b.start, b.runs):
                return None
            if renamed.setdefault(a.parameter, b.parameter) != b.parameter:
                return None
    parameters = {copy.parameter for model, _ in copies for copy in model or ()}
    if renamed.keys() != parameters or len(set(renamed.values())) != len(renamed):
        return None
    return [
        copy._replace(parameter=renamed[copy.parameter], source=name) for model, name in copies for copy in model or ()
    ]
