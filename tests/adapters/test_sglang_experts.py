"""What the SGLang adapter says of layers of experts, on modules that look like SGLang's. Real ones: tests/sglang."""

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang.experts import ROW_MAJOR_RUNNERS
from fp8refit_sglang.layout import SglangRules
from torch import nn

from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import Inventory
from fp8refit.tracing.inventory import inventory_of
from tests.tracing.models import FP8
from tests.tracing.twins import identity_twin

NUM_EXPERTS, ROWS, HIDDEN = 4, 512, 256
Runner = Enum("Runner", {name.upper(): name for name in (*ROW_MAJOR_RUNNERS, "flashinfer_trtllm", "hpc_ops")})


class Fp8MoEMethod:
    """What the method of experts in FP8 shows: 0.5.15 and 0.5.17 say the runner here."""

    def __init__(self, runner=Runner.TRITON):
        self.quant_config = SimpleNamespace(weight_block_size=[128, 128])
        if runner is not None:
            self.runner = SimpleNamespace(runner_backend=runner)


class KTEPWrapperMethod(Fp8MoEMethod): ...


class PagedExpertsMoEMethod(Fp8MoEMethod): ...


class FusedMoE(nn.Module):
    """What a layer of experts shows."""

    def __init__(self, **attributes):
        super().__init__()
        self.quant_method = Fp8MoEMethod()
        for name, rows, cols in (("w13_weight", 2 * ROWS, HIDDEN), ("w2_weight", HIDDEN, ROWS)):
            codes = torch.zeros(NUM_EXPERTS, rows, cols, dtype=FP8)
            scale = torch.ones(NUM_EXPERTS, rows // 128, cols // 128)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
        for name, value in attributes.items():
            setattr(self, name, value)


def read(layer: nn.Module) -> Inventory:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = layer
    return inventory_of(model, SglangRules(model), identity_twin(model))


def only_refusal(layer: nn.Module) -> str:
    (refusal,) = read(layer).refusals
    return str(refusal)


@pytest.mark.parametrize("runner", sorted(ROW_MAJOR_RUNNERS))
@pytest.mark.parametrize("says", ["layer", "method"])
def test_runners_that_read_checkpoints_layout_are_known_by_name(runner, says):
    found = Runner(runner)
    layer = FusedMoE(quant_method=Fp8MoEMethod(found if says == "method" else None))
    if says == "layer":
        layer.runner_backend = found
    assert {(slot.kernel, slot.format) for slot in read(layer).slots} == {(runner, BlockFormat())}


def ue8m0(layer: FusedMoE) -> FusedMoE:
    layer.w2_weight_scale_inv.format_ue8m0 = True
    return layer


def shaped(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> FusedMoE:
    layer = FusedMoE()
    layer.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (
            FusedMoE(runner_backend=Runner.FLASHINFER_TRTLLM),
            "its kernel flashinfer_trtllm repacks experts, or is not known to leave them as loaded. "
            'Boot with moe_runner_backend="triton"',
        ),
        (FusedMoE(runner_backend=Runner.HPC_OPS), "its kernel hpc_ops repacks experts"),
        (FusedMoE(quant_method=Fp8MoEMethod(None)), "its kernel Fp8MoEMethod repacks experts, or is not known"),
        (FusedMoE(_mega_moe_weights_built=True), 'without moe_a2a_backend="megamoe"'),
        (FusedMoE(quant_method=KTEPWrapperMethod()), "Boot without kt_weight_path"),
        (FusedMoE(quant_method=PagedExpertsMoEMethod()), "Boot without enable_paged_experts"),
        (FusedMoE(_dwdp_bound=True), "reads other ranks' experts from copies. Boot without dwdp_size"),
        (ue8m0(FusedMoE()), "powers of two (UE8M0)"),
        (
            shaped("w13_weight", 4, 1024, 128, dtype=torch.int8),
            "holds w13_weight (int8) under Fp8MoEMethod, which is not block FP8",
        ),
        (shaped("w13_weight", 4, 1152, 256, dtype=FP8), "its `w13_weight_scale_inv` is float32 [4, 8, 2], not"),
        (shaped("w2_weight_scale_inv", 4, 256, 1, dtype=torch.int32), "its `w2_weight_scale_inv` is int32"),
        (shaped("w13_weight", 0, dtype=FP8), "its kernel removed `w13_weight`"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(layer, reason):
    refusal = only_refusal(layer)
    assert refusal.startswith("mlp.experts: ")
    assert reason in refusal


def test_experts_wrapped_for_lora_are_refused():
    wrapper = nn.Module()
    wrapper.base_layer = FusedMoE()
    refusals = read(wrapper).refusals
    assert [refusal.module for refusal in refusals] == ["mlp.experts.base_layer"]
    assert all("LoRA" in refusal.reason for refusal in refusals)


class MoEGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, dtype=torch.bfloat16))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(NUM_EXPERTS, dtype=torch.float32))
        self.register_buffer("_weight_fp32", None, persistent=False)


def test_a_router_keeps_its_own_dtypes():
    layer = FusedMoE()
    layer.gate = MoEGate()
    found = {slot.name: slot for slot in read(layer).slots if ".gate." in slot.name}
    assert {name.rpartition(".")[2]: slot.weight.dtype for name, slot in found.items()} == {
        "weight": torch.bfloat16,
        "e_score_correction_bias": torch.float32,
    }
    assert not any(slot.is_quantized for slot in found.values())


def test_the_float32_copy_of_a_router_is_refreshed_where_it_lies_once_there_is_one():
    layer = FusedMoE()
    layer.gate = gate = MoEGate()
    (refresh,) = read(layer).refreshes
    assert refresh.name == "mlp.experts.gate: float32 copy"
    refresh.run()
    assert gate._weight_fp32 is None
    gate._weight_fp32 = copy = torch.zeros(NUM_EXPERTS, HIDDEN)
    gate.weight.data.fill_(3)
    refresh.run()
    assert gate._weight_fp32 is copy
    assert not copy.requires_grad
    assert (copy == 3).all()
