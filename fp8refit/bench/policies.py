"""Weights for any engine: random, from a seed, with the outlier channels that real ones have."""

import torch
from torch import Tensor

from fp8refit.layout import EngineLayout

NUM_OUTLIERS = 6


def allocate(layout: EngineLayout, device: torch.device) -> dict[str, Tensor]:
    """Room for one policy of an engine, by checkpoint names: float32 where the engine keeps float32, else BF16."""
    return {
        slot.name: torch.empty(
            slot.full_shape, dtype=torch.float32 if slot.dtype == "float32" else torch.bfloat16, device=device
        )
        for slot in layout.slots
    }


def fill(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Write policy number `seed`, as an optimizer writes its weights: in place."""
    for index, tensor in enumerate(tensors.values()):
        generator = torch.Generator(tensor.device).manual_seed(seed * 100_003 + index)
        if tensor.ndim < 2:
            tensor.normal_(1.0, 0.05, generator=generator)
            continue
        tensor.normal_(0.0, 0.02, generator=generator)
        channels = torch.randint(tensor.shape[-1], (NUM_OUTLIERS,), generator=generator, device=tensor.device)
        tensor[..., channels] *= 12
    return tensors
