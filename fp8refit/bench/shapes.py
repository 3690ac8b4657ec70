"""Named models: the configs that engines build them from."""

import json
import os
from pathlib import Path
from typing import Any

from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.formats import NVFP4, BlockFormat, Container, quantization_config

CHECKPOINTS: dict[str, tuple[BlockFormat, Container]] = {"nvfp4": (NVFP4, Container.MODELOPT)}
"""Formats other than block FP8 with which engines boot from checkpoints, and do not quantize BF16 weights themselves."""

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_DEEPSEEK_V3 = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_GLM4_MOE = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "eos_token_id": 151329,
}


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


def _experts(count: int, intermediate: int) -> dict[str, Any]:
    return {"num_experts": count, "moe_intermediate_size": intermediate}


def _routed(count: int, intermediate: int, per_token: int, groups: int, top_groups: int) -> dict[str, Any]:
    return {
        "n_routed_experts": count,
        "moe_intermediate_size": intermediate,
        "num_experts_per_tok": per_token,
        "n_group": groups,
        "topk_group": top_groups,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3 | _size(256, 512, 2, 4, 2, vocab_size=1024),
    "tiny-moe": _QWEN3_MOE | _size(256, 512, 2, 4, 2, vocab_size=1024, num_experts_per_tok=2) | _experts(8, 256),
    "qwen3-0.6b": _QWEN3 | _size(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _QWEN3 | _size(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _QWEN3 | _size(4096, 12288, 36, 32, 8),
    "qwen3-30b-a3b": _QWEN3_MOE | _size(2048, 6144, 48, 32, 4) | _experts(128, 768),
    "llama-3.1-8b": _LLAMA | _size(4096, 14336, 32, 32, 8),
    "llama-3.1-70b-8layers": _LLAMA | _size(8192, 28672, 8, 64, 8),
    "deepseek-v3-4layers": _DEEPSEEK_V3
    | _size(7168, 18432, 4, 128, 128, first_k_dense_replace=3)
    | _routed(256, 2048, 8, 8, 4),
    # For engine tests: separate LM head, experts that four ranks cut at block borders, latent attention.
    "qwen3-0.6b-untied": _QWEN3 | _size(1024, 3072, 28, 16, 8),
    "qwen3-moe-small": _QWEN3_MOE | _size(2048, 6144, 4, 32, 4) | _experts(32, 1024),
    "deepseek-small": _DEEPSEEK_V3 | _size(2048, 6144, 4, 16, 16, first_k_dense_replace=1) | _routed(32, 1024, 4, 4, 2),
    # If the number of experts is not a power of two, as in GLM, SGLang routes with a different kernel.
    "glm4-moe-small": _GLM4_MOE | _size(2048, 6144, 4, 32, 4, first_k_dense_replace=1) | _routed(40, 1024, 8, 1, 1),
}
"""Published configs of whole models, and of a few layers of models that do not fit on one GPU."""


def write_config(shape: str, folder: Path) -> None:
    """Write the `config.json` of a named shape into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))


def block_fp8(model: Path, quantization: str | None = None) -> dict[str, object]:
    """The quantization entry of `config.json` in block-FP8 checkpoints of `model`, or in one of `CHECKPOINTS`: routers stay in
    BF16.
    """
    config = json.loads((model / "config.json").read_text())
    kept = [f"model.layers.{layer}.mlp.gate" for layer in _routed_layers(config)]
    if quantization is None:
        return quantization_config(kept=kept)
    block_format, container = CHECKPOINTS[quantization]
    return quantization_config(block_format, ["lm_head", *kept], container)


def _routed_layers(config: dict[str, Any]) -> list[int]:
    if not (config.get("num_experts") or config.get("n_routed_experts")):
        return []
    first, step = config.get("first_k_dense_replace", 0), config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    layers = range(first, config["num_hidden_layers"])
    return [layer for layer in layers if (layer + 1) % step == 0 and layer not in dense]


def folder_of(model: str, scratch: Path) -> Path:
    """Return the folder of a model; a named shape gets one under `scratch`.

    Raises:
        UnsupportedEngineError: It is neither a named shape nor a folder with a readable `config.json`.
    """
    if model in SHAPES:
        write_config(model, scratch / "model")
        return scratch / "model"
    file = Path(model) / "config.json"
    if not os.path.isfile(file):  # unlike Path.is_file, does not raise if the name is too long
        raise UnsupportedEngineError(
            f"{model} is neither a folder with a config.json nor one of the shapes {', '.join(SHAPES)}"
        )
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedEngineError(f"{file}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise UnsupportedEngineError(f"{file}: is not a JSON object")
    return Path(model)
