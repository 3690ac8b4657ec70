import torch
from torch import nn

from fp8refit.live.parameters import Watch, live_tensors


def make_module() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_buffer("table", torch.zeros(2))
    module.register_buffer("absent", None)
    return nn.Sequential(module)


def moved(watch: Watch) -> list[str]:
    names = watch.moved()
    assert names == [tensor.name for tensor in watch.live if tensor.has_moved]
    return names


def test_parameters_are_parameters_and_buffers():
    assert [live.name for live in live_tensors(make_module())] == ["0.weight", "0.bias", "0.table"]


def test_tied_tensors_are_listed_under_each_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert [live.name for live in live_tensors(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_writing_in_place_moves_nothing():
    model = make_module()
    watch = Watch(live_tensors(model))
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert moved(watch) == []


def test_a_replaced_parameter_has_moved():
    model = make_module()
    watch = Watch(live_tensors(model))
    model[0].weight = nn.Parameter(model[0].weight.detach())
    assert moved(watch) == ["0.weight"]


def test_a_deleted_buffer_has_moved():
    model = make_module()
    watch = Watch(live_tensors(model))
    del model[0].table
    assert moved(watch) == ["0.table"]


def test_other_storage_has_moved():
    model = make_module()
    watch = Watch(live_tensors(model))
    model[0].bias.data = model[0].bias.data.clone()
    assert moved(watch) == ["0.bias"]


def test_another_layout_has_moved():
    model = make_module()
    watch = Watch(live_tensors(model))
    model[0].weight.data = model[0].weight.data.t()
    assert moved(watch) == ["0.weight"]


def test_weights_that_the_engine_has_moved_from_one_tensor_to_another_have_moved():
    model, has_moved = make_module(), []
    watch = Watch(live_tensors(model), lambda: bool(has_moved), (model[0].weight,))
    assert not watch.was_any_replaced()
    assert watch.moved() == []
    has_moved.append(True)
    assert watch.was_any_replaced()
    assert watch.moved() == ["0.weight"]


def test_a_sample_is_the_same_after_weights_have_moved_and_another_after_others_were_written():
    model = make_module()
    watch = Watch(live_tensors(model), moving=(model[0].weight,))
    before = watch.sample()
    with torch.no_grad():
        model[0].weight.fill_(3)
        assert torch.equal(watch.sample(), before)
        model[0].bias.fill_(3)
        assert not torch.equal(watch.sample(), before)
