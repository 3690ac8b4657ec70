"""Static scales of activations: no policy brings them, so a refit keeps them, and brings them back after sleep."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fp8refit.live.slots import Refresh, Refusal
from fp8refit.tracing.stored import ACTIVATION_SCALES
from fp8refit.tracing.twin import refresh_of_constant


def read_activation_scales(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's static scales of activations to the host, by name.

    Call it before the engine sleeps.
    """
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _scales_of(model)}


def keep_activation_scales(
    model: nn.Module, values: Mapping[str, Tensor]
) -> tuple[tuple[Refresh, ...], tuple[Refusal, ...]]:
    """Return steps that restore static scales of activations, and refusals of layers that have none.

    Args:
        model: The live model.
        values: What they were when it booted; nothing of a dummy boot.
    """
    refreshes, refusals = [], []
    for name, tensor in _scales_of(model):
        value = values.get(name)
        if value is None or not torch.all((value > 0) & value.isfinite()):
            module, _, own = name.rpartition(".")
            reason = f"has no values for `{own}`, the static scale of its activations"
            remedy = "Boot it from a checkpoint that has them, not with dummy weights"
            refusals.append(Refusal(module=module, reason=reason, remedy=remedy))
        else:
            refreshes.append(replace(refresh_of_constant(name, tensor, value), is_constant=True, restores=False))
    return tuple(refreshes), tuple(refusals)


def _scales_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, each) for name, each in model.named_parameters() if name.rpartition(".")[2] in ACTIVATION_SCALES)
