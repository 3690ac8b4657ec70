"""Unified precision: the trainer computes with the codes and scales that the engine serves.

`unify` turns a trainer's linears and experts into block-FP8 layers and keeps their master weights. The forward pass uses
codes and scales in the format of each engine slot, computed by the quantizer of `refit`, and quantizes inputs as the
engine's kernel does. The gradient is straight-through. A refit then ships those bytes and quantizes nothing.

    unified = precision.unify(model, like=refitter.layout())
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        report = refitter.refit(unified.served())

Norms and rotary embeddings round where the engine's do. Attention and activation functions remain the trainer's.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.errors import PrecisionError
from fp8refit.live.formats import BlockFormat
from fp8refit.live.layout import EngineLayout
from fp8refit.live.names import is_adapter_weight, is_not_a_weight, strip_wrappers
from fp8refit.training.precision.formats import Held, held_by
from fp8refit.training.precision.layers import make_experts, make_linear, make_rounded
from fp8refit.training.precision.native import block_scaled
from fp8refit.training.precision.rounding import round_once
from fp8refit.training.precision.shards import has_fsdp, shard_axis
from fp8refit.training.precision.weights import TrainedWeights

__all__ = ["Unified", "block_scaled", "unify"]

_EXPERTS = {"gate_up_proj", "down_proj"}


def unify(model: nn.Module, *, like: EngineLayout) -> "Unified":
    """Make `model` compute with the codes and scales that an engine with the layout `like` serves. In place, all or
    nothing.

    Modules, parameters and state dict stay the same: optimizers, checkpoints and FSDP see the BF16 or fp32 master
    weights. Weights that the engine does not quantize (embeddings, norms, LM head, routers) are cast to the engine's
    dtype if the master is wider. Each forward pass and `Unified.served` compare weights with their codes by value, and
    compute those that changed. Inputs may have any dtype; the engine computes in BF16. On a GPU, BF16 inputs (also from
    autocast) are multiplied in FP8 if torchao is installed (`pip install '.[precision]'` in a clone). Otherwise operands are
    dequantized and multiplied in float32. If norms and rotary embeddings of the engine compute
    in float32 and round once (`like.rounds_once`), those of the model do, too.

    With FSDP2, call `fully_shard` first; it then gathers codes, one byte per weight. With `torch.compile`, compile after
    this call. Calling `model` costs one graph break at the start. A compiled part that is called by itself notices only
    the steps of optimizers; call `refresh` after other changes.

    Args:
        model: A causal LM whose parameters have checkpoint names, such as one from transformers. Linears must be
            `nn.Linear`; experts may be stacks as in Qwen3-MoE, or separate linears.
        like: `refitter.layout()` of the engine.

    Returns:
        A handle that keeps the codes up to date and gives them to `refit`.

    Raises:
        PrecisionError: The model and the engine have different weights, or one cannot be unified; names each. Nothing was
            changed.
    """
    if not isinstance(like, EngineLayout):
        raise PrecisionError([f"like: is of type {type(like).__name__}; pass refitter.layout()"])
    if any(vars(module).keys() & {"trained_weight", "trained_weights"} for module in model.modules()):
        raise PrecisionError(
            ["model: is unified already; use the handle of that call, or unify a new copy of the weights"]
        )
    held = held_by(like)
    problems: list[str] = []
    linears: list[tuple[str, nn.Linear, BlockFormat]] = []
    experts: dict[nn.Module, dict[str, tuple[str, BlockFormat]]] = {}
    rounded: dict[nn.Module, dict[str, torch.dtype]] = {}
    filled: set[str] = set()
    for module, key, name, parameter in _parameters(model):
        wanted = held.get(like.aliases.get(name, name))
        problem = _problem(model, module, key, name, parameter, wanted)
        if problem is not None:
            problems.append(f"{name}: {problem}")
        if wanted is None or problem is not None:
            continue
        filled |= {*wanted.slots}
        if wanted.block_format is None:
            dtype = getattr(torch, wanted.dtype)
            if torch.promote_types(parameter.dtype, dtype) != dtype:
                rounded.setdefault(module, {})[key] = dtype
        elif isinstance(module, nn.Linear):
            linears.append((name, module, wanted.block_format))
        else:
            experts.setdefault(module, {})[key] = (name, wanted.block_format)
    if not problems:
        problems += [
            f"{slot.name}: is in this engine but not in the model" for slot in like.slots if slot.name not in filled
        ]
        problems += [
            f"{next(iter(parts.values()))[0]}: only part of its experts is block FP8"
            for parts in experts.values()
            if len(parts) < 2
        ]
    if problems:
        raise PrecisionError(list(dict.fromkeys(problems)))
    weights = TrainedWeights(model)
    for name, linear, block_format in linears:
        make_linear(linear, weights.add(name, linear, "weight", block_format))
        rounded.pop(linear, None)  # an Fp8Linear casts its bias to the dtype of its product
    for module, parts in experts.items():
        make_experts(module, {key: weights.add(name, module, key, held_as) for key, (name, held_as) in parts.items()})
    for module, dtypes in rounded.items():
        make_rounded(module, dtypes)
    if like.rounds_once:
        round_once(model)
    return Unified(model, weights)


class Unified:
    """A model that computes with an engine's codes and scales, from `unify`.

    A copy of the model has its own codes. `copy.deepcopy((model, unified))` copies both together.

    Attributes:
        model: The model that was passed to `unify`.
    """

    def __init__(self, model: nn.Module, weights: TrainedWeights) -> None:
        self.model = model
        self._weights = weights
        weights.attach(weights.weights)
        weights.watch()

    def refresh(self) -> int:
        """Compute codes and scales of weights that changed since the last time. With FSDP, call it on every rank.

        Returns:
            How many weights had changed.

        Raises:
            NonFiniteError: Weights hold NaN or Inf; names them.
        """
        return self._weights.refresh()

    def served(self) -> dict[str, Tensor]:
        """Return what `refit` takes: codes and scales as the forward pass uses them, and all other tensors as the model
        holds them.

        With FSDP, call it on every rank; it then returns DTensors, which `refit` gathers.

        Returns:
            Checkpoint names and tensors, valid until the next step: the codes are not copied.

        Raises:
            NonFiniteError: Weights hold NaN or Inf; names them.
        """
        tensors = {strip_wrappers(name): tensor for name, tensor in self.model.state_dict().items()}
        self._weights.refresh()
        for weight in self._weights.weights:
            tensors |= weight.served()
        return tensors


def _parameters(model: nn.Module) -> Iterable[tuple[nn.Module, str, str, Tensor]]:
    """Yield module, name within it, checkpoint name, and parameter."""
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module, key, strip_wrappers(f"{prefix}.{key}" if prefix else key), parameter


def _problem(
    model: nn.Module, module: nn.Module, key: str, name: str, parameter: Tensor, held: Held | None
) -> str | None:
    """Say why a parameter cannot be unified."""
    if held is None:
        if is_adapter_weight(name):
            return "belongs to a LoRA adapter; merge it into the model (merge_and_unload)"
        return None if is_not_a_weight(name) else "this engine has no such weight"
    if tuple(parameter.shape) != held.shape:
        return f"has shape {list(parameter.shape)}, but {list(held.shape)} in this engine"
    if held.block_format is None:
        return None
    if not (_is_linear(module, key) or _is_experts(module, key)):
        return f"this engine holds it as block FP8, but {type(module).__name__} is neither nn.Linear nor a stack of experts"
    if parameter.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"is {parameter.dtype}; master weights are bfloat16, float16 or float32"
    return _sharding_problem(model, parameter)


def _sharding_problem(model: nn.Module, parameter: Any) -> str | None:
    if not hasattr(parameter, "placements"):
        return None
    try:
        shard_axis(parameter)
    except ValueError as error:
        return str(error)
    if not has_fsdp(model):
        return "is a DTensor not made by FSDP2; shard with fully_shard alone"
    if parameter.device_mesh.device_type != parameter.device.type:
        return "is offloaded to the CPU, where FSDP cannot gather its codes"
    return None


def _is_linear(module: nn.Module, key: str) -> bool:
    return isinstance(module, nn.Linear) and key == "weight" and type(module).forward is nn.Linear.forward


def _is_experts(module: nn.Module, key: str) -> bool:
    return key in _EXPERTS and set(module._parameters) == _EXPERTS and hasattr(module, "_apply_gate")
