"""Slots of layers of experts, on live values cut from a checkpoint expert by expert, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fp8refit.layers.inventory import read_inventory
from fp8refit.layers.rules import Experts
from fp8refit.slots import Inventory, ScaleFormat
from tests.layers.models import FP8, is_what_the_rank_holds, model_of
from tests.layers.rules import KERNEL, FakeRules

NUM_EXPERTS, INTERMEDIATE, HIDDEN = 6, 512, 384
NAME = "mlp.experts"
STACKS = (f"{NAME}.gate_up_proj", f"{NAME}.down_proj")


@pytest.fixture(scope="module")
def checkpoint() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for expert in range(NUM_EXPERTS):
        for part, shape in {
            "w1": (INTERMEDIATE, HIDDEN),
            "w3": (INTERMEDIATE, HIDDEN),
            "w2": (HIDDEN, INTERMEDIATE),
        }.items():
            name = f"{NAME}.{expert}.{part}.weight"
            found[name] = torch.randint(0, 0x78, shape, generator=generator, dtype=torch.uint8).view(FP8)
            found[f"{name}_scale_inv"] = torch.rand([size // 128 for size in shape], generator=generator)
    return found


def said(**changed) -> Experts:
    """What an engine says of all experts on one rank."""
    plain = Experts(
        gate="w1",
        up="w3",
        down="w2",
        ids=tuple(range(NUM_EXPERTS)),
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        ranks=(0, 1),
        block_size=(128, 128),
        kernel=KERNEL,
    )
    return replace(plain, **changed)


def layer_of(checkpoint: dict[str, Tensor], experts: Experts) -> nn.Module:
    """A layer that holds what `experts` says, by chunks and not by offsets."""
    rank, num_ranks = experts.ranks

    def stacked(parts: list[str], dim: int, suffix: str) -> nn.Parameter:
        matrices = [
            torch.cat([checkpoint[f"{NAME}.{e}.{part}.weight{suffix}"].chunk(num_ranks, dim)[rank] for part in parts])
            for e in experts.ids
        ]
        return nn.Parameter(torch.stack(matrices), requires_grad=False)

    layer = nn.Module()
    upper = ["w3", "w1"] if experts.is_up_first else ["w1", "w3"]
    for suffix in ("", "_scale_inv"):
        setattr(layer, f"w13_weight{suffix}", stacked(upper, 0, suffix))
        setattr(layer, f"w2_weight{suffix}", stacked(["w2"], 1, suffix))
    layer.experts = experts
    return layer


def read(layer: nn.Module, rename=None) -> Inventory:
    """The inventory of a model with `layer` in the place where vLLM has it."""
    mlp, experts = nn.Module(), nn.Module()
    experts.routed_experts = layer
    mlp.experts = experts
    return read_inventory(model_of(mlp=mlp), FakeRules(), *filter(None, [rename]))


def only_refusal(layer: nn.Module) -> str:
    (refusal,) = read(layer).refusals
    return str(refusal)


@pytest.mark.parametrize(
    "experts",
    [
        said(),
        said(is_up_first=True),
        said(ids=(5, 0, 3)),
        said(ranks=(0, 2)),
        said(ranks=(1, 2)),
        said(ranks=(3, 4), is_up_first=True, ids=(4, 1)),
    ],
    ids=["all", "up first", "some, out of order", "first part", "last part", "last part, up first, some"],
)
def test_every_slot_holds_its_slice_of_the_checkpoint_and_every_byte_has_a_slot(experts, checkpoint):
    layer = layer_of(checkpoint, experts)
    inventory = read(layer)
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots if not is_what_the_rank_holds(slot, checkpoint)] == []
    assert {slot.name for slot in inventory.slots} == {
        f"{NAME}.{expert}.{part}.weight" for expert in experts.ids for part in ("w1", "w2", "w3")
    }
    for slot in inventory.slots:
        slot.weight.view(torch.uint8).fill_(0xFF)
        slot.scale.fill_(-1)
    held = dict(layer.named_parameters())
    assert all((tensor.view(torch.uint8) == 0xFF).all() for name, tensor in held.items() if "scale" not in name)
    assert all((tensor == -1).all() for name, tensor in held.items() if "scale" in name)


def test_a_slot_says_what_the_engine_says_of_the_layer(checkpoint):
    kernel = replace(KERNEL, name="DEEPGEMM", scale_format=ScaleFormat.UE8M0)
    slots = read(layer_of(checkpoint, said(kernel=kernel))).slots
    assert {(slot.kernel, slot.scale_format, slot.block_size) for slot in slots} == {
        ("DEEPGEMM", ScaleFormat.UE8M0, (128, 128))
    }
    assert {slot.module for slot in slots} == {f"{NAME}.routed_experts"}


@pytest.mark.parametrize("is_up_first", [False, True])
def test_a_stack_holds_gate_above_up_of_every_expert_wherever_the_rank_has_them(is_up_first, checkpoint):
    gate_up, down = read(layer_of(checkpoint, said(ids=(5, 0), is_up_first=is_up_first))).stacked
    assert (gate_up.name, down.name) == STACKS
    assert (gate_up.shape, down.shape) == (
        (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (NUM_EXPERTS, HIDDEN, INTERMEDIATE),
    )
    assert gate_up.parts == {
        f"{NAME}.{expert}.{part}.weight": (expert, row)
        for expert in (5, 0)
        for part, row in (("w1", 0), ("w3", INTERMEDIATE))
    }
    assert down.parts == {f"{NAME}.{expert}.w2.weight": (expert, 0) for expert in (5, 0)}


def test_experts_are_called_as_in_the_checkpoint(checkpoint):
    inventory = read(layer_of(checkpoint, said(ids=(2,))), lambda name: (f"model.language_model.{name}",))
    assert inventory.slots[0].name == f"model.language_model.{NAME}.2.w1.weight"
    assert [stack.name for stack in inventory.stacked] == [f"model.language_model.{name}" for name in STACKS]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden_size": HIDDEN - 64}, "its `w13_weight` is float8_e4m3fn [6, 1024, 384], not row-major"),
        ({"intermediate_size": INTERMEDIATE - 64}, "not row-major float8_e4m3fn [6, 896, 384]"),
        ({"ranks": (0, 3)}, "512 rows of an expert are no even split over 3 ranks. Boot on one rank"),
        ({"kernel": replace(KERNEL, name="MARLIN", is_row_major=False)}, "its kernel MARLIN repacks experts"),
        (
            {"block_size": (64, 128)},
            "its `w13_weight_scale_inv` is float32 [6, 8, 3], not row-major float32 [6, 16, 3]",
        ),
        ({"ids": (0, 1)}, "not row-major float8_e4m3fn [2, 1024, 384]"),
    ],
    ids=["padded hidden size", "padded rows", "uneven split", "backend", "finer blocks", "places nobody names"],
)
def test_a_layer_that_is_not_what_it_says_is_refused_by_name(changed, reason, checkpoint):
    layer = layer_of(checkpoint, said())
    layer.experts = said(**changed)
    refusal = only_refusal(layer)
    assert refusal.startswith(f"{NAME}.routed_experts: ")
    assert reason in refusal


def test_what_lies_beside_experts_is_refused(checkpoint):
    layer = layer_of(checkpoint, said())
    layer.w13_bias = nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * INTERMEDIATE))
    assert "holds `w13_bias` beside its experts' matrices" in only_refusal(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_experts_of_another_type_are_refused(dtype, checkpoint):
    layer = layer_of(checkpoint, said())
    layer.w13_weight = nn.Parameter(torch.zeros(layer.w13_weight.shape, dtype=dtype), requires_grad=False)
    refusal = only_refusal(layer)
    assert "its experts are not block FP8: w13_weight (" in refusal
    assert FakeRules.remedies.other_quantization in refusal


def test_scales_in_another_layout_are_refused(checkpoint):
    layer = layer_of(checkpoint, said())
    layer.w2_weight_scale_inv = nn.Parameter(layer.w2_weight_scale_inv.data.to(torch.int32), requires_grad=False)
    assert "its `w2_weight_scale_inv` is int32 [6, 3, 4], not row-major float32 [6, 3, 4]" in only_refusal(layer)
