"""What every live tensor of an engine of one rank must hold, by SGLang's names; looks at neither slots nor plan."""

import hashlib
from collections.abc import Mapping

import torch
from observer import KV_SCALES
from torch import Tensor

from fp8refit import quantize_blockwise

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's linear layers that hold several of a checkpoint's."""


def expected_bytes(
    policy: Mapping[str, Tensor], shapes: Mapping[str, list[int]], booted: Mapping[str, str]
) -> dict[str, str]:
    """A sha256 for each live tensor.

    Args:
        policy: Unquantized, by the checkpoint's names.
        shapes: Of the live tensors, padding included.
        booted: The hashes when the engine was booted. What no policy names (rotary tables) stays so.
    """
    return {
        name: booted[name] if tensor is None else hashlib.sha256(_raw(tensor).numpy()).hexdigest()
        for name, tensor in ((name, _expected(name, policy, shapes)) for name in shapes)
    }


def _expected(name: str, policy: Mapping[str, Tensor], shapes: Mapping[str, list[int]]) -> Tensor | None:
    if name.endswith(KV_SCALES):  # a boot from a checkpoint without them leaves 1.0
        return torch.ones(shapes[name])
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    is_scale = leaf == "weight_scale_inv"
    source = "weight" if is_scale else leaf
    fused = () if f"{module}.{source}" in policy else FUSED.get(last, ())
    sources = [f"{parent}.{part}.{source}".lstrip(".") for part in fused or (last,)]
    if not set(sources) <= set(policy):
        return None
    parts = [policy[source] for source in sources]
    if is_scale or (leaf == "weight" and f"{module}.weight_scale_inv" in shapes):
        quantized = [quantize_blockwise(part, scale_format="fp32") for part in parts]
        parts = [scale if is_scale else codes.view(torch.uint8) for codes, scale in quantized]
    tensor = torch.cat(parts)
    padding = shapes[name][0] - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros((padding, *tensor.shape[1:]))])


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
