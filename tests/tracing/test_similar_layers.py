"""Layers of experts of which one is traced whole, against a trace of every tensor."""

import pytest
import torch
from torch import nn

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.similar_layers import trace_similar
from fp8refit.tracing.trace import trace_loader, trace_once

NUM_EXPERTS, ROWS, COLS = 16, 4, 8
LEAVES = ("gate_proj", "up_proj", "down_proj")
WHOLE, LOOKED_AT = NUM_EXPERTS * len(LEAVES), NUM_EXPERTS + len(LEAVES) - 1
"""How many tensors are traced of the first layer, or of one that differs; and of a layer like the first."""


class Experts(nn.Module):
    def __init__(self, places: list[int], rows: int) -> None:
        super().__init__()
        self.places, self.rows = places, rows
        num_local = 1 + max(places)
        self.w13 = nn.Parameter(torch.empty(num_local, 2 * rows, COLS, device="meta"))
        self.w2 = nn.Parameter(torch.empty(num_local, COLS, rows, device="meta"))
        self.register_buffer("expert_map", torch.tensor(places))

    def load(self, expert: int, leaf: str, tensor: torch.Tensor) -> None:
        place = self.places[expert]
        if place < 0:
            return
        if leaf == "down_proj":
            self.w2.data[place].copy_(tensor)
        else:
            self.w13.data[place].narrow(0, self.rows * (leaf == "up_proj"), self.rows).copy_(tensor)


class Model(nn.Module):
    """Remembers which names its loader was given."""

    def __init__(self, places: list[list[int]], rows: int = ROWS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(of_layer, rows) for of_layer in places)
        self.norm = nn.Parameter(torch.empty(8, device="meta"))
        self.given: list[str] = []

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            self.given.append(name)
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                _, layer, _, expert, leaf, _ = name.split(".")
                self.layers[int(layer)].load(int(expert), leaf, tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def sources(self) -> dict[str, TensorMeta]:
        found = {"norm": TensorMeta(shape=(8,), dtype=torch.bfloat16)}
        for index, layer in enumerate(self.layers):
            for expert in range(len(layer.places)):
                for leaf in LEAVES:
                    shape = (COLS, layer.rows) if leaf == "down_proj" else (layer.rows, COLS)
                    name = f"layers.{index}.experts.{expert}.{leaf}.weight"
                    found[name] = TensorMeta(shape=shape, dtype=torch.bfloat16)
        return found


def both(places):
    """A trace of some, a trace of all, and how many names of each layer the first traced."""
    model = Model(places)
    traced = []

    def trace(load, parameters, sources):
        traced.extend(sources)
        return trace_loader(load, parameters, sources)

    found = trace_similar(model.load_weights, model.tensors(), model.sources(), trace)
    num_traced = [sum(name.startswith(f"layers.{layer}.") for name in traced) for layer in range(len(places))]
    return found, trace_loader(model.load_weights, model.tensors(), model.sources()), num_traced


ALL = list(range(NUM_EXPERTS))
SECOND_HALF = [-1] * 8 + list(range(8))
IN_TURN = [expert // 2 if expert % 2 else -1 for expert in ALL]


@pytest.mark.parametrize("places", [ALL, ALL[::-1], SECOND_HALF, IN_TURN])
def test_layers_that_are_alike_go_where_the_first_goes_which_alone_is_traced(places):
    found, expected, num_traced = both([places] * 8)
    assert set(found.copies) == set(expected.copies)
    assert len(found.copies) == len(expected.copies)
    assert found.objections == expected.objections == ()
    assert num_traced == [WHOLE] + [LOOKED_AT] * 7


@pytest.mark.parametrize("other", [ALL[::-1], [*ALL[1:], 0], [*ALL[:7], 8, 7, *ALL[9:]], SECOND_HALF])
def test_a_layer_that_places_its_experts_otherwise_is_traced_whole(other):
    found, expected, num_traced = both([ALL, ALL, other, ALL])
    assert set(found.copies) == set(expected.copies)
    assert num_traced == [WHOLE, LOOKED_AT, WHOLE + LOOKED_AT, LOOKED_AT]


@pytest.mark.parametrize("first", range(NUM_EXPERTS))
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_two_experts_that_change_places_in_one_later_layer_are_noticed_wherever_they_are(layer, first):
    second = (first + 5) % NUM_EXPERTS
    swapped = {first: second, second: first}
    found, expected, num_traced = both([[swapped.get(e, e) if each == layer else e for e in ALL] for each in range(4)])
    assert set(found.copies) == set(expected.copies)
    assert num_traced[layer] > LOOKED_AT


@pytest.mark.parametrize("change", ["the parameter", "the source"])
def test_what_a_loader_changes_in_place_in_one_later_layer_is_traced_there(change):
    model = Model([ALL] * 3)
    plain = model.load_weights

    def load(tensors):
        for name, tensor in tensors:
            if change == "the source" and name.startswith("layers.2.experts.5."):
                tensor.mul_(2)
            plain([(name, tensor)])
            if change == "the parameter" and name.startswith("layers.2.experts.5."):
                model.layers[2].w13.data[5].mul_(2)

    found = trace_similar(load, model.tensors(), model.sources())
    expected = trace_loader(load, model.tensors(), model.sources())
    assert len(found.computed) == len(expected.computed) == 3
    assert set(found.copies) == set(expected.copies)


def test_what_a_loader_does_not_merely_copy_is_traced_in_every_layer():
    model = Model([ALL] * 3)
    plain = model.load_weights

    def load(tensors):
        plain((name, tensor * 2 if ".5.up_proj" in name else tensor) for name, tensor in tensors)

    found = trace_similar(load, model.tensors(), model.sources())
    assert len(found.computed) == 3
    assert set(found.copies) == set(trace_loader(load, model.tensors(), model.sources()).copies)


def test_a_name_that_ends_the_loader_is_told_in_every_layer():
    model = Model([ALL] * 3)
    plain = model.load_weights

    def load(tensors):
        for name, tensor in tensors:
            if ".5.up_proj" in name:
                raise KeyError(name)
            plain([(name, tensor)])

    found = trace_similar(load, model.tensors(), model.sources())
    assert {objection.source for objection in found.objections} == {
        f"layers.{layer}.experts.5.up_proj.weight" for layer in range(3)
    }
    with pytest.raises(KeyError):
        trace_similar(load, model.tensors(), model.sources(), trace_once)


def test_layers_of_another_shape_are_models_of_their_own():
    model = Model([ALL] * 4)
    for index in (2, 3):
        model.layers[index] = Experts(ALL, 2 * ROWS)
    found = trace_similar(model.load_weights, model.tensors(), model.sources())
    assert set(found.copies) == set(trace_loader(model.load_weights, model.tensors(), model.sources()).copies)
