"""Policies of known shapes, made on the GPU from a seed: random weights with the outlier channels that real ones have.

Names are those of a transformers 5 state dict, in which the experts of a layer are stacked; `expert_by_expert` gives the same
memory under the names of a checkpoint.
"""

from typing import Any

import torch
from torch import Tensor

from fp8refit.bench.policies import fill as fill_policy
from fp8refit.bench.shapes import SHAPES, write_config

__all__ = ["SHAPES", "allocate", "expert_by_expert", "fill_policy", "tensor_shapes", "write_config"]

HEAD_DIM = 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for trying a script on a tiny shape


def tensor_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a state dict."""
    config = SHAPES[shape]
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    attention = _latent_attention if "kv_lora_rank" in config else _attention
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        is_sparse = layer >= config.get("first_k_dense_replace", 0 if "num_experts" in config else layer + 1)
        mlp = _experts(config) if is_sparse else _mlp(hidden, config["intermediate_size"])
        shapes |= {f"{prefix}self_attn.{name}": size for name, size in attention(config).items()}
        shapes |= {f"{prefix}mlp.{name}": size for name, size in mlp.items()}
        shapes |= dict.fromkeys(
            (f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"), (hidden,)
        )
    return shapes


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    rows = {"q_proj": heads * HEAD_DIM, "k_proj": kv_heads * HEAD_DIM, "v_proj": kv_heads * HEAD_DIM}
    biases = {f"{name}.bias": (size,) for name, size in rows.items()}
    norms = {"q_norm.weight": (HEAD_DIM,), "k_norm.weight": (HEAD_DIM,)}
    has_norms = config["model_type"].startswith("qwen3") or config.get("use_qk_norm")
    return {
        **{f"{name}.weight": (size, hidden) for name, size in rows.items()},
        "o_proj.weight": (hidden, heads * HEAD_DIM),
        **(biases if config["attention_bias"] else {}),
        **(norms if has_norms else {}),
    }


def _latent_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, q_rank, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        "q_a_proj.weight": (q_rank, hidden),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }


def _mlp(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (intermediate, hidden),
        "up_proj.weight": (intermediate, hidden),
        "down_proj.weight": (hidden, intermediate),
    }


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    count = config.get("num_experts") or config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (count, hidden),
        "experts.gate_up_proj": (count, 2 * intermediate, hidden),
        "experts.down_proj": (count, hidden, intermediate),
    }
    if config.get("topk_method") == "noaux_tc" or config["model_type"] == "glm4_moe":
        shapes["gate.e_score_correction_bias"] = (count,)
    if shared := config.get("n_shared_experts"):
        shapes |= {f"shared_experts.{name}": size for name, size in _mlp(hidden, shared * intermediate).items()}
    return shapes


def allocate(shape: str) -> dict[str, Tensor]:
    """Room for one policy on the GPU. The router's correction is float32, as models keep it."""
    return {
        name: torch.empty(size, dtype=torch.float32 if "correction" in name else torch.bfloat16, device=DEVICE)
        for name, size in tensor_shapes(shape).items()
    }


def expert_by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of the same memory, under the names of a checkpoint."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 3:
            found[name] = tensor
            continue
        module, _, part = name.rpartition(".")
        for expert, matrix in enumerate(tensor):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for leaf, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{module}.{expert}.{leaf}.weight"] = rows
    return found
