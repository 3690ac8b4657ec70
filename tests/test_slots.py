import torch
from torch import nn

from fp8refit.slots import Slot, live_tensors


def make_module() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_buffer("table", torch.zeros(2))
    module.register_buffer("absent", None)
    return nn.Sequential(module)


def moved(live) -> list[str]:
    return [tensor.name for tensor in live if tensor.has_moved]


def test_live_tensors_are_parameters_and_buffers():
    assert [live.name for live in live_tensors(make_module())] == ["0.weight", "0.bias", "0.table"]


def test_tied_tensors_are_listed_under_each_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert [live.name for live in live_tensors(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_writing_in_place_moves_nothing():
    model = make_module()
    live = live_tensors(model)
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert moved(live) == []


def test_a_replaced_parameter_has_moved():
    model = make_module()
    live = live_tensors(model)
    model[0].weight = nn.Parameter(model[0].weight.detach())
    assert moved(live) == ["0.weight"]


def test_a_deleted_buffer_has_moved():
    model = make_module()
    live = live_tensors(model)
    del model[0].table
    assert moved(live) == ["0.table"]


def test_other_storage_has_moved():
    model = make_module()
    live = live_tensors(model)
    model[0].bias.data = model[0].bias.data.clone()
    assert moved(live) == ["0.bias"]


def test_another_layout_has_moved():
    model = make_module()
    live = live_tensors(model)
    model[0].weight.data = model[0].weight.data.t()
    assert moved(live) == ["0.weight"]


def test_a_slot_without_offset_begins_at_the_origin():
    assert Slot(name="w", full_shape=(4, 4), weight=torch.zeros(4, 4)).origin == (0, 0)
    assert Slot(name="w", full_shape=(4, 4), weight=torch.zeros(2, 4), offset=(2, 0)).origin == (2, 0)
