"""Finds which layers of a model are alike: the loader does the same with them, and the live model keeps them alike."""

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fp8refit.live.slots import Slot
from fp8refit.tracing.reading import twin_name
from fp8refit.tracing.records import Recipe, View
from fp8refit.tracing.stored import own_tensors
from fp8refit.tracing.twin import Twin

_LAYER = re.compile(r"^((?:.*?\.)??)(\d+)\.(.+)$")


class Place(NamedTuple):
    """A tensor or module of a layer."""

    stack: str
    """What comes before the layer's number in its name, such as `model.layers.`; empty in no layer."""
    number: int
    """The layer's number; -1 in no layer."""
    rest: str

    @classmethod
    def of(cls, name: str) -> "Place":
        """Return the place of a tensor."""
        found = _LAYER.match(name)
        return cls("", -1, name) if found is None else cls(found[1], int(found[2]), found[3])

    def seen_from(self, other: "Place") -> Hashable:
        """The place as its layer's own tensors see it: the same for the same tensors of each layer."""
        return self.stack, self.number - other.number if self.number >= 0 else -1, self.number < 0, self.rest


def kinds_of(model: nn.Module, twin: Twin, slots: Sequence[Slot]) -> dict[Hashable, list[str]]:
    """Return the names of the twin's tensors in the first layer of each kind, and of those in no layer.

    Args:
        model: The live model.
        twin: Its twin.
        slots: What was read of the live model.
    """
    loaded = _loaded(twin)
    live = {
        twin_name(prefix, name): (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, tensor in own_tensors(module)
    }
    facts: dict[tuple[str, int], list[Hashable]] = {}
    names: dict[tuple[str, int], list[str]] = {}
    for name, meta in twin.tensors.items():
        place, first = Place.of(name), twin.firsts[name]
        # Rotary tables are shared by all layers, and filled by none.
        shared = Place.of(first).seen_from(place) if first in loaded else None
        fact = (place.rest, meta, live.get(name), name in twin.replaced, shared, frozenset(loaded.get(name, ())))
        facts.setdefault(place[:2], []).append(fact)
        names.setdefault(place[:2], []).append(name)
    for slot in {slot.module: slot for slot in slots}.values():
        place = Place.of(f"{slot.module}.")
        facts.setdefault(place[:2], []).append((place.rest, slot.kernel, slot.format))
    for prefix, module in model.named_modules(remove_duplicate=False):
        place = Place.of(f"{prefix}.")
        facts.setdefault(place[:2], []).append((place.rest, type(module)))
    kinds: dict[Hashable, list[str]] = {}
    for layer, held in names.items():
        kinds.setdefault((layer[0], layer[1] < 0, tuple(facts[layer])), held)
    return kinds


def _loaded(twin: Twin) -> dict[str, list[Hashable]]:
    """Return what the loader did with each of the twin's tensors."""
    loaded: dict[str, list[Hashable]] = {}
    places: dict[str, Place] = {name: Place.of(name) for name in twin.tensors}
    casts: dict[str, set[torch.dtype]] = {}
    for name, dtype in twin.traced.casts:
        casts.setdefault(name, set()).add(dtype)
    for copy in twin.traced.copies:
        source = Place.of(copy.source).seen_from(places[copy.parameter])
        told = source, copy.into, copy.start, copy.runs, frozenset(casts.get(copy.source, ()))
        loaded.setdefault(copy.parameter, []).append(told)
    for computed in twin.traced.computed:
        place = places[computed.parameter]
        made = computed.into.into, computed.into.runs, _told(computed.value, place)
        loaded.setdefault(computed.parameter, []).append(made)
    for objection in twin.traced.objections:
        if objection.parameter:
            loaded.setdefault(objection.parameter, []).append(objection.reason)
    return loaded


def _told(view: View, place: Place) -> str:
    """Describe a computation, as a tensor of the layer at `place` sees it."""
    base = view.base
    if not isinstance(base, Recipe):
        made_of: object = base.is_parameter, Place.of(base.name).seen_from(place)
    else:
        args, kwargs = tree_map_only(View, lambda each: _told(each, place), (base.args, dict(base.kwargs)))
        args, kwargs = tree_map_only(Tensor, lambda tensor: (tensor.dtype, tensor.tolist()), (args, kwargs))
        made_of = base.func, args, kwargs
    return repr((view.size, view.stride, view.offset, made_of))
