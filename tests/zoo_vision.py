"""Tiny vision-language models, their checkpoints, and the language half of what a trainer holds. No fp8refit, no engine.

A language model that `zoo_models` makes small stands behind a tower of two layers. Trainers often leave towers frozen and
never send them: `language_of` is what they send then, and `TOWERS` names the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from tests import zoo_models
from tests.tiny_models import fill

TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim"), 128),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **{"intermediate_size": 256, "head_dim": 64, "image_size": 56, "patch_size": 14, "num_position_embeddings": 16},
    **{"out_hidden_size": 256, "projection_dim": 256, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0]},
    **{"projector_input_dim": 128, "projector_output_dim": 128, "vision_output_dim": 128, "num_patches": 16},
    "vision_use_head": False,  # as published
}
"""For every field of this name that the config of a tower has. A tower's output is as wide as the language model."""

LANGUAGE: dict[str, dict[str, Any]] = {
    "Glm4vForConditionalGeneration": {"attention_bias": True},
    "Qwen3VLMoeForConditionalGeneration": {"mlp_only_layers": [], "norm_topk_prob": True, "moe_intermediate_size": 384},
}
"""What a family's language model wants beyond `zoo_models.SMALL`."""
_IMAGE_TOKENS = {"image_token_id": 250, "image_token_index": 250, "video_token_id": 251, "video_token_index": 251}
_MARKS = {"boi_token_index": 252, "eoi_token_index": 253, "vision_start_token_id": 252, "vision_end_token_id": 253}
WHOLE: dict[str, Any] = {**_IMAGE_TOKENS, **_MARKS, "mm_tokens_per_image": 4, "projection_dim": 256, "scale_factor": 2}
WHOLE |= {"alignment_intermediate_size": 512}
"""For every field of this name that the config of a whole model has."""
EXTRA: dict[str, dict[str, Any]] = {}
"""What a family's config wants otherwise."""

ARCHITECTURES = [
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
]

EXPERT_BY_EXPERT = ("Qwen3VLMoeForConditionalGeneration",)
"""Those whose experts come in stacks that engines' loaders take one by one too."""

TOWERS = ("*visual*", "*vision*", "*multi_modal_projector*", "*connector*", "*image_newline*")
"""Patterns of the names, in a state dict and in a checkpoint, of all that is not a language model."""


def tiny_config(architecture: str) -> PretrainedConfig:
    """A small config of a vision-language class of transformers', with `architectures` set."""
    config_class = getattr(transformers, architecture).config_class
    default = config_class()
    text, vision = default.text_config, default.vision_config
    small = {name: value for name, value in WHOLE.items() if hasattr(default, name)}
    parts = {
        "text_config": zoo_models.small_values(type(text), LANGUAGE.get(architecture, {})),
        "vision_config": {
            name: value for name, value in TOWER.items() if hasattr(vision, name) or name == "vision_use_head"
        },
    }
    for part, kind in (("text_config", text), ("vision_config", vision)):
        parts[part] = {"model_type": kind.model_type, **parts[part]}
    for name, value in EXTRA.get(architecture, {}).items():
        if name in parts:
            parts[name] |= value
        else:
            small[name] = value
    return config_class(**small, **parts, architectures=[architecture])


def build(architecture: str) -> PreTrainedModel:
    """A model, as transformers makes it."""
    return getattr(transformers, architecture)(tiny_config(architecture))


def make(architecture: str, seed: int) -> PreTrainedModel:
    """A BF16 model; every seed is another policy of the same shape, with every parameter changed.

    It is saved under published names, as if it had been loaded from a published checkpoint, and in published shapes, which
    transformers 5 does not bring back (`check_dims`).
    """
    torch.manual_seed(seed)
    model = fill(build(architecture).to(torch.bfloat16))
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    for conversion in model._weight_conversions:
        for operation in getattr(conversion, "operations", ()):
            if hasattr(operation, "check_dims"):
                operation.check_dims = False
    return model


def expert_by_expert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with stacks of experts cut into the tensors that checkpoints of one tensor per expert have."""
    cut = {}
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
        if not (prefix.endswith(".experts") and parts):
            cut[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                cut[f"{prefix}.{expert}.{part}.weight"] = rows
    return cut


def is_of_tower(name: str) -> bool:
    """Whether a tensor of this name is none of the language model's."""
    return any(fnmatch(name, pattern) for pattern in TOWERS)


def language_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a trainer sends of a state dict whose towers are frozen."""
    return {name: tensor for name, tensor in state.items() if not is_of_tower(name)}


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Two policies of one model, and what an engine of it is told."""

    first: dict[str, Tensor]
    """Every tensor."""
    second: dict[str, Tensor]
    """What a trainer sends next: of a vision-language model its language half."""
    keep: tuple[str, ...] = ()
    """Patterns of what it does not send."""


def policies_of(architecture: str, folder: Path) -> Policies:
    """Two policies of any model; what an engine then holds of both is saved as a BF16 checkpoint.

    Args:
        architecture: A class of transformers'.
        folder: To be written.
    """
    build = make if architecture in ARCHITECTURES else zoo_models.make
    model, first = build(architecture, 2), build(architecture, 1).state_dict()
    second = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if architecture not in ARCHITECTURES:
        zoo_models.save(model, folder)
        return Policies(first=first, second=second)
    second = language_of(second)
    model.load_state_dict({name: tensor for name, tensor in first.items() if name not in second}, strict=False)
    model.save_pretrained(folder)
    return Policies(first=first, second=second, keep=TOWERS)
