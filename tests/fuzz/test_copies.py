"""Modules that keep copies of weights wherever an object can keep a tensor, at any time: each is named, nothing else."""

import functools
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from fp8refit.live.copies import Copies, values_of
from fp8refit.live.slots import Inventory, Refresh, Slot

SIZE = 6


@dataclass
class Record:
    held: object


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def read(self) -> object:
        return self.held


def generator(held: object):
    while True:
        yield held


def started(held: object):
    steps = generator(held)
    next(steps)
    return steps


WRAPS = {
    "list": lambda held: [0, held],
    "tuple": lambda held: (held, "name"),
    "dict": lambda held: {("q", 1): held},
    "set": lambda held: {held} if isinstance(held, Tensor) else [held],
    "deque": lambda held: deque([held]),
    "dataclass": Record,
    "slots": Slotted,
    "namespace": lambda held: SimpleNamespace(held=held),
    "closure": lambda held: lambda: held,
    "default": lambda held: functools.partial(lambda x, y=held: y),
    "keyword": lambda held: functools.partial(print, sep=held),
    "bound method": lambda held: Slotted(held).read,
    "generator": started,
}
DERIVED = {
    "clone": torch.clone,
    "cast": Tensor.double,
    "joined": lambda weight: torch.cat([weight, weight]),
    "product": lambda weight: weight * weight,
    "transposed": lambda weight: weight.reshape(2, 3).t().contiguous(),
    "numpy": lambda weight: weight.clone().numpy(),
    "packed": lambda weight: weight.clone().view(torch.int32),
}
NEVER_STALE = {
    "view": lambda layer: layer.weight.detach()[1:4],
    "table": lambda layer: layer.table,
    "view of a table": lambda layer: layer.table[2:],
    "refreshed": lambda layer: layer.refreshed,
    "empty": lambda layer: torch.empty(0),
    "meta": lambda layer: torch.empty(3, device="meta"),
    "number": lambda layer: 0.5,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, SIZE))
        self.register_buffer("table", torch.arange(SIZE).float().cos(), persistent=False)
        self.register_buffer("zeros", torch.zeros(SIZE), persistent=False)
        self.register_buffer("stored", torch.full((SIZE,), 2.0))
        self.impl = SimpleNamespace(workspace=torch.ones(2, 2))
        self.refreshed = torch.zeros(SIZE)
        self.kv_cache = [torch.zeros(2)]


PLACES = {
    "attribute": lambda layer, name, held: setattr(layer, name, held),
    "impl": lambda layer, name, held: setattr(layer.impl, name, held),
    "of a weight": lambda layer, name, held: setattr(layer.weight, name, held),
    "hook": lambda layer, name, held: layer.register_forward_hook(functools.partial(print, held)),
}
BUFFERS = ("zeros", "stored", "table")


@st.composite
def actions(draw):
    layer = draw(st.integers(0, 1))
    kind = draw(st.sampled_from(["copy", "fill", "register", "decoy", "write the cache"]))
    wraps = draw(st.lists(st.sampled_from(sorted(WRAPS)), max_size=4))
    return (
        layer,
        kind,
        draw(st.sampled_from(sorted(DERIVED))),
        wraps,
        draw(st.sampled_from(sorted(PLACES))),
        draw(st.sampled_from(BUFFERS)),
        draw(st.sampled_from(sorted(NEVER_STALE))),
        draw(st.booleans()),
    )


@given(before=st.lists(actions(), max_size=3), after=st.lists(actions(), min_size=1, max_size=4))
def test_every_copy_is_named_and_nothing_else(before, after):
    torch.manual_seed(0)
    model = nn.ModuleList([Layer(), Layer()])
    for layer in model:
        layer.weight.data.normal_()
    slots = [Slot(name=str(i), full_shape=(SIZE,), weight=layer.weight.data) for i, layer in enumerate(model)]
    refreshes = [Refresh(name="copy", run=lambda: None, written=(layer.refreshed,)) for layer in model]
    copies = Copies(
        model,
        Inventory(slots=tuple(slots), refreshes=tuple(refreshes)),
        built=values_of(nn.ModuleList([Layer(), Layer()])),
        kept=lambda module: ("kv_cache",) if isinstance(module, Layer) else (),
    )
    stale: list[str] = []
    for number, action in enumerate(before):
        stale += take(model, number, action)
    check(copies, stale)
    for number, action in enumerate(after, start=len(before)):
        stale += take(model, number, action)
        check(copies, stale)


def take(model: nn.ModuleList, number: int, action: tuple) -> list[str]:
    """Do one thing to a layer, and return what is stale after the next refit because of it: module and attribute."""
    index, kind, derived, wraps, place, buffer, decoy, is_persistent = action
    layer, name = model[index], f"held_{number}"
    held = DERIVED[derived](layer.weight.detach())
    if kind == "write the cache":
        layer.kv_cache[0] = torch.rand(2)
        return []
    if kind == "fill":  # a view of a table that is filled is stale too, and hard to name
        buffer = buffer if buffer != "table" else "zeros"
        layer.get_buffer(buffer).copy_(layer.weight.detach() * (number + 2))
        return [f"{index} {buffer}"]
    if kind == "register":
        layer.register_buffer(name, held if isinstance(held, Tensor) else torch.as_tensor(held), is_persistent)
        return [f"{index} {name}"]
    held = NEVER_STALE[decoy](layer) if kind == "decoy" else held
    for wrap in wraps:
        held = WRAPS[wrap](held)
    PLACES[place](layer, name, held)
    if kind == "decoy":
        return []
    return [f"{index} {'_forward_hooks' if place == 'hook' else name}"]


def check(copies: Copies, stale: list[str]) -> None:
    named = []
    for refusal in copies.refusals(True):
        path = refusal.reason.split("`")[1]
        first, _, rest = path.partition(".")
        key = rest if first in ("impl", "weight") and rest else path
        named.append(f"{refusal.module} {key.partition('[')[0].partition('.')[0]}")
    # Many hooks are in one attribute, and a buffer that is filled twice is one tensor.
    assert set(named) == set(stale)
    assert all(count == 1 or name.endswith("_forward_hooks") for name, count in Counter(named).items())
