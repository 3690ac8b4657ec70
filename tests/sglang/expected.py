"""What every live tensor of an engine of one rank, and experts of any, must hold; looks at neither slots nor plan."""

from collections.abc import Mapping

import torch
from observer import KV_SCALES
from torch import Tensor

from fp8refit import quantize_blockwise
from tests.engines.looking import digest

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
        name: booted[name] if tensor is None else digest(tensor)
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


def expected_experts(policy: Mapping[str, Tensor], names: list[list[str]], ep_size: int) -> list[dict[str, str]]:
    """A sha256 for each live tensor of layers of experts, rank by rank.

    Args:
        policy: Unquantized, with experts stacked.
        names: Of the live tensors of each rank.
        ep_size: Over how many groups of ranks experts are dealt out; the ranks of a group cut each of theirs.
    """
    num_cuts = len(names) // ep_size
    return [
        {name: digest(_expected_experts(name, policy, rank, num_cuts, ep_size)) for name in live if ".experts." in name}
        for rank, live in enumerate(names)
    ]


def _expected_experts(name: str, policy: Mapping[str, Tensor], rank: int, num_cuts: int, ep_size: int) -> Tensor:
    module, _, leaf = name.replace(".block_sparse_moe.", ".mlp.").rpartition(".")
    group, cut = divmod(rank, num_cuts)
    held = []
    for matrix in policy[f"{module}.{'gate_up' if leaf.startswith('w13') else 'down'}_proj"].chunk(ep_size)[group]:
        parts = (
            [part.chunk(num_cuts)[cut] for part in matrix.chunk(2)]
            if leaf.startswith("w13")
            else [matrix.chunk(num_cuts, 1)[cut]]
        )
        quantized = [quantize_blockwise(part, scale_format="fp32") for part in parts]
        held.append(
            torch.cat([scale if leaf.endswith("scale_inv") else codes.view(torch.uint8) for codes, scale in quantized])
        )
    return torch.stack(held)
