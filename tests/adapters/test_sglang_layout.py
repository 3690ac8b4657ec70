"""The SGLang adapter's reading of a model, on modules that look like SGLang's; no SGLang is needed. Real ones: tests/sglang.

What the core reads in every engine's layers: tests/layers.
"""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang.compat import own_rows, own_weights
from fp8refit_sglang.experts import FROM_FP8
from fp8refit_sglang.latent import why_not_absorbed
from fp8refit_sglang.layout import ROW_MAJOR_KERNELS, SglangRules
from torch import nn

from fp8refit import quantize_blockwise
from fp8refit.live.formats import FLOAT_SCALES, PER_ROW, WHOLE, BlockFormat, ScaleFormat
from fp8refit.live.slots import Inventory, Refusal
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.stored import own_tensors, why_not_stored
from fp8refit.tracing.twin import Twin
from tests.tracing.models import FP8, HIDDEN, BlockLinear, model_of
from tests.tracing.twins import identity_twin


def triton_w8a8_block_fp8_linear(): ...
def aiter_w8a8_block_fp8_linear(): ...


class Fp8LinearMethod:
    """What the method of a layer in FP8 shows; that of 0.5.23 says the size of its blocks itself."""

    use_marlin = False

    def __init__(self, product=triton_w8a8_block_fp8_linear):
        self.quant_config = SimpleNamespace(weight_block_size=[128, 128])
        self.w8a8_block_fp8_linear = product


def block_layer(**attributes) -> nn.Module:
    """A block-FP8 layer of an engine of one rank."""
    layer = BlockLinear(cols=HIDDEN, quant_method=Fp8LinearMethod())
    layer.weight_scale_inv.format_ue8m0 = False
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def read_inventory(model: nn.Module, twin: Twin | Refusal | None = None) -> Inventory:
    """The inventory of a model whose loader copies every tensor to the parameter of its name."""
    return inventory_of(model, SglangRules(model), identity_twin(model) if twin is None else twin)


def only_refusal(model: nn.Module, twin: Twin | None = None) -> str:
    (refusal,) = read_inventory(model, twin).refusals
    return str(refusal)


def test_a_model_without_a_twin_is_refused_for_it():
    refusal = Refusal(module="Odd", reason="cannot be built without memory", remedy="Take another")
    inventory = read_inventory(model_of(proj=block_layer()), refusal)
    assert inventory.refusals == (refusal,)
    assert {entry.name for entry in inventory.live} == {"proj.weight", "proj.weight_scale_inv"}


def test_a_slot_says_its_kernel_format_and_block_size():
    (slot,) = read_inventory(model_of(proj=block_layer())).slots
    assert (slot.kernel, slot.format) == ("triton_w8a8_block_fp8_linear", BlockFormat())


def test_the_block_size_is_that_of_the_weight_after_loading():
    layer = block_layer(weight_scale_inv=nn.Parameter(torch.ones(8, 8), requires_grad=False))
    layer.quant_method.weight_block_size = [32, 32]
    (slot,) = read_inventory(model_of(proj=layer)).slots
    assert slot.format.block_size == (32, 32)


@pytest.mark.parametrize("name", sorted(ROW_MAJOR_KERNELS))
def test_kernels_that_read_checkpoints_layout_are_known_by_name(name):
    def product(): ...

    product.__name__ = name
    for kernel in (product, functools.partial(product, act_scale_ue8m0=True)):
        (slot,) = read_inventory(model_of(proj=block_layer(quant_method=Fp8LinearMethod(kernel)))).slots
        assert slot.kernel == name


class RadixAttention(nn.Module):
    """What an attention layer shows under a config for FP8."""

    def __init__(self):
        super().__init__()
        self.k_scale = nn.Parameter(torch.tensor(0.25), requires_grad=False)
        self.v_scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.k_scale_float, self.v_scale_float = 0.25, 0.5


def test_kv_scales_are_kept_and_watched_and_rotary_tables_are_watched():
    model = model_of(attn=RadixAttention(), proj=block_layer())
    model.rotary_emb = nn.Module()
    model.rotary_emb.register_buffer("cos_sin_cache", torch.ones(8, 4), persistent=False)
    inventory = read_inventory(model)
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots] == ["proj.weight"]
    assert inventory.names == {"proj.weight"}
    live = {entry.name for entry in inventory.live}
    assert live >= {"attn.k_scale", "attn.v_scale", "rotary_emb.cos_sin_cache"}


def test_a_parameter_of_that_name_elsewhere_is_a_weight():
    module = nn.Module()
    module.k_scale = nn.Parameter(torch.ones(8))
    assert "thing.k_scale" in read_inventory(model_of(thing=module, proj=block_layer())).names


def scales(tensor: torch.Tensor, **attributes) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def marlin_method() -> Fp8LinearMethod:
    method = Fp8LinearMethod()
    method.use_marlin = True
    return method


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (block_layer(quant_method=marlin_method()), "Marlin repacks weights. Boot without SGLANG_FORCE_FP8_MARLIN"),
        (
            block_layer(quant_method=Fp8LinearMethod(aiter_w8a8_block_fp8_linear)),
            "its kernel aiter_w8a8_block_fp8_linear repacks weights, or is not known to leave them as loaded. "
            "Boot with fp8_gemm_runner_backend",
        ),
        (block_layer(quant_method=Fp8LinearMethod(None)), "its kernel Fp8LinearMethod repacks weights"),
        (block_layer(weight_scale_inv=scales(torch.ones(2, 2), format_ue8m0=True)), "powers of two (UE8M0)"),
        (block_layer(weight_scale_inv=scales(torch.ones(2, 2), power_of_two=True)), "powers of two (UE8M0)"),
        (block_layer(weight_scale_inv=scales(torch.ones(256, 1, dtype=torch.int32))), "powers of two (UE8M0)"),
        (
            block_layer(weight_scale_inv=scales(torch.ones(2, 2, dtype=torch.uint8))),
            "its `weight_scale_inv` is uint8 [2, 2]",
        ),
        (block_layer(_block_fp8_bf16_weight=torch.zeros(1)), "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16=0"),
        (block_layer(_derived_weight_cache_error="Restart without it"), "derived from its weights. Restart without it"),
        (block_layer(use_intel_amx_backend=True), "packed for Intel AMX"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(module, reason):
    refusal = only_refusal(model_of(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("w_kc", None, "absorbs its latent projections in a way of its own"),
        ("_derived_weight_cache_error", "Restart without it", "Restart without it"),
    ],
)
def test_derived_copies_are_seen_on_modules_without_parameters(name, value, reason):
    attention = nn.Module()
    setattr(attention, name, value)
    refusal = only_refusal(model_of(attention=attention, proj=block_layer()))
    assert refusal.startswith("attention: ")
    assert reason in refusal


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("proj", "weight_scale_inv_deepgemm", torch.ones(1)),
        ("proj", "weight_scale_inv_swizzled", torch.ones(1)),
        ("attention", "_hpc_q_norm_w_fp32", torch.ones(1)),
        ("attention", "_hc_attn_tf32_parts", (torch.ones(1),)),
    ],
)
def test_copies_that_the_engine_made_after_it_was_built_are_refused(module, name, value):
    model = model_of(attention=nn.Module(), proj=block_layer())
    twin = identity_twin(model)
    setattr(getattr(model, module), name, value)
    (refusal,) = read_inventory(model, twin).find_copies(True)
    assert refusal.module == module
    assert f"keeps `{name}" in refusal.reason


def test_scales_of_the_kv_cache_and_routers_in_float32_are_known():
    model = model_of(attention=nn.Module(), proj=block_layer())
    twin = identity_twin(model)
    model.attention.k_scale_float, model.attention.k_scale = 2.0, torch.tensor(2.0)
    model.proj.register_buffer("_weight_fp32", torch.ones(2), persistent=False)
    assert read_inventory(model, twin).find_copies(True) == []


class DeepseekV2WeightLoaderMixin:
    def post_load_weights(self): ...


class LatentModel(nn.Module, DeepseekV2WeightLoaderMixin):
    """What a model with latent attention shows of one layer on one rank."""

    def __init__(self, **attributes):
        super().__init__()
        self.attn = attention = nn.Module()
        attention.kv_b_proj = block_layer(**block_weight(512))
        attention.w_kc = torch.zeros(2, 256, 128, dtype=torch.bfloat16).transpose(1, 2)
        attention.w_vc = torch.zeros(2, 128, 256, dtype=torch.bfloat16).transpose(1, 2)
        attention.w_scale, attention.w_scale_k, attention.w_scale_v = 1.0, None, None
        for name, value in attributes.items():
            setattr(attention, name, value)


def block_weight(num_rows: int) -> dict[str, nn.Parameter]:
    codes = torch.randint(0, 0x78, (num_rows, 256), dtype=torch.uint8).view(FP8)
    scale = torch.rand(num_rows // 128, 2)
    tensors = {"weight": codes, "weight_scale_inv": scale}
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}


def test_absorbed_copies_are_computed_from_codes_and_scales():
    model = LatentModel()
    inventory = read_inventory(model)
    assert inventory.refusals == ()
    (refresh,) = inventory.refreshes
    refresh.run()
    projection = model.attn.kv_b_proj
    scale = projection.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    heads = (projection.weight.float() * scale).bfloat16().view(2, 256, 256)
    assert torch.equal(model.attn.w_kc, heads[:, :128])
    assert torch.equal(model.attn.w_vc, heads[:, 128:].transpose(1, 2))
    assert {"attn.w_kc", "attn.w_vc"} <= {live.name for live in inventory.live}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("use_deep_gemm_bmm", True, "in FP8 for DeepGEMM. Boot without SGLANG_USE_DEEPGEMM_BMM"),
        ("w_kc_qrep", torch.zeros(1), "also keeps the absorbed keys of other ranks. Boot without dcp_replicate_q_proj"),
        ("w_scale", torch.ones(()), "quantizes its absorbed copies again, or has made none"),
        ("w_kc", torch.zeros(1, dtype=FP8), "quantizes its absorbed copies again, or has made none"),
        ("w_kc", None, "quantizes its absorbed copies again, or has made none"),
    ],
)
def test_other_forms_of_absorbed_copies_are_refused_by_name(name, value, reason):
    refusal = only_refusal(LatentModel(**{name: value}))
    assert refusal.startswith("attn: ")
    assert reason in refusal


def test_copies_that_are_not_made_are_no_reason():
    layer = block_layer(weight_scale_inv_swizzled=None, _derived_weight_cache_error=None, use_intel_amx_backend=False)
    assert read_inventory(model_of(proj=layer)).refusals == ()


def test_a_layer_wrapped_for_lora_keeps_its_name_and_has_slots_once():
    plain, wrapper = model_of(proj=block_layer()), nn.Module()
    wrapper.base_layer = block_layer()
    wrapper.weight = wrapper.base_layer.weight  # as SGLang's wrappers have it
    wrapper.A_buffer = torch.ones(4, 4)
    model = model_of(proj=wrapper)
    inventory = read_inventory(model, twin=identity_twin(plain))
    assert [(slot.name, slot.module) for slot in inventory.slots] == [("proj.weight", "proj.base_layer")]
    assert inventory.refusals == () and inventory.find_copies(True, False) == []
    assert "A_buffer" in SglangRules(model).kept(wrapper)


def test_another_weight_around_a_layer_is_refused():
    wrapper = nn.Module()
    wrapper.base_layer = block_layer()
    wrapper.weight = nn.Parameter(torch.ones(4, 4))
    model = model_of(proj=wrapper)
    assert "holds `weight` around a layer, for LoRA" in only_refusal(model, identity_twin(model_of(proj=block_layer())))


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_fp8_by_tensor_is_refused(dtype):
    layer = block_layer()
    del layer.weight_scale_inv
    layer.weight = nn.Parameter(layer.weight.data.to(dtype), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(256), requires_grad=False)
    refusal = only_refusal(model_of(proj=layer))
    assert "under Fp8LinearMethod, which is not block FP8. Boot from an FP8 checkpoint with scales per block" in refusal


class CompressedTensorsW8A8Fp8:
    """SGLang's scheme, of blocks if it has a product for them."""


def channel_layer(weight):
    layer = nn.Module()
    layer.scheme, layer.quant_method = CompressedTensorsW8A8Fp8(), None
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.full((256, 1), 2.0), requires_grad=False)
    return layer


def test_fp8_by_channel_is_read_as_it_lies_in_memory():
    layer = channel_layer(torch.ones(256, 256).to(FP8).t())
    kernel = SglangRules(model_of(proj=layer)).kernel_of(layer)
    assert (kernel.name, kernel.format) == ("CompressedTensorsW8A8Fp8", PER_ROW)
    layer.weight.data[3] = 0  # a column of the matrix
    weight = SglangRules(model_of(proj=layer)).dequantize(layer, torch.float32)
    assert weight[:, 3].eq(0).all() and weight[:, :3].eq(2).all()


def test_fp8_by_channel_that_is_shuffled_or_of_unknown_blocks_is_refused():
    """AITER shuffles weights and keeps their shape."""
    shuffled = channel_layer(torch.ones(256, 256).to(FP8))
    of_blocks = channel_layer(torch.ones(256, 256).to(FP8).t())
    of_blocks.weight_block_size = (128, 128)
    for layer in (shuffled, of_blocks):
        assert SglangRules(model_of(proj=layer)).kernel_of(layer).format is None


def own_layer(*, is_serialized=False):
    """A layer that SGLang quantized itself, one scale per row, which lie in one row."""
    layer = channel_layer(torch.ones(256, 384).to(FP8).t())
    layer.weight_scale = nn.Parameter(torch.full((1, 256), 2.0), requires_grad=False)
    layer.scheme, layer.quant_method = None, Fp8LinearMethod()
    layer.quant_method.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=is_serialized)
    layer.quant_method.block_quant = False
    return layer


@pytest.fixture
def quantizer(monkeypatch):
    """Stands for SGLang's, by one of our rules."""
    asked = SimpleNamespace(rule=ScaleFormat.FP32, is_odd=False)

    def quantize(x, group_size):
        codes, scale = quantize_blockwise(x, block_size=(1, group_size), scale_format=asked.rule)
        return codes, scale * 2 if asked.is_odd else scale

    def quantize_whole(x):
        codes, scale = quantize(x.reshape(1, -1), x.numel())
        return codes.view(x.shape), scale.view(1)

    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization", SimpleNamespace(fp8=asked))
    asked.per_token_group_quant_fp8, asked.scaled_fp8_quant = quantize, quantize_whole
    for asks in (own_rows, own_weights):
        asks.cache_clear()
    yield asked
    for asks in (own_rows, own_weights):
        asks.cache_clear()


@pytest.mark.parametrize("rule", FLOAT_SCALES)
def test_rows_that_sglang_quantized_itself_have_the_rule_of_its_quantizer(rule, quantizer):
    quantizer.rule, layer = rule, own_layer()
    kernel = SglangRules(model_of(proj=layer)).kernel_of(layer)
    assert (kernel.name, kernel.format) == ("Fp8LinearMethod", BlockFormat(block_size=(1, WHOLE), scale_format=rule))
    own = dict(own_tensors(layer))
    assert own["weight"].shape == (256, 384) and own["weight_scale_inv"].shape == (256, 1)
    assert SglangRules(model_of(proj=layer)).dequantize(layer, torch.float32).eq(2).all()


def test_rows_by_another_rule_or_of_a_weights_one_scale_are_refused(quantizer):
    assert "Fp8LinearMethod" in only_refusal(model_of(proj=own_layer(is_serialized=True)))
    quantizer.is_odd = True
    assert "Fp8LinearMethod" in only_refusal(model_of(proj=own_layer()))


class Fp8MoEMethod:
    """SGLang's, after loading BF16 experts."""

    def __init__(self, *, is_serialized=False, runner="triton"):
        self.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=is_serialized)
        self.runner = SimpleNamespace(runner_backend=SimpleNamespace(value=runner))


def own_experts(**options):
    """Experts that SGLang quantized itself, each half with one scale."""
    experts = nn.Module()
    for half, shape in (("w13", (2, 256, 128)), ("w2", (2, 128, 128))):
        setattr(experts, f"{half}_weight", nn.Parameter(torch.zeros(shape).to(FP8), requires_grad=False))
        setattr(experts, f"{half}_weight_scale", nn.Parameter(torch.ones(2), requires_grad=False))
    experts.quant_method = Fp8MoEMethod(**options)
    return experts


@pytest.mark.parametrize("rule", FLOAT_SCALES)
def test_experts_that_sglang_quantized_itself_have_the_rule_of_its_quantizer(rule, quantizer):
    quantizer.rule, experts = rule, own_experts()
    kernel = SglangRules(model_of(experts=experts)).kernel_of(experts)
    assert (kernel.name, kernel.format) == ("triton", BlockFormat(block_size=(WHOLE, WHOLE), scale_format=rule))
    own = dict(own_tensors(experts))
    assert own["w13_weight_scale_inv"].shape == own["w2_weight_scale_inv"].shape == (2, 1, 1)


def test_experts_by_another_rule_or_kernel_or_by_w8a8_are_refused(quantizer):
    """SGLang casts BF16 experts to FP8 without scales if they are asked for by `w8a8_fp8`."""
    of_w8a8 = own_experts()
    of_w8a8.quant_method.__class__ = type("W8A8FP8MoEMethod", (Fp8MoEMethod,), {})
    for experts in (of_w8a8, own_experts(runner="marlin")):
        assert FROM_FP8 in only_refusal(model_of(experts=experts))
    quantizer.is_odd = True
    assert FROM_FP8 in only_refusal(model_of(experts=own_experts()))


def test_latent_attention_that_sglang_quantized_itself_is_refused(quantizer):
    """SGLang absorbs its projections before it quantizes them."""
    attention = nn.Module()
    attention.kv_b_proj, attention.w_kc, attention.w_vc = own_layer(), None, None
    assert why_not_absorbed(attention, is_known_rule=True)[0].startswith("absorbs its latent projections before")


def test_a_model_without_quantized_weights_is_refitted_and_its_log_says_what_to_boot_instead(caplog):
    assert read_inventory(model_of(proj=nn.Linear(128, 128))).refusals == ()
    (record,) = caplog.records
    assert "fp8refit quantize" in record.getMessage()
    assert 'a model without latent attention with quantization="fp8"' in record.getMessage()


@pytest.mark.parametrize("flag", ["w13_swiglu_interleaved", "use_flashinfer_trtllm_moe"])
def test_unquantized_experts_that_a_kernel_moved_are_refused(flag):
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 256, 128, dtype=torch.bfloat16), requires_grad=False)
    experts.quant_method = type("UnquantizedFusedMoEMethod", (), {flag: True})()
    assert "moves rows of experts" in only_refusal(model_of(experts=experts))


def test_packed_codes_are_refused_with_what_to_boot_instead():
    """NVFP4 of ModelOpt: another kernel for FP8 would not help."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(64, 8).to(FP8), requires_grad=False)
    layer.weight_scale_2 = nn.Parameter(torch.ones(1), requires_grad=False)
    rules = SglangRules(model_of(proj=layer))
    why = why_not_stored(rules, "layer", layer, dict(own_tensors(layer)))
    assert why is not None and why[1] == rules.other_quantization
