"""The embedded engine on real, tiny Hugging Face models: bytes, logits, ties, dirt, admission, numerics."""

import asyncio
import copy

import pytest
import torch
from fp8refit_transformers import BlockFp8Linear, TransformersEngine, to_block_fp8
from fp8refit_transformers.admission import refusal_of
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from fp8refit import (
    EngineDirtyError,
    InvalidSourceError,
    Refitter,
    UnsupportedEngineError,
    dequantize_blockwise,
    quantize_blockwise,
)
from fp8refit.live.formats import BlockFormat

SIZES = {
    "vocab_size": 97,
    "hidden_size": 160,
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = [
    pytest.param(LlamaConfig, id="llama"),
    pytest.param(Qwen2Config, id="qwen2-bias"),
    pytest.param(Qwen3Config, id="qwen3"),
    pytest.param(MistralConfig, id="mistral"),
]
TIES = [pytest.param(True, id="tied"), pytest.param(False, id="untied")]
PROMPT = torch.arange(2, 14).view(2, 6)


def make_policy(config_class=Qwen3Config, *, seed=0, tied=False, dtype=torch.bfloat16, **sizes):
    torch.manual_seed(seed)
    config = config_class(**SIZES | sizes, tie_word_embeddings=tied)
    policy = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def make_engine(policy):
    return to_block_fp8(copy.deepcopy(policy))


def live_bytes(model):
    return {name: tensor.contiguous().view(-1).view(torch.uint8).clone() for name, tensor in model.state_dict().items()}


def assert_same_bytes(engine, expected):
    got, want = live_bytes(engine), live_bytes(expected)
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different


def logits(model):
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


@pytest.mark.parametrize("tied", TIES)
@pytest.mark.parametrize("config_class", FAMILIES)
def test_refitted_engine_equals_one_booted_from_the_policy(config_class, tied):
    engine = make_engine(make_policy(config_class, seed=1, tied=tied))
    policy = make_policy(config_class, seed=2, tied=tied)
    booted = make_engine(policy)
    assert not torch.equal(logits(engine), logits(booted))
    addresses = {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}

    report = Refitter(engine).refit(policy.state_dict())

    assert report.version == 1 and report.engine == "transformers"
    assert_same_bytes(engine, booted)
    assert torch.equal(logits(engine), logits(booted))
    assert addresses == {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}
    tokens = [model.generate(PROMPT, max_new_tokens=8, do_sample=False) for model in (engine, booted)]
    assert tokens[0].shape == (2, 14)
    assert torch.equal(*tokens)


def test_qwen2_has_the_biases_that_these_tests_move():
    engine = make_engine(make_policy(Qwen2Config))
    biased = [name for name in engine.state_dict() if name.endswith("q_proj.bias")]
    assert len(biased) == SIZES["num_hidden_layers"]


def test_a_policy_in_training_may_be_the_source_and_the_engine():
    engine = to_block_fp8(make_policy(seed=1).train())
    policy = make_policy(seed=2).train()
    Refitter(engine).refit(dict(policy.named_parameters()))
    assert engine.training and all(module.training for module in engine.modules())
    assert_same_bytes(engine, make_engine(policy))
    assert not [name for name, parameter in engine.named_parameters() if parameter.grad is not None]


@pytest.mark.parametrize("is_late", [False, True])
def test_weights_that_are_tied_without_their_scales_are_refused_by_name(is_late):
    engine, policy = make_engine(make_policy(seed=1)), make_policy(seed=2)
    refitter = Refitter(engine)
    if is_late:
        refitter.refit(policy.state_dict())
    mlp = engine.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    before = live_bytes(engine)
    with pytest.raises(UnsupportedEngineError, match="nothing was written") as raised:
        refitter.refit(policy.state_dict())
    (reason,) = raised.value.reasons
    prefix = "model.layers.0.mlp"
    assert reason.startswith(
        f"{prefix}.gate_proj.weight: its weight shares memory with the weight of {prefix}.up_proj.weight"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in live_bytes(engine).items())
    mlp.up_proj.weight_scale_inv = mlp.gate_proj.weight_scale_inv
    policy.model.layers[0].mlp.up_proj.weight = policy.model.layers[0].mlp.gate_proj.weight
    refitter.refit(policy.state_dict())
    assert refitter.layout().aliases == {f"{prefix}.up_proj.weight": f"{prefix}.gate_proj.weight"}


def test_refusals_do_not_pile_up_and_the_last_reason_is_told():
    engine = make_engine(make_policy())
    adapter = TransformersEngine(engine)
    asyncio.run(adapter.refuse("first"))
    asyncio.run(adapter.refuse("second"))
    with pytest.raises(EngineDirtyError, match="second"):
        engine(input_ids=PROMPT)
    asyncio.run(adapter.resume())
    asyncio.run(adapter.resume())
    assert refusal_of(engine) is None
    assert logits(engine).shape == (2, 6, SIZES["vocab_size"])


def test_an_engine_that_left_its_device_is_not_written():
    engine = make_engine(make_policy(seed=1))
    refitter = Refitter(engine)
    refitter.refit(make_policy(seed=2).state_dict())
    engine.to("meta")
    with pytest.raises(UnsupportedEngineError, match="are on meta"):
        refitter.refit(make_policy(seed=3).state_dict())
    assert refitter.version == 1


def test_integer_buffers_may_come_along():
    policy = make_policy(seed=2)
    policy.register_buffer("num_steps", torch.tensor(3))
    engine = make_engine(make_policy(seed=1))
    engine.register_buffer("num_steps", torch.tensor(1))
    report = Refitter(engine).refit(policy.state_dict())
    assert report.ignored == ("num_steps",)


def test_wrapped_modules_of_the_engine_go_by_their_checkpoint_names():
    policy, engine = make_policy(seed=2), make_engine(make_policy(seed=1))
    for index, layer in enumerate(engine.model.layers):
        engine.model.layers[index] = torch.compile(layer, backend="eager")
    Refitter(engine).refit(policy.state_dict())
    assert torch.equal(
        engine.model.layers[0]._orig_mod.mlp.up_proj.weight, make_engine(policy).model.layers[0].mlp.up_proj.weight
    )


def test_a_plain_model_is_refused_with_the_way_out():
    with pytest.raises(UnsupportedEngineError, match="to_block_fp8"):
        Refitter(make_policy())


def test_accepts_hugging_face_models_only():
    assert TransformersEngine.accepts(make_policy())
    assert not TransformersEngine.accepts(nn.Linear(2, 2))
    assert not TransformersEngine.accepts(LlamaConfig())


def test_a_model_without_linears_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 8)

        def get_output_embeddings(self):
            return self.head

    with pytest.raises(UnsupportedEngineError, match=r"no nn\.Linear"):
        to_block_fp8(Bare())


def test_only_codes_and_scales_are_kept():
    policy = make_policy()
    linears = [module for name, module in policy.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    others = sum(tensor.nbytes for tensor in (*policy.parameters(), *policy.buffers())) - sum(
        linear.weight.nbytes for linear in linears
    )
    expected = others + sum(
        linear.weight.numel() + 4 * -(-linear.out_features // 128) * -(-linear.in_features // 128) for linear in linears
    )
    engine = to_block_fp8(policy)
    logits(engine)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in engine.modules()
        for tensor in vars(module).values()
        if isinstance(tensor, torch.Tensor)
    }
    assert not held
    assert sum(tensor.nbytes for tensor in (*engine.parameters(), *engine.buffers())) == expected


def test_state_dict_is_a_block_fp8_checkpoint():
    state = make_engine(make_policy()).state_dict()
    weight, scale = (state[f"model.layers.0.mlp.up_proj.weight{suffix}"] for suffix in ("", "_scale_inv"))
    assert (weight.dtype, tuple(weight.shape)) == (torch.float8_e4m3fn, (272, 160))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (3, 2))
    assert state["lm_head.weight"].dtype is torch.bfloat16


def test_other_block_sizes():
    policy = make_policy(seed=2)
    engine = to_block_fp8(make_policy(seed=1), block_size=(32, 64))
    Refitter(engine).refit(policy.state_dict())
    assert engine.model.layers[0].mlp.up_proj.weight_scale_inv.shape == (9, 3)
    assert_same_bytes(engine, to_block_fp8(policy, block_size=(32, 64)))


def test_routers_and_stacked_experts_keep_their_dtype_and_are_refitted():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    engine = make_engine(make_policy(Qwen3MoeConfig, seed=1, **sizes))
    policy = make_policy(Qwen3MoeConfig, seed=2, **sizes)
    Refitter(engine).refit(policy.state_dict())
    assert engine.model.layers[0].mlp.gate.weight.dtype is torch.bfloat16
    assert isinstance(engine.model.layers[0].self_attn.q_proj, BlockFp8Linear)
    assert_same_bytes(engine, make_engine(policy))


@pytest.mark.parametrize(
    ("entry", "kept"),
    [
        ("model.layers.0.mlp.up_proj", {"model.layers.0.mlp.up_proj"}),
        ("up_proj", {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"}),
        ("model.layers.1.mlp", {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}),
        ("*.1.self_attn.[qk]_proj", {f"model.layers.1.self_attn.{part}_proj" for part in "qk"}),
        ("proj", set()),
    ],
)
def test_ignored_modules_stay_as_they_are(entry, kept):
    policy = make_policy()
    policy.config.quantization_config = {"modules_to_not_convert": [entry]}
    engine = to_block_fp8(policy)
    left = {name for name, module in engine.named_modules() if type(module) is nn.Linear}
    assert left == kept | {"lm_head"}


def test_layout_names_kernels_and_formats():
    layout = Refitter(make_engine(make_policy())).layout()
    kinds = {slot.name: (slot.kernel, slot.scale_format) for slot in layout.slots}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == ("BlockFp8Linear", "fp32")
    assert kinds["model.embed_tokens.weight"] == ("Embedding", None)
    assert kinds["model.norm.weight"] == ("Qwen3RMSNorm", None)
    assert not [name for name in kinds if name.endswith("_scale_inv")]
    assert layout.versions["torch"] == torch.__version__


@pytest.mark.parametrize("is_quantized", [False, True], ids=["bf16", "block-fp8"])
def test_boot_reads_a_folder(tmp_path, is_quantized):
    policy = make_policy(seed=5)
    expected = make_engine(policy)
    if is_quantized:
        policy = make_engine(policy)
        policy.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    policy.save_pretrained(tmp_path)
    assert_same_bytes(TransformersEngine.boot(str(tmp_path)), expected)


def test_boot_makes_weights_up_if_there_is_only_a_config(tmp_path):
    make_policy().config.save_pretrained(tmp_path)
    assert torch.isfinite(logits(TransformersEngine.boot(str(tmp_path)))).all()


def test_boot_names_a_file_that_is_corrupt(tmp_path):
    make_policy(seed=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(InvalidSourceError, match=r"model\.safetensors: cannot be read as safetensors"):
        TransformersEngine.boot(str(tmp_path))


def test_boot_refuses_what_is_no_folder(tmp_path):
    with pytest.raises(UnsupportedEngineError, match=r"no config\.json"):
        TransformersEngine.boot(str(tmp_path / "absent"))


def reference_product(x, linear, block_size):
    """The layer's arithmetic in plain loops over groups, float64."""
    weight = dequantize_blockwise(
        *quantize_blockwise(linear.weight.detach(), block_size=block_size), block_size=block_size
    )
    rows = x.reshape(-1, x.shape[-1]).float()
    parts = []
    for group in rows.split(block_size[1], dim=1):
        scale = group.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
        parts.append((group / scale).to(torch.float8_e4m3fn).double() * scale.double())
    product = torch.cat(parts, 1) @ weight.double().t()
    if linear.bias is not None:
        product += linear.bias.double()
    return product.view(*x.shape[:-1], product.shape[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(256, 128), (200, 72), (1, 1), (127, 300)])
@pytest.mark.parametrize("lead", [(3,), (2, 5), (), (0,), (1, 2, 2)], ids=str)
def test_linear_is_the_product_of_what_the_codes_mean(lead, num_in, num_out, bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(num_in, num_out, bias=bias, dtype=torch.bfloat16)
    layer = BlockFp8Linear.from_linear(linear, BlockFormat())
    x = torch.randn(*lead, num_in).to(dtype)
    y = layer(x)
    assert y.dtype is dtype and y.shape == (*lead, num_out)
    expected = reference_product(x, linear, (128, 128))
    tolerance = 8e-3 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_linear_is_near_the_unquantized_product():
    torch.manual_seed(0)
    linear = nn.Linear(512, 256, dtype=torch.bfloat16)
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    layer = BlockFp8Linear.from_linear(linear, BlockFormat())
    exact = functional.linear(x.float(), linear.weight.float(), linear.bias.float())
    error = (layer(x).float() - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.05


def test_outlier_tokens_do_not_disturb_their_neighbours():
    torch.manual_seed(0)
    layer = BlockFp8Linear.from_linear(nn.Linear(256, 64), BlockFormat())
    x = torch.randn(4, 256)
    spiked = x.clone()
    spiked[2, 7] = 1e6
    assert torch.equal(layer(x)[[0, 1, 3]], layer(spiked)[[0, 1, 3]])
    assert torch.equal(layer(torch.zeros(2, 256)), layer.bias.expand(2, 64))


def test_nan_activations_stay_visible():
    layer = BlockFp8Linear.from_linear(nn.Linear(128, 64), BlockFormat())
    x = torch.ones(2, 128)
    x[1, 0] = torch.nan
    y = layer(x)
    assert torch.isfinite(y[0]).all() and torch.isnan(y[1]).all()


def join_norms(way):
    """Have an attention join two norms at its first forward, and keep them."""

    def hook(attention, arguments, keywords):
        if not vars(attention).get("has_joined"):
            attention.has_joined = True
            way(attention, torch.cat([attention.q_norm.weight, attention.k_norm.weight]).detach())

    return hook


@pytest.mark.parametrize(
    ("way", "named"),
    [
        (lambda layer, joined: setattr(layer, "joined", joined), "joined"),
        (lambda layer, joined: setattr(layer, "held", {"norms": joined}), "held['norms']"),
        (lambda layer, joined: layer.register_buffer("joined", joined, persistent=False), "joined"),
        (lambda layer, joined: setattr(layer, "read", lambda: joined), "read.joined"),
    ],
    ids=["attribute", "dict", "buffer", "closure"],
)
def test_copies_that_a_model_makes_at_its_first_forward_are_refused_by_name(way, named):
    engine = make_engine(make_policy())
    for layer in engine.model.layers:
        layer.self_attn.register_forward_pre_hook(join_norms(way), with_kwargs=True)
    with Refitter(engine) as refitter:
        refitter.refit(make_policy(seed=1).state_dict())
        said = engine(PROMPT).logits
        with pytest.raises(UnsupportedEngineError) as refused:
            refitter.refit(make_policy(seed=2).state_dict())
        reasons = "\n".join(refused.value.reasons)
        assert [f"model.layers.{layer}.self_attn: keeps `{named}`" in reasons for layer in (0, 1)] == [True] * 2
        assert torch.equal(engine(PROMPT).logits, said)
