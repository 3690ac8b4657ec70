"""What a rank's live model holds and where, read without fp8refit, in the process that holds it."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def raw(tensor: Tensor) -> Tensor:
    """Its bytes, one after another."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(raw(tensor).numpy()).hexdigest()


def digests(live: Mapping[str, Tensor]) -> dict[str, str]:
    """A sha256 for each tensor."""
    return {name: digest(tensor) for name, tensor in live.items()}


def named(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, by all of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def places(live: Mapping[str, Tensor]) -> dict[str, list]:
    """Identity, address and layout of each tensor."""
    return {
        name: [id(tensor), tensor.data_ptr(), list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]
        for name, tensor in live.items()
    }


def padding(model: nn.Module) -> dict[str, int]:
    """How many bytes there are in rows after this rank's part of the vocabulary, and how many of them are not zero."""
    layers = [module for module in model.modules() if hasattr(module, "shard_indices")]
    rows = [raw(layer.weight[layer.shard_indices.num_org_elements :]) for layer in layers]
    return {
        "num_bytes": sum(row.numel() for row in rows),
        "num_set": sum(int(row.count_nonzero()) for row in rows),
    }
