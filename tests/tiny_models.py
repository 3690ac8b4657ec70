"""Tiny models of the families that engines refit, from configs alone, with the outlier channels that real ones have."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

VOCAB_SIZE = 259  # bytes and three specials: no multiple of 64, so that engines pad it

FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
"""The `quantization_config` that makes vLLM build a block-FP8 model from a plain `config.json`."""

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""Latent attention, with the latents and the rotary embedding that engines know on a CPU, and no experts."""

EXPERTS = {
    "head_dim": 128,
    "num_attention_heads": 2,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
"""Experts whose rows two ranks cut at whole blocks, or share out; two heads, likewise."""

FAMILIES = {
    # Queries of low rank, fused with the latents of keys and values, of which 576 rows are no whole number of blocks.
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | {"q_lora_rank": 128}),
    # What SGLang's draft needs: experts in the last layer, and what transformers has no names for.
    "deepseek_v3_experts": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LATENT
        | {
            "q_lora_rank": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 256,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | {"q_lora_rank": None}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"head_dim": 64, "tie_word_embeddings": False}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    # Heads of 128 and two of them: block FP8 is cut between two ranks at whole blocks.
    "qwen2_wide": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "num_attention_heads": 2}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 128, "tie_word_embeddings": False}),
    # A tensor larger than the smallest bucket.
    "qwen3_large": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 128, "tie_word_embeddings": False, "intermediate_size": 2304},
    ),
    # Layers enough for keys and values of several sizes.
    "llama_deep": (
        LlamaConfig,
        LlamaForCausalLM,
        {"head_dim": 64, "tie_word_embeddings": False, "num_hidden_layers": 4},
    ),
    "qwen3_deep": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 128, "tie_word_embeddings": False, "num_hidden_layers": 4},
    ),
    "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 128, "tie_word_embeddings": True}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 256},
    ),
    # Routers of whole tiles.
    "qwen3_moe_many": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        EXPERTS | {"num_experts": 64, "moe_intermediate_size": 128},
    ),
    # Saved under names of its own: `block_sparse_moe.experts.0.w1`. Later layers are told from the first ones.
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        EXPERTS | {"num_local_experts": 8, "intermediate_size": 256, "num_hidden_layers": 4},
    ),
    # A shared expert behind a gate of its own, biases, a dense layer before the others, and no square stack.
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        EXPERTS
        | {
            "num_experts": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 256,
            "mlp_only_layers": [0],
        },
    ),
    # A shared expert, a router in float32, and what corrects its choices.
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        EXPERTS
        | {
            "n_routed_experts": 4,
            "moe_intermediate_size": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        {"head_dim": 64, "tie_word_embeddings": False, "sliding_window": None},
    ),
    # Queries, keys and values in one tensor of the checkpoint, gate and up in another. Between two ranks whole blocks.
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {"num_attention_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0},
    ),
    "glm4": (
        Glm4Config,
        Glm4ForCausalLM,
        {
            "head_dim": 128,
            "num_attention_heads": 2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "pad_token_id": 0,
        },
    ),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 64, "sliding_window": 64, "query_pre_attn_scalar": 64}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 64,
            "sliding_window": 64,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 2.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
    ),
    # Through vLLM's Transformers backend.
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"tie_word_embeddings": False}),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM, {"tie_word_embeddings": True, "use_bias": True}),
    # What is not as in Llama: a shared expert within the layer of experts; what corrects a router's choices beside it;
    # numbers of an activation that are buffers; heads whose queries, keys and values take turns; another name for the LM head
    # and other ones for layers; all experts in one tensor of a checkpoint; linear attention; and a recurrence of its own.
    "dots1": (
        Dots1Config,
        Dots1ForCausalLM,
        EXPERTS
        | {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 256, "first_k_dense_replace": 1},
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        {
            "head_dim": 128,
            "num_attention_heads": 2,
            "tie_word_embeddings": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 256,
            "moe_layer_start_index": 1,
        },
    ),
    "apertus": (ApertusConfig, ApertusForCausalLM, {"head_dim": 64, "tie_word_embeddings": False, "pad_token_id": 0}),
    "bloom": (BloomConfig, BloomForCausalLM, {"n_layer": 2, "n_head": 4}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"tie_word_embeddings": False}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_inner": 512}),
    "granitemoe": (
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        EXPERTS | {"num_local_experts": 4, "intermediate_size": 256, "pad_token_id": 0},
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        EXPERTS
        | {
            "num_experts": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "pad_token_id": 0,
        },
    ),
    "falcon_h1": (
        FalconH1Config,
        FalconH1ForCausalLM,
        {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "pad_token_id": 0},
    ),
    "cohere": (CohereConfig, CohereForCausalLM, {"tie_word_embeddings": True, "use_qk_norm": True, "pad_token_id": 0}),
}


def make_model(family: str, seed: int) -> PreTrainedModel:
    """A BF16 model of `family`; every seed is another policy of the same shape."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    return fill(model_class(config_class(**COMMON | extra)).to(torch.bfloat16))


def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Give every parameter values of its own, by torch's seed."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                if not weight.any():  # some models begin with routers of zeros
                    weight.normal_(std=0.02)
                weight *= 4
                weight[..., torch.randint(weight.shape[-1], (2,))] *= 20  # outlier channels
                if weight.ndim == 3:
                    weight[-1, :128] = 0  # blocks without a value, as experts have that no token went to
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
            else:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                bias = 0.1 * torch.randn(module.e_score_correction_bias.shape)  # float32
                is_parameter = "e_score_correction_bias" in module._parameters
                module.e_score_correction_bias = torch.nn.Parameter(bias) if is_parameter else bias
    return model.eval()


def add_small_blocks(model: PreTrainedModel) -> None:
    """Make some blocks of each matrix zeros, and others smaller than the floors of quantizers."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight[..., :128, :128] = 0
                weight[..., :128, 128:256] *= 1e-12
                weight[..., 128:256, :128] *= 1e-6


def save_model(
    family: str, seed: int, folder: Path, *, change: Callable[[PreTrainedModel], None] | None = None
) -> PreTrainedModel:
    """`make_model`, changed and saved to `folder`."""
    model = make_model(family, seed)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    return model


def drafting(family: str, policy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a published checkpoint of `family` holds beside a policy: one layer that drafts tokens, as it is named there."""
    last = {name: tensor for name, tensor in policy.items() if name.startswith("model.layers.1.")}
    embedding, head = policy["model.embed_tokens.weight"], policy["lm_head.weight"]
    wide, norm = torch.cat((embedding[:256], head[:256]), dim=1), torch.ones(256, dtype=torch.bfloat16)
    if family == "qwen3_next":
        layer, joint, norms = "mtp.layers.0.", "mtp.fc.weight", ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        rest = {f"mtp.{each}.weight": norm for each in norms}
    else:
        layer, joint = "model.layers.2.", "model.layers.2.eh_proj.weight"
        rest = {f"{layer}{each}.weight": norm for each in ("enorm", "hnorm", "shared_head.norm")}
        rest |= {f"{layer}embed_tokens.weight": embedding, f"{layer}shared_head.head.weight": head}
    found = {name.replace("model.layers.1.", layer): tensor for name, tensor in last.items()} | {joint: wide} | rest
    return dict(part for name, tensor in found.items() for part in _single(name, tensor))


def _single(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor as checkpoints hold it: experts one by one."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts") or tensor.ndim < 3:
        yield name, tensor
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    for expert, matrix in enumerate(tensor):
        yield from (
            (f"{stem}.{expert}.{part}.weight", each) for part, each in zip(parts, matrix.chunk(len(parts)), strict=True)
        )


def save_with_draft(family: str, seed: int, folder: Path) -> None:
    """`save_model`, with a layer that drafts tokens."""
    from safetensors.torch import save_file

    drafts = drafting(family, save_model(family, seed, folder).state_dict())
    (folder / "model.safetensors").rename(folder / "model-0.safetensors")
    save_file({name: tensor.clone() for name, tensor in drafts.items()}, folder / "model-1.safetensors")
