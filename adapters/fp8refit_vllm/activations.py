"""Static scales of activations: no policy brings them, so a refit writes those with which the engine booted."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from fp8refit.live.slots import Refresh, Refusal

ACTIVATION_SCALES = frozenset({"input_scale", "w13_input_scale", "w2_input_scale"})
"""What vLLM calls them: of what a linear layer, or either projection of experts, is given."""


def read_activation_scales(model: nn.Module) -> dict[str, Tensor]:
    """Copy the scales of a model by name, before the engine can sleep, which loses them."""
    return {name: tensor.detach().clone() for name, tensor in _scales_of(model)}


def restore_activation_scales(
    model: nn.Module, values: Mapping[str, Tensor]
) -> tuple[tuple[Refresh, ...], tuple[Refusal, ...]]:
    """Return the step that writes the scales, and a refusal for each layer that never had any.

    Args:
        model: The live model.
        values: What `read_activation_scales` gave at boot; nothing of a dummy boot.
    """
    live, refusals = dict(_scales_of(model)), []
    for name, tensor in live.items():
        value = values.get(name)
        if value is None or value.shape != tensor.shape or not torch.all((value > 0) & value.isfinite()):
            module, _, own = name.rpartition(".")
            reason = f"did not boot with values for `{own}`, the static scale of its activations"
            remedy = "Boot it, with fp8refit's plugin, from a checkpoint that has them, not with dummy weights"
            refusals.append(Refusal(module=module, reason=reason, remedy=remedy))
    if not live or refusals:
        return (), tuple(refusals)
    return (as_booted("static scales of activations", live, values),), ()


def as_booted(what: str, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Refresh:
    """The step that gives live tensors the values with which the engine booted, by name."""
    written = tuple(live.values())
    return Refresh(name=what, run=partial(_write, written, [values[name] for name in live]), written=written)


def _scales_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, each) for name, each in model.named_parameters() if name.rpartition(".")[2] in ACTIVATION_SCALES)


@torch.inference_mode()
def _write(tensors: tuple[Tensor, ...], values: list[Tensor]) -> None:
    torch._foreach_copy_(tensors, values)
