"""Static scales of activations: kept, brought back, and refused where a checkpoint never filled them."""

import pytest
import torch
from torch import nn

from fp8refit.tracing.activations import read_activation_scales
from fp8refit.tracing.inventory import inventory_of
from tests.tracing.twins import FakeKernelRules, identity_twin


class Layer(nn.Module):
    """A quantized layer with a static scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(128, 128).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(1, 1), requires_grad=False)
        self.input_scale = nn.Parameter(torch.tensor(0.25), requires_grad=False)


class Rules(FakeKernelRules):
    absorbed = "none", "none"

    def refreshes(self, model):
        return ()


@pytest.fixture
def model():
    made = nn.Module()
    made.layer = Layer()
    return made


def read(model, twin, **options):
    return inventory_of(model, Rules(), twin, **options)


def test_a_static_scale_is_no_slot_and_comes_back_after_sleep(model):
    twin, scales = identity_twin(model), read_activation_scales(model)
    inventory = read(model, twin)
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots] == ["layer.weight"]
    model.layer.input_scale.data.fill_(float("nan"))  # its memory was given back and taken again
    (refresh,) = read(model, twin, activation_scales=scales).refreshes
    assert refresh.is_constant
    refresh.run()
    assert model.layer.input_scale.item() == 0.25


@pytest.mark.parametrize("value", [0.0, -0.001, float("nan"), float("inf")])
def test_a_static_scale_that_no_checkpoint_filled_is_refused(value, model):
    model.layer.input_scale.data.fill_(value)
    (refusal,) = read(model, identity_twin(model)).refusals
    assert str(refusal).startswith("layer: has no values for `input_scale`, the static scale of its activations")


def test_a_static_scale_of_a_dummy_boot_is_refused(model):
    (refusal,) = read(model, identity_twin(model), has_noise=True).refusals
    assert "Boot it from a checkpoint that has them, not with dummy weights" in str(refusal)
