"""A tiny model of every causal language model that transformers has, and block-FP8 checkpoints of it. No fp8refit, no engine.

A config is made small by the names that its fields have; what a class wants beyond that is in `EXTRA`. Heads, experts and
hidden sizes are multiples of 128, so that engines can hold their matrices in block FP8.
"""

import hashlib
import inspect
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.tiny_models import FAMILIES, FP8_CONFIG, VOCAB_SIZE, fill

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 256),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "ffn_hidden_size"), 512),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "global_head_dim", "v_head_dim"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 256),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 256),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_freq", "decoder_sparse_step", "moe_layer_interval"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "first_k_dense", "moe_layer_start_index"), 1),
    **{"vocab_size": VOCAB_SIZE, "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 0, "sep_token_id": None},
    **{"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    **{"mamba_d_ssm": 512, "mamba_n_heads": 128, "mamba_d_head": 4, "mamba_d_state": 128},
    **{"mamba_num_heads": 128, "mamba_head_dim": 4, "ssm_state_size": 128, "state_size": 16},
    **{"mamba_n_groups": 1, "n_groups": 1},
    **{"num_nextn_predict_layers": 0, "mtp_num_layers": 0, "rotary_dim": 64},
}
"""For every field of this name that a config has."""

LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern")
"""Fields with an entry a layer: of the kinds that a default config has, the first layers get one each."""

EXTRA: dict[str, dict[str, Any]] = {
    **{model_class.__name__: extra for _, model_class, extra in FAMILIES.values()},
    "DeepseekV2ForCausalLM": FAMILIES["deepseek_v2"][2],
    "DeepseekV3ForCausalLM": FAMILIES["deepseek_v3"][2],
    "LlamaForCausalLM": FAMILIES["llama"][2],
    "Qwen2ForCausalLM": FAMILIES["qwen2_wide"][2],
    "Qwen3ForCausalLM": FAMILIES["qwen3"][2],
    "CodeGenForCausalLM": {"n_head": 4},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 256, "hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    # As published configs have it, and transformers does not write it.
    "GemmaForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "HunYuanDenseV1ForCausalLM": {"use_qk_norm": True},
    "HunYuanMoEV1ForCausalLM": {
        "use_qk_norm": True,
        "moe_intermediate_size": 512,
        "use_mixed_mlp_moe": 1,
        "num_shared_expert": 1,
    },
    # SGLang quantizes the gates of value heads too.
    **{
        name: FAMILIES["qwen3_next"][2]
        | {"full_attention_interval": 2, "linear_num_value_heads": 128, "linear_num_key_heads": 64}
        for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
    },
    # Engines' Transformers backends pad no vocabulary.
    "GPTNeoXForCausalLM": {"vocab_size": 320, "tie_word_embeddings": False},
    "NemotronForCausalLM": {"vocab_size": 320},
    "PhiForCausalLM": {"intermediate_size": 1024},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "Qwen2MoeForCausalLM": FAMILIES["qwen2_moe"][2] | {"mlp_only_layers": []},
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "FalconForCausalLM": {"ffn_hidden_size": 1024},
    "HYV3ForCausalLM": {"route_norm": True, "first_k_dense_replace": 1, "expert_hidden_dim": 256, "qk_norm": True},
    "LagunaForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
    "MellumForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
    "MiniMaxM2ForCausalLM": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "rotary_dim": 64,
    },
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", "full_attention"],
        **{
            "block_dim": 256,
            "conv_dim": 256,
            "block_ff_dim": 512,
            "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": False,
        },
        "block_ffn_dim_multiplier": 1.0,
    },
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "Zamba2ForCausalLM": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "Mamba2ForCausalLM": {
        "num_heads": 128,
        "head_dim": 4,
        "state_size": 128,
        "intermediate_size": 512,
        "rms_norm": True,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "MiMoV2FlashForCausalLM": {
        **{"v_head_dim": 128, "layernorm_epsilon": 1e-5, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]},
        **{
            "num_attention_heads": 4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 128,
            "swa_v_head_dim": 128,
        },
        "sliding_window_size": 64,
        "add_swa_attention_sink_bias": True,
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""What a class wants otherwise."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "KimiLinearForCausalLM": {
        "linear_attn_config": {
            **{
                "num_heads": 2,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "kda_layers": [1],
                "full_attn_layers": [2],
            },
        },
        "first_k_dense_replace": 1,
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "mamba_n_groups": 1},
}
"""Fields that a published config.json has and engines read, where transformers writes others."""


def architectures() -> list[str]:
    """Every causal language model that transformers has, by the name of its class."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    flat = (name for found in names for name in ((found,) if isinstance(found, str) else found))
    return sorted(dict.fromkeys(flat))


def tiny_config(architecture: str) -> PretrainedConfig:
    """A small config of a class of transformers', with `architectures` set.

    Raises:
        Exception: transformers has no such class, or cannot make it small; whatever it says.
    """
    config_class = getattr(transformers, architecture).config_class
    return config_class(**small_values(config_class, EXTRA.get(architecture, {})), architectures=[architecture])


def small_values(config_class: type[PretrainedConfig], extra: dict[str, Any]) -> dict[str, Any]:
    """What makes a config small: `extra`, and for every other field its value in `SMALL`."""
    default = config_class()
    fields = {name for name in {*default.to_dict(), *inspect.signature(config_class).parameters} if name != "kwargs"}
    small = {name: value for name, value in SMALL.items() if name in fields and name not in extra}
    if "qk_rope_head_dim" in fields:
        small.pop("head_dim", None)
    num_layers = (small | extra).get("num_hidden_layers", 2)
    for name in LAYERS:
        kinds = getattr(default, name, None)
        name = getattr(config_class, "attribute_map", {}).get(name, name)
        if kinds and not isinstance(getattr(config_class, name, None), property):
            small[name] = _first_of_each(kinds, num_layers)
    return small | extra


def _first_of_each(kinds: Any, num_layers: int) -> Any:
    """One layer of each kind, as far as there are layers; the last kind again if there are more."""
    found = list(dict.fromkeys(kinds))[:num_layers]
    found += [found[-1]] * (num_layers - len(found))
    return "".join(found) if isinstance(kinds, str) else found


def make(architecture: str, seed: int) -> PreTrainedModel:
    """A BF16 model; every seed is another policy of the same shape, with every parameter changed."""
    torch.manual_seed(seed)
    return fill(getattr(transformers, architecture)(tiny_config(architecture)).to(torch.bfloat16))


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save a BF16 checkpoint of it, with the config.json of a published one."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | PUBLISHED.get(type(model).__name__, {})))


def names_in(folder: Path) -> set[str]:
    """Of the tensors of a checkpoint."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def hashes_in(folder: Path) -> dict[str, str]:
    """A sha256 for each tensor of a checkpoint; of what is not quantized the name alone, as its dtype is the engine's."""
    tensors = dict(item for file in folder.glob("*.safetensors") for item in load_file(file).items())
    scaled = {name for name in tensors if name.removesuffix("_scale_inv") + "_scale_inv" in tensors}
    return {name: hash_of(tensor) if name in scaled else "" for name, tensor in tensors.items()}


def hash_of(tensor: Tensor) -> str:
    """As engines' `live_bytes` gives it."""
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def quantized_in(layout: Any) -> set[str]:
    """Names of a checkpoint's tensors that an engine of this layout holds in block FP8; of stacks, not of their matrices."""
    names = {slot.name for slot in layout.slots if slot.scale_format}
    parts = {
        part for name in layout.written_as for stack in layout.stacked if stack.name == name for part in stack.parts
    }
    return names - parts | {stack.name for stack in layout.stacked if parts & stack.parts.keys()}


def save_block_fp8(
    source: Path, folder: Path, quantized: Iterable[str], written_as: Mapping[str, Sequence[str]]
) -> None:
    """The block-FP8 checkpoint of a BF16 one, by a quantizer that shares nothing with fp8refit's.

    Args:
        source: Folder of `save`.
        folder: To be written.
        quantized: Names of its matrices that are to be quantized; of stacks, one matrix after another.
        written_as: Names to give some of them, or the parts of their experts' matrices.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_CONFIG}))
    chosen, tensors = set(quantized), {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name in chosen:
                for written, part in parts_of(tensor, written_as.get(name, [name])):
                    tensors[written], tensors[f"{written}_scale_inv"] = quantize(part)
                chosen.remove(name)
            else:
                tensors[name] = tensor
    assert not chosen, f"{chosen=}"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def parts_of(tensor: Tensor, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """A tensor under its one name, or equal parts of each of its matrices, with the number of its expert for `{}`."""
    if "{}" not in names[0]:
        yield names[0], tensor
        return
    for expert, matrix in enumerate(tensor):
        yield from zip((name.format(expert) for name in names), matrix.chunk(len(names)), strict=True)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales in blocks of 128 x 128, of a matrix or of each of a stack: `amax / 448` in float32, to nearest."""
    if weight.ndim == 3:
        codes, scales = zip(*map(quantize, weight), strict=True)
        return torch.stack([one.view(torch.uint8) for one in codes]).view(torch.float8_e4m3fn), torch.stack(scales)
    values = weight.float()
    rows, cols = values.shape
    whole = torch.zeros(-(-rows // 128) * 128, -(-cols // 128) * 128)
    whole[:rows, :cols] = values
    tiles = whole.unfold(0, 128, 128).unfold(1, 128, 128)
    scale = tiles.abs().amax((2, 3)).clamp(min=1e-10) / torch.tensor(448.0)
    inverse = (1 / scale).repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    return (values * inverse).clamp(-448, 448).to(torch.float8_e4m3fn).contiguous(), scale
