"""Static scales of activations: those of the boot are written by every refit, and refused where there were none."""

import pytest
import torch
from fp8refit_vllm.activations import read_activation_scales, restore_activation_scales
from torch import nn


@pytest.fixture
def model():
    made = nn.Module()
    made.proj, made.experts = nn.Module(), nn.Module()
    made.proj.input_scale = nn.Parameter(torch.tensor(0.25), requires_grad=False)
    made.experts.w13_input_scale = nn.Parameter(torch.tensor([0.5, 2.0]), requires_grad=False)
    made.experts.w2_weight = nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    return made


def test_scales_come_back_after_a_sleep_that_lost_them(model):
    values = read_activation_scales(model)
    (restored,), refusals = restore_activation_scales(model, values)
    assert refusals == ()
    scales = model.proj.input_scale, model.experts.w13_input_scale
    assert {id(tensor) for tensor in restored.written} == set(map(id, scales))
    assert not restored.is_constant  # nobody may have seen the sleep
    for tensor in scales:
        tensor.data.fill_(float("nan"))
    restored.run()
    assert [tensor.tolist() for tensor in scales] == [0.25, [0.5, 2.0]]


def test_a_model_without_such_scales_needs_nothing(model):
    assert restore_activation_scales(nn.Linear(2, 2), read_activation_scales(nn.Linear(2, 2))) == ((), ())


@pytest.mark.parametrize("value", [0.0, -0.001, float("nan"), float("inf")])
def test_a_scale_that_no_checkpoint_filled_is_refused(value, model):
    model.experts.w13_input_scale.data[1] = value
    refreshes, (refusal,) = restore_activation_scales(model, read_activation_scales(model))
    assert refreshes == ()
    assert str(refusal).startswith("experts: did not boot with values for `w13_input_scale`, the static scale")


def test_scales_that_were_not_seen_at_boot_or_have_another_shape_are_refused(model):
    values = read_activation_scales(model)
    _, refusals = restore_activation_scales(model, {})
    assert [refusal.module for refusal in refusals] == ["proj", "experts"]
    model.proj.input_scale = nn.Parameter(torch.ones(3), requires_grad=False)
    _, (refusal,) = restore_activation_scales(model, values)
    assert "Boot it, with fp8refit's plugin, from a checkpoint that has them" in str(refusal)
