"""What the vLLM adapter says of layers of experts, on modules that show what vLLM's show: no vLLM here."""

from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.experts import sync_experts
from fp8refit_vllm.layout import VllmRules
from torch import nn

from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.slots import Inventory
from fp8refit.tracing.inventory import inventory_of
from tests.tracing.twins import identity_twin

SIZE, HIDDEN = 256, 128
SCALES = ("w13_weight_scale_inv", "w2_weight_scale_inv")


class RoutedExperts(nn.Module):
    """What vLLM's module of that name shows."""

    def __init__(self, *, count=4, backend="TRITON", ranks=(0, 1), eplb=False, physical=4):
        super().__init__()
        size = SIZE // ranks[1]
        shapes = {"w13_weight": (count, 2 * size, HIDDEN), "w2_weight": (count, HIDDEN, size)}
        for name, shape in shapes.items():
            codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            scale = torch.ones(count, shape[1] // 128, shape[2] // 128)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
        self.weight_block_size = [128, 128]
        self.moe_config = SimpleNamespace(
            num_experts=physical,
            num_logical_experts=4,
            hidden_dim=HIDDEN,
            hidden_dim_unpadded=HIDDEN,
            intermediate_size=SIZE,
            moe_parallel_config=SimpleNamespace(tp_rank=ranks[0], tp_size=ranks[1], enable_eplb=eplb),
        )
        config = SimpleNamespace(w1_scale=self.w13_weight_scale_inv, w2_scale=self.w2_weight_scale_inv)
        self.quant_method = SimpleNamespace(fp8_backend=SimpleNamespace(name=backend), moe_quant_config=config)


def read(layer: nn.Module) -> Inventory:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.routed_experts = layer
    return inventory_of(model, VllmRules(), identity_twin(model))


@pytest.mark.parametrize("backend", ["TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS"])
def test_these_backends_take_any_scale(backend):
    layer = RoutedExperts(backend=backend)
    assert VllmRules().kernel_of(layer).format == BlockFormat()
    assert VllmRules().swaps_halves(layer) is (backend == "FLASHINFER_CUTLASS")


def test_a_backend_that_keeps_products_of_scales_is_refused():
    """FlashInfer's CUTLASS, with static scales of activations."""
    layer = RoutedExperts(backend="FLASHINFER_CUTLASS")
    layer.quant_method.moe_quant_config.g1_alphas = torch.ones(4)
    (refusal,) = read(layer).refusals
    assert "its kernel FLASHINFER_CUTLASS repacks experts" in refusal.reason


class Fp8PerBlockOnlineMoEMethod(SimpleNamespace):
    """The name of vLLM's own."""


@pytest.mark.parametrize(
    ("device", "scale_format"), [("cpu", ScaleFormat.FP32_FLOORED), ("meta", ScaleFormat.FP32_RECIPROCAL)]
)
def test_experts_that_vllm_quantized_itself_have_its_quantizers_scales(device, scale_format):
    layer = RoutedExperts().to(device)
    layer.quant_method = Fp8PerBlockOnlineMoEMethod(**vars(layer.quant_method))
    assert VllmRules().kernel_of(layer).format.scale_format is scale_format


@pytest.mark.parametrize("backend", ["MARLIN", "FLASHINFER_TRTLLM", "CPU", "HUMMING", "NONE"])
def test_a_backend_that_may_repack_is_refused_with_one_that_does_not(backend):
    (refusal,) = read(RoutedExperts(backend=backend)).refusals
    assert str(refusal).startswith(f"experts.routed_experts: its kernel {backend} repacks experts")
    assert refusal.remedy == 'Boot with moe_backend="triton"'


def test_experts_that_are_not_where_they_were_loaded_are_refused():
    (refusal,) = read(RoutedExperts(physical=6)).refusals
    assert "holds 6 experts for 4 of the checkpoint. Boot without redundant experts" in str(refusal)


def test_experts_of_which_vllm_says_where_they_are_may_be_there_twice():
    assert read(RoutedExperts(physical=6, eplb=True)).refusals == ()


def test_scales_that_the_product_reads_elsewhere_are_written_there_too():
    layer = RoutedExperts()
    config = layer.quant_method.moe_quant_config
    config.w1_scale = orphan = torch.zeros(layer.w13_weight_scale_inv.shape)
    layer.w13_weight_scale_inv.fill_(3)
    layer.w2_weight_scale_inv.fill_(5)
    sync_experts(layer)
    assert config.w1_scale is orphan
    assert (orphan == 3).all()
    assert config.w2_scale is layer.w2_weight_scale_inv


@pytest.mark.parametrize(("backend", "least"), [("FLASHINFER_CUTLASS", 1e-10), ("TRITON", 1e-12)])
def test_flashinfers_scales_are_no_smaller_than_its_boot_leaves_them(backend, least):
    layer = RoutedExperts(backend=backend)
    for name in SCALES:
        getattr(layer, name).fill_(1e-12)
        getattr(layer, name)[0, 0, 0] = 2.0
    sync_experts(layer)
    for name in SCALES:
        scale = getattr(layer, name)
        assert scale.flatten()[0] == 2.0
        assert (scale.flatten()[1:] == torch.tensor(least)).all()
