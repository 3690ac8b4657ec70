"""Policies of a Qwen3 shape, made on the GPU from a seed: random weights with the outlier channels that real ones have."""

import json
from pathlib import Path

import torch
from torch import Tensor

SHAPES = {
    "tiny": {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 4, "kv_heads": 2, "tied": False},
    "qwen3-0.6b": {"hidden": 1024, "intermediate": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "tied": True},
    "qwen3-0.6b-untied": {
        "hidden": 1024,
        "intermediate": 3072,
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "tied": False,
    },
    "qwen3-8b": {"hidden": 4096, "intermediate": 12288, "layers": 36, "heads": 32, "kv_heads": 8, "tied": False},
}
HEAD_DIM = 128
VOCAB_SIZE = 151936
NUM_OUTLIERS = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for trying a script on a tiny shape


def write_config(shape: str, folder: Path) -> None:
    """A `config.json` from which an engine builds the model."""
    size = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size["hidden"],
        "intermediate_size": size["intermediate"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": size["tied"],
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def tensor_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes."""
    size = SHAPES[shape]
    hidden, intermediate = size["hidden"], size["intermediate"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
    }
    if not size["tied"]:
        shapes["lm_head.weight"] = (VOCAB_SIZE, hidden)
    for layer in range(size["layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (size["heads"] * HEAD_DIM, hidden),
            prefix + "self_attn.k_proj.weight": (size["kv_heads"] * HEAD_DIM, hidden),
            prefix + "self_attn.v_proj.weight": (size["kv_heads"] * HEAD_DIM, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, size["heads"] * HEAD_DIM),
            prefix + "self_attn.q_norm.weight": (HEAD_DIM,),
            prefix + "self_attn.k_norm.weight": (HEAD_DIM,),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def allocate(shape: str) -> dict[str, Tensor]:
    """Room for one policy on the GPU."""
    return {name: torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for name, size in tensor_shapes(shape).items()}


def fill_policy(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Write policy number `seed` into `tensors`, as an optimizer writes its weights: in place."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor.normal_(1.0, 0.05, generator=generator)
            continue
        tensor.normal_(0.0, 0.02, generator=generator)
        channels = torch.randint(tensor.shape[1], (NUM_OUTLIERS,), generator=generator, device=DEVICE)
        tensor[:, channels] *= 12
    return tensors
