"""The core's reading of layers, on modules and rules of no engine's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8refit.layers.inventory import read_inventory
from fp8refit.slots import Inventory, ScaleFormat
from tests.layers.models import FP8, model_of
from tests.layers.rules import KERNEL, FakeRules


class BlockLinear(nn.Module):
    """What a block-FP8 linear layer shows."""

    def __init__(self, sizes=(256,), cols=256, **attributes):
        super().__init__()
        rows = sum(sizes)
        self.weight = nn.Parameter(torch.zeros(rows, cols, dtype=FP8), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(-(-rows // 128), -(-cols // 128)), requires_grad=False)
        self.output_partition_sizes = list(sizes)
        for name, value in attributes.items():
            setattr(self, name, value)


def read(model: nn.Module) -> Inventory:
    return read_inventory(model, FakeRules())


def only_refusal(model: nn.Module) -> str:
    (refusal,) = read(model).refusals
    return str(refusal)


def kernel(**changed) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(KERNEL, name) for name in KERNEL.__slots__} | changed)


def test_the_parts_of_a_fused_module_are_slots_of_their_own():
    model = model_of(qkv_proj=BlockLinear(sizes=(256, 128, 128)))
    slots = read(model).slots
    assert [slot.name for slot in slots] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert [tuple(slot.scale.shape) for slot in slots] == [(2, 2), (1, 2), (1, 2)]
    assert slots[2].weight.data_ptr() == model.qkv_proj.weight[384:].data_ptr()
    assert slots[2].scale.data_ptr() == model.qkv_proj.weight_scale_inv[3:].data_ptr()


def test_a_model_that_names_no_parts_is_fused_as_usual():
    model = model_of(gate_up_proj=BlockLinear(sizes=(128, 128)))
    del model.packed_modules_mapping
    assert [slot.name for slot in read(model).slots] == ["gate_proj.weight", "up_proj.weight"]


def test_a_slot_says_what_the_rules_say_of_its_layer():
    powers = kernel(name="Another", scale_format=ScaleFormat.UE8M0)
    a, b = read(model_of(a=BlockLinear(), b=BlockLinear(kernel=powers))).slots
    assert (a.kernel, a.scale_format, a.block_size, a.module) == (KERNEL.name, ScaleFormat.FP32, (128, 128), "a")
    assert (b.kernel, b.scale_format) == ("Another", ScaleFormat.UE8M0)


def test_a_tied_weight_is_an_alias_and_a_bias_beside_it_a_slot():
    embed, head = nn.Embedding(64, 128), nn.Linear(128, 64)
    head.weight = embed.weight
    inventory = read(model_of(embed=embed, head=head, proj=BlockLinear()))
    assert inventory.aliases == {"head.weight": "embed.weight"}
    assert [slot.name for slot in inventory.slots] == ["embed.weight", "head.bias", "proj.weight"]


def test_a_layer_that_another_holds_too_has_one_name():
    layer, attention = BlockLinear(), nn.Module()
    attention.o_proj = layer
    inventory = read(model_of(o_proj=layer, attn=attention))
    assert [slot.name for slot in inventory.slots] == ["o_proj.weight"]
    assert inventory.aliases == {}


def test_what_is_kept_has_no_slot_and_is_watched():
    attention = nn.Module()
    attention.k_scale = nn.Parameter(torch.tensor(0.5))
    attention.kept = ("k_scale",)
    model = model_of(attn=attention, proj=BlockLinear())
    model.register_buffer("rotary", torch.ones(4))
    inventory = read(model)
    assert [slot.name for slot in inventory.slots] == ["proj.weight"]
    assert {entry.name for entry in inventory.live} >= {"attn.k_scale", "rotary"}
    assert inventory.refusals == ()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BlockLinear(kernel=kernel(is_row_major=False)), "its kernel Plain repacks weights"),
        (BlockLinear(tp_size=2), "is a BlockLinear, split over 2 ranks by a rule of its own"),
        (BlockLinear(base_layer=nn.Module()), "holds `weight`, `weight_scale_inv` around a layer, for LoRA"),
        (BlockLinear(why_refused=("is odd", "Take another")), "is odd. Take another"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(module, reason):
    refusal = only_refusal(model_of(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal


def test_the_rules_may_refuse_a_module_without_parameters_and_the_model_itself():
    attention = nn.Module()
    attention.why_refused = ("is odd", "Take another")
    assert only_refusal(model_of(attention=attention, proj=BlockLinear())) == "attention: is odd. Take another"
    model = model_of(proj=BlockLinear())
    model.why_refused = ("is odd", "Take another")
    assert only_refusal(model) == "Module: is odd. Take another"


def test_a_layer_wrapped_for_lora_keeps_its_name():
    wrapper = nn.Module()
    wrapper.base_layer = BlockLinear(sizes=(256, 128, 128))
    inventory = read(model_of(qkv_proj=wrapper))
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (torch.ones(2, 2, dtype=torch.int32), "int32 [2, 2]"),
        (torch.ones(1, 2), "float32 [1, 2]"),
        (torch.ones(2, 1).expand(2, 2), "float32 [2, 2]"),
    ],
)
def test_scales_in_another_layout_are_refused(scale, found):
    layer = BlockLinear()
    layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    refusal = only_refusal(model_of(layer=layer))
    assert f"its scales are {found}, not row-major float32 [2, 2]" in refusal
    assert KERNEL.remedy in refusal


def test_a_weight_in_another_layout_is_refused():
    layer = BlockLinear()
    layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
    assert "its weight is not a row-major float8_e4m3fn matrix" in only_refusal(model_of(layer=layer))


def test_a_weight_that_its_kernel_took_away_is_refused():
    layer = BlockLinear()
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    assert "its kernel took `weight` away" in only_refusal(model_of(layer=layer))


def test_a_module_fused_otherwise_than_the_model_says_is_refused():
    assert "holds 2 fused matrices" in only_refusal(model_of(qkv_proj=BlockLinear(sizes=(128, 128))))


@pytest.mark.parametrize(
    "module", [BlockLinear(), nn.Linear(128, 128), nn.LayerNorm(64)], ids=lambda m: type(m).__name__
)
def test_a_module_that_is_not_fused_and_should_be_is_refused(module):
    refusal = only_refusal(model_of(qkv_proj=module))
    assert "holds no fused matrices, and the model says it is made of q_proj, k_proj, v_proj" in refusal


def test_a_module_of_one_part_needs_no_other():
    model = model_of(o_proj=BlockLinear())
    model.packed_modules_mapping["o_proj"] = ["dense"]
    assert [slot.name for slot in read(model).slots] == ["dense.weight"]


def test_a_module_fused_in_an_order_nobody_says_is_refused():
    assert "holds 3 fused matrices" in only_refusal(model_of(query_key_value=BlockLinear(sizes=(128, 128, 128))))


def test_parts_off_the_block_grid_are_refused():
    assert "do not start on blocks" in only_refusal(model_of(qkv_proj=BlockLinear(sizes=(192, 64, 128))))


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_another_quantization_is_refused(dtype):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(128, 128, dtype=dtype), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(1))
    refusal = only_refusal(model_of(layer=layer))
    assert "not block FP8" in refusal
    assert FakeRules.remedies.other_quantization in refusal


def test_a_model_without_block_fp8_is_refused():
    refusal = only_refusal(model_of(proj=nn.Linear(128, 128)))
    assert refusal == f"Module: holds no block-FP8 weight. {FakeRules.remedies.no_block_fp8}"


def test_experts_wrapped_for_lora_are_refused_by_name():
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 256, 128, dtype=FP8), requires_grad=False)
    wrapper = nn.Module()
    wrapper.base_layer = nn.Module()
    wrapper.base_layer.routed_experts = experts
    refusal = only_refusal(model_of(proj=BlockLinear(), experts=wrapper))
    assert refusal.startswith("experts.base_layer.routed_experts: is a layer of experts that LoRA wraps")


def test_experts_in_mxfp4_are_refused_by_name():
    experts = nn.Module()
    for name, shape in {"w13_weight": (2, 256, 64), "w13_weight_scale": (2, 256, 4), "w2_weight": (2, 128, 64)}.items():
        setattr(experts, name, nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False))
    experts.w13_bias = nn.Parameter(torch.zeros(2, 256))
    assert only_refusal(model_of(proj=BlockLinear(), experts=experts)).startswith("experts: ")


def test_a_matrix_in_mxfp4_is_refused_by_name():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.uint8), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.zeros(128, 4, dtype=torch.uint8), requires_grad=False)
    refusal = only_refusal(model_of(proj=BlockLinear(), layer=layer))
    assert "layer: holds weight (uint8), weight_scale (uint8)" in refusal
    assert "not block FP8" in refusal


def test_a_mamba_mixer_is_refused_by_what_it_makes_of_its_checkpoint():
    def composed_loader(): ...

    mixer = nn.Module()
    mixer.in_proj = BlockLinear(sizes=(256, 256, 128))
    mixer.A = nn.Parameter(torch.ones(4))
    mixer.A.weight_loader = composed_loader
    refusals = {refusal.module: refusal.reason for refusal in read(model_of(mixer=mixer)).refusals}
    assert refusals == {
        "mixer": "loads `A` by a rule of its own, which may change its values",
        "mixer.in_proj": "holds 3 fused matrices, and the model says it is made of mixer.in_proj",
    }
