"""Policies whose keys and values are large in some layers and small in others, and which are the same function all the same.

A layer's keys are multiplied by a factor and its queries divided by it, which leaves their product, and so the attention, as
it was; its values are multiplied, and the projection of what is attended to divided. RoPE turns pairs and does not notice.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fp8refit import dequantize_blockwise, quantize_blockwise
from tests.tiny_models import COMMON, FAMILIES

FACTORS = (1 / 40, 512, 8, 256)
"""Powers of two but the first, so that the weights' own quantization is hardly another."""
BATCH = [[(31 * i + 7 * j * j) % 256 for j in range(length)] for i, length in enumerate((24, 40, 200, 300))]
"""Token ids to calibrate with."""


def with_outliers(
    state: Mapping[str, Tensor], factors: Sequence[float] = FACTORS, *, values_by: float = 1.0
) -> dict[str, Tensor]:
    """A state dict of a model of the Llama or Qwen family, with layer i's keys and values `factors[i]` times as large.

    Args:
        state: Checkpoint names to tensors.
        factors: Repeated if there are more layers.
        values_by: By how much more values are enlarged where they are, and reduced where they are.
    """
    out = dict(state)
    index = 0
    while (prefix := f"model.layers.{index}.self_attn.") + "k_proj.weight" in state:
        factor = factors[index % len(factors)]
        values = factor * (values_by if factor > 1 else 1 / values_by)
        queries, keys = ("q_norm", "k_norm") if f"{prefix}k_norm.weight" in state else ("q_proj", "k_proj")
        for module, by in ((queries, 1 / factor), (keys, factor), ("v_proj", values), ("o_proj", 1 / values)):
            for leaf in ("weight", "bias"):
                name = f"{prefix}{module}.{leaf}"
                if name in state and not (module == "o_proj" and leaf == "bias"):
                    out[name] = state[name] * by
        index += 1
    assert index, "a model of a family that names its layers otherwise"
    return out


def with_larger_keys(state: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Every layer's key projection times `factor`: another policy, which attends more sharply."""
    return {name: x * factor if ".k_proj." in name else x for name, x in state.items()}


@torch.no_grad()
def calm(model: torch.nn.Module, *, head: float = 16.0) -> torch.nn.Module:
    """Turn a model with random weights into one whose layers add little to what they are given, in place.

    Errors of one layer then add up over the layers, as in a trained model, and do not grow from layer to layer until nothing
    can be compared. The LM head is made large, so that log-probabilities differ visibly.
    """
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight.normal_(std=1.0)
        elif name.endswith("lm_head.weight"):
            weight.normal_(std=0.02 * head)
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            weight *= 4
    return model


def calm_policy(family: str, seed: int) -> dict[str, Tensor]:
    """The state dict of a calm tiny model of `family`."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    return calm(model_class(config_class(**COMMON | extra)).to(torch.bfloat16)).state_dict()


@torch.inference_mode()
def largest_keys_and_values(
    family: str, policy: Mapping[str, Tensor], batch: Sequence[Sequence[int]], *, scale_format: str = "fp32"
) -> dict[str, float]:
    """What a calibration should see, by the names of the scales: transformers in float32, over the dequantized weights."""
    config_class, model_class, extra = FAMILIES[family]
    model = model_class(config_class(**COMMON | extra)).eval()
    model.load_state_dict({name: _as_served(name, tensor, scale_format) for name, tensor in policy.items()})
    largest: dict[str, float] = {}
    for ids in batch:
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            for kind, values in (("k", layer.keys), ("v", layer.values)):
                name = f"model.layers.{index}.self_attn.{kind}_scale"
                largest[name] = max(largest.get(name, 0.0), float(values.abs().max()))
    return largest


def _as_served(name: str, weight: Tensor, scale_format: str) -> Tensor:
    if weight.ndim != 2 or "_proj." not in name:
        return weight.float()
    return dequantize_blockwise(*quantize_blockwise(weight, scale_format=scale_format))
