"""What a model with LoRA adapters trains, as the policy that an engine serves: whole weights, merged one at a time.

The model stays as it is. Reads the modules of the `peft` library, and does not import it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.names import strip_wrappers


def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model under its checkpoint name, with its active LoRA adapters in it: `W + s B A`.

    Holds one merged tensor at a time, which is the reader's. It is computed in the dtype of `W`, products added up in fp32 and
    rounded once. Modules that were trained whole (`modules_to_save`) are given as they were trained; adapters that are merged
    already, or disabled, are left at that.

    Args:
        model: A `PeftModel`, or any model with layers of `peft`.

    Raises:
        InvalidSourceError: At once: names every layer whose adapter is more than `s B A`, such as DoRA.

    Examples:
        >>> refitter.refit(lambda: fp8refit.peft.merged(model))      # doctest: +SKIP
    """
    layers = dict(_layers(model))
    problems = [f"{name}: {why}; call merge_adapter() and send the state dict" for name, why in _problems(layers)]
    if problems:
        raise InvalidSourceError(problems)
    return _merged(layers)


def _merged(layers: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for name, module in layers.items():
        values: dict[str, Tensor] = {}
        base = getattr(module, "base_layer", None) if _is_adapted(module) else module
        assert isinstance(base, nn.Module), f"{name=}"
        values |= dict(base.named_parameters(recurse=False))
        values |= {
            key: each for key, each in base.named_buffers(recurse=False) if key not in base._non_persistent_buffers_set
        }
        for key, value in values.items():
            path = strip_wrappers(f"{name}.{key}" if name else key)
            if path in seen:
                continue
            seen.add(path)
            yield path, _merge(module, value) if base is not module and key == "weight" else value.detach()


def _layers(module: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds weights of its own, by the name that it has without adapters."""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        active = module.active_adapters[0] if module.active_adapters else None
        saved = module.modules_to_save
        is_trained = active is not None and active in saved and not getattr(module, "disable_adapters", False)
        yield from _layers(saved[active] if is_trained else module.original_module, name)
        return
    yield name, module
    if _is_adapted(module):
        return
    for key, child in module.named_children():
        yield from _layers(child, f"{name}.{key}" if name else key)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _active(layer: Any) -> list[str]:
    """Adapters that a layer applies and that its weight does not hold yet."""
    if layer.disable_adapters:
        return []
    adapters = [*layer.lora_A, *getattr(layer, "lora_embedding_A", ())]
    return [each for each in layer.active_adapters if each in adapters and each not in layer.merged_adapters]


def _problems(layers: dict[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for name, layer in layers.items():
        if not _is_adapted(layer):
            if hasattr(layer, "base_layer"):
                yield name, f"is adapted by {type(layer).__name__}, which is no LoRA that fp8refit can merge"
            continue
        if any(True for _ in layer.base_layer.children()):  # type: ignore[union-attr]
            yield name, f"is adapted by {type(layer).__name__}, around a layer with layers of its own"
        for adapter in _active(layer):
            variants = getattr(layer, "lora_variant", {})
            if adapter in variants or getattr(layer, "use_dora", {}).get(adapter):
                yield name, "has an adapter that is more than a product of two matrices"
            elif getattr(layer, "lora_bias", {}).get(adapter):
                yield name, "has an adapter with a bias"


@torch.no_grad()
def _merge(layer: Any, weight: Tensor) -> Tensor:
    value = weight.detach()
    for adapter in _active(layer):
        if isinstance(layer.base_layer, nn.Linear):
            down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            value = torch.addmm(value, up.to(value.dtype), down.to(value.dtype), alpha=layer.scaling[adapter])
        else:
            value = value + layer.get_delta_weight(adapter).to(value.dtype)
    return value
