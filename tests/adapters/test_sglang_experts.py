"""The SGLang adapter's reading of layers of experts, on modules that look like SGLang's. Real ones: tests/sglang."""

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang.experts import ROW_MAJOR_RUNNERS
from fp8refit_sglang.layout import read_inventory
from torch import Tensor, nn

from fp8refit.slots import Inventory, ScaleFormat
from tests.layers.models import FP8, box, is_what_the_rank_holds

NUM_EXPERTS, ROWS, HIDDEN = 4, 512, 256
PARTS = {"gate_proj": (ROWS, HIDDEN), "up_proj": (ROWS, HIDDEN), "down_proj": (HIDDEN, ROWS)}
SHARED = "mlp.shared_experts"
IN_ORDER = [[0, 1, 2, 3]]
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
    """What a layer of experts shows of one rank, cut from a checkpoint by chunks."""

    layer_id = 0
    use_presharded_weights = False

    def __init__(self, checkpoint, rank=0, num_cuts=1, num_groups=1, places=IN_ORDER, num_shared=0, **attributes):
        super().__init__()
        self.moe_ep_size, self.moe_tp_size = num_groups, num_cuts
        self.moe_ep_rank, self.moe_tp_rank = divmod(rank, num_cuts)
        self.hidden_size, self.intermediate_size_per_partition = HIDDEN, ROWS // num_cuts
        self.num_fused_shared_experts = num_shared
        self.moe_runner_config = SimpleNamespace(is_gated=True)
        self.quant_method = Fp8MoEMethod()
        modules = [f"mlp.experts.{expert}" for expert in torch.tensor(places[0]).chunk(num_groups)[self.moe_ep_rank]]
        modules += [SHARED] * num_shared
        self.num_local_experts = len(modules)

        def held(part, suffix, dim):
            tensors = [checkpoint[f"{module}.{part}.weight{suffix}"] for module in modules]
            return torch.stack([tensor.chunk(num_cuts, dim)[self.moe_tp_rank] for tensor in tensors])

        for suffix in ("", "_scale_inv"):
            w13 = torch.cat([held("gate_proj", suffix, 0), held("up_proj", suffix, 0)], 1)
            for name, tensor in (("w13_weight", w13), ("w2_weight", held("down_proj", suffix, 1))):
                parameter = nn.Parameter(tensor.clone(), requires_grad=False)
                parameter.weight_loader = self.weight_loader
                self.register_parameter(f"{name}{suffix}", parameter)
        for name, value in attributes.items():
            setattr(self, name, value)

    def weight_loader(self): ...
    def weight_loader_fused(self): ...


class Model(nn.Module):
    def load_weights(self, make_expert_params_mapping):
        return make_expert_params_mapping(
            ckpt_gate_proj_name="gate_proj",
            ckpt_down_proj_name="down_proj",
            ckpt_up_proj_name="up_proj",
        )


class ModelWithLettersAndNumbers(nn.Module):
    def load_weights(self, make_expert_params_mapping):
        return make_expert_params_mapping(ckpt_gate_proj_name="w1", ckpt_down_proj_name="w2", ckpt_up_proj_name="w3")


class ModelOfBoth(ModelWithLettersAndNumbers, Model): ...


class ModelThatDoesNotSay(nn.Module): ...


class ModelThatInherits(ModelWithLettersAndNumbers): ...


def checkpoint_of_experts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    checkpoint = {}
    for module in (*(f"mlp.experts.{expert}" for expert in range(NUM_EXPERTS)), SHARED):
        for part, (rows, cols) in PARTS.items():
            codes = torch.randint(0, 0x78, (rows, cols), generator=generator, dtype=torch.uint8)
            checkpoint[f"{module}.{part}.weight"] = codes.view(FP8)
            checkpoint[f"{module}.{part}.weight_scale_inv"] = torch.rand(rows // 128, cols // 128, generator=generator)
    return checkpoint


CHECKPOINT = checkpoint_of_experts()


def read(layer: nn.Module, model_class: type[nn.Module] = Model, num_shared=0, places=None) -> Inventory:
    model = model_class()
    model.config = SimpleNamespace(n_shared_experts=num_shared)
    model.mlp = nn.Module()
    model.mlp.experts = layer
    return read_inventory(model, places)


def only_refusal(layer: nn.Module, model_class: type[nn.Module] = Model, num_shared=0) -> str:
    (refusal,) = read(layer, model_class, num_shared).refusals
    return str(refusal)


def layer_of(**attributes) -> FusedMoE:
    return FusedMoE(CHECKPOINT, **attributes)


SHUFFLED = [[2, 0, 3, 1]]
WITH_COPIES = [[0, 1, 2, 3, 0, 2]]


@pytest.mark.parametrize("num_shared", [0, 1], ids=["", "with the shared expert"])
@pytest.mark.parametrize("places", [None, SHUFFLED, WITH_COPIES], ids=["in order", "shuffled", "with copies"])
@pytest.mark.parametrize(("num_cuts", "num_groups"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_each_rank_holds_what_its_slots_say(num_cuts, num_groups, places, num_shared):
    weights = {name: tensor for name, tensor in CHECKPOINT.items() if not name.endswith("_scale_inv")}
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in weights.items()}
    for rank in range(num_cuts * num_groups):
        layer = FusedMoE(CHECKPOINT, rank, num_cuts, num_groups, places or IN_ORDER, num_shared)
        inventory = read(layer, num_shared=num_shared, places=places)
        assert not inventory.refusals
        assert [slot.name for slot in inventory.slots if not is_what_the_rank_holds(slot, CHECKPOINT)] == []
        for slot in inventory.slots:
            box(counts[slot.name], slot.origin, tuple(slot.weight.shape)).add_(1)
        assert (
            sum(slot.weight.numel() for slot in inventory.slots) == layer.w13_weight.numel() + layer.w2_weight.numel()
        )
        names = {slot.name for slot in inventory.slots}
        for stack in inventory.stacked:
            assert stack.shape[0] == NUM_EXPERTS
            assert {name for name in stack.parts if name not in names or ".experts." not in name} == set()
    for name, count in counts.items():
        expert = name.split(".")[2]
        copies = num_groups * num_shared if name.startswith(SHARED) else (places or IN_ORDER)[0].count(int(expert))
        assert (count == copies).all(), name


def test_the_map_of_places_is_that_of_the_layer():
    layer = FusedMoE(CHECKPOINT, places=SHUFFLED, layer_id=1)
    first = next(slot.name for slot in read(layer, places=[IN_ORDER[0], SHUFFLED[0]]).slots)
    assert first == "mlp.experts.2.gate_proj.weight"


@pytest.mark.parametrize("model_class", [ModelWithLettersAndNumbers, ModelThatInherits])
def test_parts_are_named_as_the_model_s_own_loading_names_them(model_class):
    names = [slot.name for slot in read(layer_of(), model_class).slots][:3]
    assert names == [f"mlp.experts.0.{part}.weight" for part in ("w1", "w3", "w2")]


@pytest.mark.parametrize("runner", sorted(ROW_MAJOR_RUNNERS))
@pytest.mark.parametrize("says", ["layer", "method"])
def test_runners_that_read_checkpoints_layout_are_known_by_name(runner, says):
    found = Runner(runner)
    layer = layer_of(quant_method=Fp8MoEMethod(found if says == "method" else None))
    if says == "layer":
        layer.runner_backend = found
    assert {(slot.kernel, slot.scale_format) for slot in read(layer).slots} == {(runner, ScaleFormat.FP32)}


def ue8m0(layer: FusedMoE) -> FusedMoE:
    layer.w2_weight_scale_inv.format_ue8m0 = True
    return layer


def loaded_fused(layer: FusedMoE) -> FusedMoE:
    layer.w13_weight.weight_loader = layer.weight_loader_fused
    return layer


def shaped(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> FusedMoE:
    layer = layer_of()
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    parameter.weight_loader = layer.weight_loader
    layer.register_parameter(name, parameter)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (
            layer_of(runner_backend=Runner.FLASHINFER_TRTLLM),
            "its kernel flashinfer_trtllm repacks experts, or is not known to leave them as loaded. "
            'Boot with moe_runner_backend="triton"',
        ),
        (layer_of(runner_backend=Runner.HPC_OPS), "its kernel hpc_ops repacks experts"),
        (layer_of(quant_method=Fp8MoEMethod(None)), "its kernel Fp8MoEMethod repacks experts, or is not known"),
        (layer_of(_mega_moe_weights_built=True), 'without moe_a2a_backend="megamoe"'),
        (layer_of(quant_method=KTEPWrapperMethod()), "Boot without kt_weight_path"),
        (layer_of(quant_method=PagedExpertsMoEMethod()), "Boot without enable_paged_experts"),
        (layer_of(use_presharded_weights=True), "its experts are cut before SGLang loads them. Boot with tp_size=1"),
        (layer_of(_dwdp_bound=True), "reads experts of other ranks from copies of them. Boot without dwdp_size"),
        (layer_of(moe_runner_config=SimpleNamespace(is_gated=False)), "its experts have no gate projection"),
        (loaded_fused(layer_of()), "loads all experts of a layer from one tensor, by a rule of its own"),
        (ue8m0(layer_of()), "powers of two (UE8M0)"),
        (shaped("w13_weight", 4, 1024, 128, dtype=torch.int8), "its experts are not block FP8: w13_weight (int8)"),
        (shaped("w13_weight", 4, 1152, 256, dtype=FP8), "its `w13_weight` is float8_e4m3fn [4, 1152, 256], not"),
        (shaped("w2_weight_scale_inv", 4, 256, 1, dtype=torch.int32), "its `w2_weight_scale_inv` is int32"),
        (shaped("w13_weight", 0, dtype=FP8), "its kernel took `w13_weight` away"),
        (shaped("w13_weight_bias", 4, 1024), "holds `w13_weight_bias` beside its experts' matrices"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(layer, reason):
    refusal = only_refusal(layer)
    assert refusal.startswith("mlp.experts: ")
    assert reason in refusal


@pytest.mark.parametrize("num_in_checkpoint", [0, 2])
def test_shared_experts_of_unknown_names_are_refused_with_the_setting(num_in_checkpoint):
    layer = layer_of(num_shared=max(1, num_in_checkpoint))
    assert "Boot with disable_shared_experts_fusion" in only_refusal(layer, num_shared=num_in_checkpoint)


@pytest.mark.parametrize("model_class", [ModelThatDoesNotSay, ModelOfBoth, type("Unwritten", (nn.Module,), {})])
def test_a_model_that_gives_no_one_answer_for_names_is_refused(model_class):
    assert f"nobody knows what a checkpoint of {model_class.__name__} calls" in only_refusal(layer_of(), model_class)


def test_a_layer_of_another_kind_is_refused():
    layer = nn.Module()
    for name, parameter in layer_of().named_parameters():
        layer.register_parameter(name, parameter)
    assert "is a Module, which holds experts by a rule of its own" in only_refusal(layer)


def test_experts_wrapped_for_lora_are_refused():
    wrapper = nn.Module()
    wrapper.base_layer = layer_of()
    refusals = read(wrapper).refusals
    assert [refusal.module for refusal in refusals] == ["mlp.experts", "mlp.experts.base_layer"]
    assert all("LoRA" in refusal.reason for refusal in refusals)


class MoEGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, dtype=torch.bfloat16))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(NUM_EXPERTS, dtype=torch.float32))
        self.register_buffer("_weight_fp32", None, persistent=False)


def test_a_router_keeps_its_own_dtypes():
    layer = layer_of()
    layer.gate = MoEGate()
    found = {slot.name: slot for slot in read(layer).slots if ".gate." in slot.name}
    assert {name.rpartition(".")[2]: slot.weight.dtype for name, slot in found.items()} == {
        "weight": torch.bfloat16,
        "e_score_correction_bias": torch.float32,
    }
    assert not any(slot.is_quantized for slot in found.values())


def test_the_float32_copy_of_a_router_is_refreshed_where_it_lies_once_there_is_one():
    layer = layer_of()
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
