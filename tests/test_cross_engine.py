"""The digest that every engine is held to is that of the public quantizer and of `fp8refit quantize`."""

import json

import torch
from safetensors.torch import load_file, save_file

from fp8refit import quantize_blockwise
from fp8refit.checkpoint import quantize_checkpoint
from tests.cross_engine import DIGEST, FUSED, SCALE, as_checkpoint, digest_of, make_policy


def quantized():
    checkpoint = {}
    for name, tensor in make_policy().items():
        if name.endswith("_proj.weight"):
            checkpoint[name], scale = quantize_blockwise(tensor, scale_format="fp32")
            checkpoint[f"{name.removesuffix('.weight')}.{SCALE}"] = scale
        else:
            checkpoint[name] = tensor
    return checkpoint


def test_the_public_quantizer_gives_the_digest():
    assert digest_of(quantized()) == DIGEST


def test_a_quantized_checkpoint_has_the_digest(tmp_path):
    (tmp_path / "bf16").mkdir()
    save_file(make_policy(), tmp_path / "bf16" / "model.safetensors")
    (tmp_path / "bf16" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8")
    tensors = {}
    for file in sorted((tmp_path / "fp8").glob("*.safetensors")):
        tensors |= load_file(file)
    assert digest_of(tensors) == DIGEST


def test_the_digest_sees_names_weights_and_scales():
    checkpoint = quantized()
    name = "model.layers.1.mlp.up_proj"
    others = [
        {**checkpoint, f"{name}.weight": checkpoint["model.layers.0.mlp.up_proj.weight"]},
        {**checkpoint, f"{name}.{SCALE}": checkpoint["model.layers.0.mlp.up_proj.weight_scale_inv"]},
        {key.replace("layers.1", "layers.2"): tensor for key, tensor in checkpoint.items()},
    ]
    assert DIGEST not in [digest_of(other) for other in others]


def test_fused_layers_are_taken_apart_and_padding_is_left_out():
    live = quantized()
    for fused, parts in FUSED.items():
        fuse(live, parts, fused)
    live["lm_head.weight"] = torch.cat([live["lm_head.weight"], torch.ones(61, 256, dtype=torch.bfloat16)])
    assert "model.layers.0.self_attn.q_proj.weight" not in live
    assert digest_of(as_checkpoint(live)) == DIGEST


def fuse(live, parts, fused):
    for layer in (0, 1):
        owner = f"model.layers.{layer}." + ("self_attn" if fused == "qkv_proj" else "mlp")
        for leaf in ("weight", SCALE):
            tensors = [live.pop(f"{owner}.{part}.{leaf}") for part in parts]
            raw = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
            live[f"{owner}.{fused}.{leaf}"] = raw.view(tensors[0].dtype)
