"""Derives what a checkpoint holds for many similar layers from two of them, because transformers converts tensors one by one.

This assumes that a conversion depends on a tensor's name and shape, not on which layer it is in. If a model saves one layer
differently, its loader raises for a name or leaves a parameter unfilled. Then the engine is refused, and nothing is written.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.records import Copy

_LAYER = re.compile(r"^(.*?\.)(\d+)(\..+)$")
"""What comes before a layer's number, the number, and a tensor of that layer."""


class Saved(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    meta: TensorMeta
    places: Copy | None
    """Where its elements come from; None if that is not known, or not one tensor. See `Trace.places_of`."""


def save_alike(
    state: Mapping[str, Tensor],
    save: Callable[[Mapping[str, Tensor]], Sequence[Saved]],
    *,
    key: Callable[[str], Any] = str,
) -> list[Saved] | None:
    """Return what `save` returns for a whole state dict, from what it returns for two layers of each kind.

    Args:
        state: The state dict.
        save: Converts a state dict to a checkpoint, tensor by tensor: in the given order, or sorted by `key`.
        key: See `save`.

    Returns:
        None if no layer can be left out, or if two layers do not show how others are saved.
    """
    kinds: dict[object, dict[int, str]] = {}
    kept: set[tuple[str, int]] = set()
    for name, tensor in state.items():
        if (found := _LAYER.match(name)) is not None:
            prefix, number, rest = found[1], int(found[2]), found[3]
            names = kinds.setdefault((prefix, rest, tensor.shape, tensor.dtype), {})
            names[number] = name
            if len(names) <= 2:
                kept.add((prefix, number))
    left_out = {name for name in state if (found := _LAYER.match(name)) and (found[1], int(found[2])) not in kept}
    if not left_out:
        return None
    saved = list(save({name: tensor for name, tensor in state.items() if name not in left_out}))
    num_told = len(saved)
    by_source: dict[str, list[Saved]] = {}
    for each in saved:
        if each.places is None:
            return None
        by_source.setdefault(each.places.source, []).append(each)
    for names in kinds.values():
        later = [(number, name) for number, name in names.items() if name in left_out]
        if later:
            first, second = list(names.items())[:2]
            parts = _in_common(by_source.get(first[1], ()), by_source.get(second[1], ()), first[0], second[0])
            if parts is None:
                return None
            saved += (
                Saved(str(number).join(pieces), meta, Copy("", places.into, name, places.start, places.runs))
                for number, name in later
                for pieces, meta, places in parts
            )
    return _in_order(saved, num_told, state, key) if len({each.name for each in saved}) == len(saved) else None


def _in_order(saved: Sequence[Saved], num_told: int, names: Iterable[str], key: Callable[[str], Any]) -> list[Saved]:
    """Sort the tensors as `save` would have, because some loaders depend on the order. The first `num_told` are from `save`."""
    places = {name: place for place, name in enumerate(names)}

    def place_of(each: Saved) -> int:
        return places[each.places.source] if each.places is not None else 0

    if any(place_of(a) > place_of(b) for a, b in pairwise(saved[:num_told])):
        places = {name: place for place, name in enumerate(sorted(places, key=key))}
    return sorted(saved, key=place_of)


def _in_common(
    first: Sequence[Saved], second: Sequence[Saved], a: int, b: int
) -> list[tuple[list[str], TensorMeta, Copy]] | None:
    """Return how a tensor of layers `a` and `b` is saved, as names without the layer's number; None if it differs."""
    if len(first) != len(second):
        return None
    parts = []
    for of_a, of_b in zip(first, second, strict=True):
        pieces = _around(of_a.name, of_b.name, str(a), str(b))
        if pieces is None or of_a.meta != of_b.meta or of_a.places is None or of_b.places is None:
            return None
        if of_a.places._replace(source="") != of_b.places._replace(source=""):
            return None
        parts.append((pieces, of_a.meta, of_a.places))
    return parts


def _around(first: str, second: str, a: str, b: str) -> list[str] | None:
    """Split a name where the first one has `a` and the second `b`; None if they differ otherwise, or not at all.

    >>> _around("layers.0.experts.0.up.weight", "layers.3.experts.0.up.weight", "0", "3")
    ['layers.', '.experts.0.up.weight']
    """
    ours, theirs = first.split("."), second.split(".")
    if len(ours) != len(theirs) or first == second:
        return None
    pieces: list[list[str]] = [[]]
    for one, other in zip(ours, theirs, strict=True):
        if one == other:
            pieces[-1].append(one)
        elif (one, other) == (a, b):
            pieces[-1].append("")
            pieces.append([""])
        else:
            return None
    return [".".join(piece) for piece in pieces]
