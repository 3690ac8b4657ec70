"""Wherever a module or a helper keeps a tensor, it is found, and found anew when it changes."""

import functools
from collections import deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fp8refit.live.held import Holdings

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    tensor: object


class Slotted:
    __slots__ = ("tensor",)


class Attention(nn.Module):
    kept: ClassVar = {}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.zeros(2))
        self.impl = SimpleNamespace(scale=2.0)
        self.slotted = Slotted()

    @functools.lru_cache  # noqa: B019 - what engines do
    def joined(self) -> torch.Tensor:
        return self.weight + 1

    def remember(self, memory=[]) -> None:  # noqa: B006
        memory.append(self.weight + 1)


@pytest.fixture(autouse=True)
def nothing_is_cached():
    yield
    Attention.joined.cache_clear()
    Attention.remember.__defaults__[0].clear()


def fresh() -> torch.Tensor:
    return torch.ones(3)


def closure():
    tensor = fresh()
    return lambda: tensor


def generator():
    tensor = fresh()
    while True:
        yield tensor


def bound():
    record = Record(fresh())
    return SimpleNamespace(call=record.__eq__)


def started():
    steps = generator()
    next(steps)
    return steps


WAYS = {
    "attribute": lambda layer: setattr(layer, "copy", fresh()),
    "list": lambda layer: setattr(layer, "copy", [1, [fresh()]]),
    "dict": lambda layer: setattr(layer, "copy", {("q", "k"): fresh()}),
    "set": lambda layer: setattr(layer, "copy", {fresh()}),
    "deque": lambda layer: setattr(layer, "copy", deque([fresh()])),
    "named tuple": lambda layer: setattr(layer, "copy", Pair(1, fresh())),
    "dataclass": lambda layer: setattr(layer, "copy", Record(fresh())),
    "impl": lambda layer: setattr(layer.impl, "copy", fresh()),
    "slot": lambda layer: setattr(layer.slotted, "tensor", fresh()),
    "closure": lambda layer: setattr(layer, "copy", closure()),
    "partial": lambda layer: setattr(layer, "copy", functools.partial(max, fresh())),
    "bound method": lambda layer: setattr(layer, "copy", bound()),
    "generator": lambda layer: setattr(layer, "copy", started()),
    "default argument": lambda layer: layer.remember(),
    "cached method": lambda layer: layer.joined(),
    "class": lambda layer: layer.kept.update(copy=fresh()),
    "class attribute": lambda layer: setattr(Attention, "shared", fresh()),
    "late buffer": lambda layer: layer.register_buffer("copy", fresh(), persistent=False),
    "late parameter": lambda layer: layer.register_parameter("copy", nn.Parameter(fresh())),
    "late module": lambda layer: layer.add_module("copy", nn.LayerNorm(2, bias=False)),
    "module that is not registered": lambda layer: layer.impl.__dict__.update(copy=nn.LayerNorm(2, bias=False)),
    "attribute of a parameter": lambda layer: setattr(layer.weight, "copy", fresh()),
    "hook": lambda layer: layer.register_forward_hook(functools.partial(print, fresh())),
    "array of numpy": lambda layer: setattr(layer, "copy", fresh().numpy()),
    "replaced buffer": lambda layer: setattr(layer, "table", fresh()),
}


def names(found) -> list[str]:
    return sorted(held.name for held in found)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_appears_is_noticed_and_found(way, monkeypatch):
    monkeypatch.setattr(Attention, "kept", {})
    monkeypatch.setattr(Attention, "shared", None, raising=False)
    model = nn.Sequential(nn.Linear(2, 2), Attention())
    holdings = Holdings(model)
    assert holdings.have_changed()
    before = {id(held.tensor): held for held in holdings.search()}
    assert not holdings.have_changed()
    WAYS[way](model[1])
    assert holdings.have_changed()
    (new,) = [held for held in holdings.search() if id(held.tensor) not in before]
    assert new.name.startswith("1.")
    assert len(new.path) > 2
    assert not holdings.have_changed()


@pytest.mark.parametrize(("place", "is_seen"), [(0, True), (1, False), (2, True), (3, False)])
def test_a_glance_sees_one_of_several_layers_that_are_alike(place, is_seen):
    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention(), nn.Linear(2, 2), nn.Linear(2, 2)])})
    holdings = Holdings(model)
    assert holdings.have_changed(at_a_glance=True)
    holdings.search()
    assert not holdings.have_changed(at_a_glance=True)
    model["layers"][place].copy = fresh()
    assert holdings.have_changed(at_a_glance=True) is is_seen
    assert holdings.have_changed()


def test_what_a_helper_of_a_module_keeps_may_be_left_out():
    model = nn.Sequential(Attention())
    model[0].impl = SimpleNamespace(own=Record(fresh()), other=fresh())
    found = Holdings(model, lambda module: ["impl.own", "impl.absent.own", "absent.own"]).search()
    assert names(found) == ["0.impl.other", "0.table", "0.weight"]


def test_paths_name_the_way():
    layer = Attention()
    layer.impl.sinks, layer.copies, layer.call = fresh(), {"q": [fresh()]}, closure()
    found = names(Holdings(nn.ModuleDict({"attn": layer})).search())
    assert found == ["attn.call.tensor", "attn.copies['q'][0]", "attn.impl.sinks", "attn.table", "attn.weight"]


def test_numbers_that_change_are_no_change():
    layer = Attention()
    layer.count, layer.name = 1, "first"
    holdings = Holdings(layer)
    holdings.search()
    layer.count, layer.name, layer.impl.scale = 123456, "second", 0.5
    assert not holdings.have_changed()


def test_a_tensor_in_another_ones_place_is_noticed():
    layer = Attention()
    holdings = Holdings(layer)
    for _ in range(50):  # sooner or later one object has the identity of the last
        layer.copy = None
        layer.copy = fresh()
        assert holdings.have_changed()
        holdings.search()


def test_what_is_kept_apart_is_not_searched():
    layer = Attention()
    layer.kv_cache = [fresh()]
    assert names(Holdings(layer, lambda _: ("kv_cache", "table")).search()) == ["weight"]


def test_no_tensor_is_kept_alive():
    layer = Attention()
    layer.copy = fresh()
    found = Holdings(layer).search()
    holdings = Holdings(layer)
    holdings.search()
    import weakref

    gone = weakref.ref(next(held.tensor for held in found if held.name == "copy"))
    del found, layer.copy
    assert gone() is None
    assert holdings.have_changed()


def test_modules_of_python_are_not_walked_into():
    layer = Attention()
    layer.function = fresh  # its variables hold every name of this file
    layer.module = torch
    assert names(Holdings(layer).search()) == ["table", "weight"]


@pytest.mark.parametrize(
    ("place", "is_found"), [("fp8refit.driver.drop_in", False), ("fp8refit_vllm", False), ("other", True)]
)
def test_what_fp8refit_attached_is_left_out(place, is_found):
    space = {"__name__": place, "wraps": functools.wraps}
    exec("def wrapped(call, kept):\n    return wraps(call)(lambda: kept)\nclass Helper:\n    pass", space)
    model, helper = nn.Module(), space["Helper"]()
    model.load_weights = space["wrapped"](functools.wraps, torch.ones(2))
    model.helper, helper.kept = helper, torch.ones(3)
    assert len(Holdings(model).search()) == 2 * is_found


class Backend:
    """Keeps what it was given, and what its code puts out, as vLLM's keeps that of CUDA graphs."""

    def __init__(self) -> None:
        self.kept = []

    def __call__(self, graph, inputs):
        def run(*given):
            out = graph(*given)
            self.kept += [each.clone() for each in (*given, *out)]
            return out

        return run


def test_what_a_compiler_keeps_is_left_out_and_what_the_function_keeps_is_found():
    model, table = Attention(), torch.ones(2)

    def forward(x):
        return x + model.weight * table

    model.compiled = torch.compile(forward, backend=Backend())
    holdings = Holdings(model)
    assert "compiled.fn.table" in [name.removeprefix(".") for name in names(holdings.search())]
    before = names(holdings.search())
    model.compiled(torch.ones(2))
    assert names(holdings.search()) == before
