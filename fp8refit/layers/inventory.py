"""Reads slots off a live model by what its modules hold, never by the class of the model.

A block-FP8 linear module is one with a float8_e4m3fn matrix `weight` and a float32 matrix `weight_scale_inv`. Weights of
any other quantized form are refused by name: their kernel repacked them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.layers.experts import is_experts, slots_of_experts, stacks_of_experts, why_not_experts
from fp8refit.layers.naming import CheckpointNames, Rename, same_name
from fp8refit.layers.rules import LayerRules, Why
from fp8refit.layers.shards import Shard, joined, part_sizes, shards_of, why_not_sharded
from fp8refit.live import live_tensors
from fp8refit.names import experts_name, other_spellings
from fp8refit.slots import FP8_DTYPE, Inventory, Refusal, Slot, Stacked, dtype_name

_SOURCE_LIKE = (torch.bfloat16, torch.float16, torch.float32)


def read_inventory(model: nn.Module, rules: LayerRules, rename: Rename = same_name) -> Inventory:
    """Everything a refit of `model` writes, and everything it cannot.

    Args:
        model: The live model.
        rules: Its engine's ways.
        rename: What its engine calls otherwise than the checkpoint, beside fused modules.
    """
    names = CheckpointNames(model, rename)
    slots: list[Slot] = []
    refusals: list[Refusal] = []
    stacked: list[Stacked] = []
    padding: list[Tensor] = []
    names_by_storage: dict[tuple[int, torch.Size], str] = {}
    aliases: dict[str, str] = {}
    is_split = any(rules.ranks_of(module)[1] != 1 for module in model.modules())
    for prefix, module in _named_modules(model):
        own = _own_tensors(rules, module)
        for name, tensor in list(own.items()):
            full_name = f"{prefix}.{name}"
            first = (
                names_by_storage.setdefault((tensor.data_ptr(), tensor.shape), full_name)
                if tensor.numel()
                else full_name
            )
            if first != full_name:
                aliases |= dict.fromkeys(names.of(full_name), names.usual(first))
                del own[name]
        why = rules.why_refused(module)
        if why is None and own:
            why = _why_refused(rules, prefix, module, own, names, is_split=is_split)
        if why is not None:
            refusals.append(Refusal(module=prefix or type(module).__name__, reason=why[0], remedy=why[1]))
        elif is_experts(module):
            experts = names.usual(experts_name(prefix))
            slots.extend(slots_of_experts(rules, prefix, module, name=experts))
            stacked.extend(stacks_of_experts(rules, prefix, module, name=experts))
        elif own:
            for slot, other_names in _slots_of(rules, prefix, module, own, names):
                slots.append(slot)
                aliases |= dict.fromkeys(other_names, slot.name)
            padding.extend(_padding_of(rules, module, own))
    if not refusals and not any(slot.is_quantized for slot in slots):
        reason, remedy = "holds no block-FP8 weight", rules.remedies.no_block_fp8
        refusals.append(Refusal(module=type(model).__name__, reason=reason, remedy=remedy))
    plain = (slot.name for slot in slots if "experts." not in slot.name)
    aliases |= {alias: name for name in (*plain, *(stack.name for stack in stacked)) for alias in other_spellings(name)}
    aliases |= _tied_head(model, slots, names, taken={*aliases, *(slot.name for slot in slots)})
    return Inventory(
        slots=tuple(slots),
        live=live_tensors(model),
        aliases=aliases,
        stacked=tuple(stacked),
        padding=tuple(padding),
        refusals=tuple(refusals),
    )


def _tied_head(model: nn.Module, slots: list[Slot], names: CheckpointNames, *, taken: set[str]) -> dict[str, str]:
    """The LM head's names, of a model that is tied and keeps no head of its own."""
    vocabularies = [slot for slot in slots if hasattr(model.get_submodule(slot.module), "shard_indices")]
    if len(vocabularies) != 1 or not names.is_tied or "lm_head.weight" in taken:
        return {}
    return {"lm_head.weight": vocabularies[0].name}


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module, and a vocabulary that is tied under each of its names.

    Other layers are known under one name: attention holds those that it calls once more, under names of no checkpoint.
    """
    seen: set[nn.Module] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if module not in seen or hasattr(module, "shard_indices") or isinstance(module, nn.Embedding):
            yield prefix, module
        seen.add(module)


def _own_tensors(rules: LayerRules, module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint gives `module` itself, beside its children."""
    kept = rules.kept(module)
    return {name: tensor.data for name, tensor in module._parameters.items() if tensor is not None and name not in kept}


def _slots_of(
    rules: LayerRules, prefix: str, module: nn.Module, own: dict[str, Tensor], names: CheckpointNames
) -> Iterator[tuple[Slot, tuple[str, ...]]]:
    """Slots, and the other checkpoint names of each."""
    parts = names.parts_of(prefix, len(part_sizes(rules, module) or (1,)))
    for name, tensor in own.items():
        if name == "weight_scale_inv":
            continue
        shards = shards_of(rules, module, tensor)
        if len(set(parts)) < len(parts):
            shards = joined(shards)
        for part, shard in zip(parts, shards, strict=True):
            is_block_fp8 = name == "weight" and "weight_scale_inv" in own
            checkpoint_name, *other_names = names.of(f"{part}.{name}")
            slot = Slot(
                name=checkpoint_name,
                full_shape=shard.full_shape,
                offset=shard.offset,
                weight=shard.view(tensor),
                module=prefix,
                **(_quantized_fields(rules, module, own["weight_scale_inv"], shard) if is_block_fp8 else {}),
            )
            yield slot, tuple(other_names)


def _quantized_fields(rules: LayerRules, module: nn.Module, scale: Tensor, shard: Shard) -> dict[str, Any]:
    """What a slot says of block FP8 beside its weight."""
    block_n, block_k = rules.block_size_of(module)
    kernel = rules.kernel_of(module)
    return {
        "scale": scale.narrow(0, shard.first_row // block_n, -(-shard.num_rows // block_n)),
        "scale_format": kernel.scale_format,
        "block_size": (block_n, block_k),
        "kernel": kernel.name,
    }


def _why_refused(
    rules: LayerRules,
    prefix: str,
    module: nn.Module,
    own: dict[str, Tensor],
    names: CheckpointNames,
    *,
    is_split: bool,
) -> Why:
    """Why `module` cannot be written in place, or None."""
    if is_experts(module):
        return _why_not_as_loaded(prefix, module, own) or why_not_experts(rules, prefix, module, own)
    judge_storage = _why_not_block_fp8 if "weight_scale_inv" in own else _why_not_plain
    return (
        _why_not_as_loaded(prefix, module, own)
        or judge_storage(rules, module, own)
        or _why_not_parts(rules, prefix, module, names)
        or _why_not_named(rules, prefix, module, own, names)
        or why_not_sharded(rules, module, own, is_split=is_split)
    )


def _why_not_as_loaded(prefix: str, module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against the module as a whole."""
    if hasattr(module, "base_layer"):
        return f"holds {', '.join(f'`{name}`' for name in own)} around a layer, for LoRA", "Boot without enable_lora"
    if is_experts(module) and "base_layer" in prefix.split("."):
        return "is a layer of experts that LoRA wraps, of which nobody has seen a refit", "Boot without enable_lora"
    for name, tensor in own.items():
        if tensor.numel() == 0:
            return f"its kernel took `{name}` away", "Boot with a kernel that keeps weights as loaded"
    return None


def _why_not_plain(rules: LayerRules, module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against a module without block scales."""
    odd = [f"{name} ({dtype_name(tensor.dtype)})" for name, tensor in own.items() if tensor.dtype not in _SOURCE_LIKE]
    if not odd and "weight_scale" not in own:
        return None
    method = type(getattr(module, "quant_method", None)).__name__
    reason = f"holds {', '.join(odd) or 'weight_scale'} under {method}, which is not block FP8"
    return reason, rules.remedies.other_quantization


def _why_not_block_fp8(rules: LayerRules, module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against a module with block scales."""
    kernel = rules.kernel_of(module)
    if not kernel.is_row_major:
        return f"its kernel {kernel.name} repacks weights, or is not known to leave them as loaded", kernel.remedy
    weight, scale = own.get("weight"), own["weight_scale_inv"]
    if weight is None or weight.dtype is not FP8_DTYPE or weight.ndim != 2 or not weight.is_contiguous():
        return "its weight is not a row-major float8_e4m3fn matrix", kernel.remedy
    block_size = rules.block_size_of(module)
    grid = tuple(-(-length // size) for length, size in zip(weight.shape, block_size, strict=True))
    if scale.dtype is not torch.float32 or tuple(scale.shape) != grid or not scale.is_contiguous():
        found = f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"its scales are {found}, not row-major float32 {list(grid)}", kernel.remedy
    return None


def _why_not_parts(rules: LayerRules, prefix: str, module: nn.Module, names: CheckpointNames) -> Why:
    """What is against the matrices that a fused module holds."""
    sizes = part_sizes(rules, module) or ()
    parts = names.parts_of(prefix, len(sizes) or 1)
    if len(parts) != max(len(sizes), 1):
        return (
            f"holds {len(sizes) or 'no'} fused matrices, and the model says it is made of {', '.join(parts)}",
            "fp8refit does not know in which order this architecture stores them yet",
        )
    block_n = rules.block_size_of(module)[0] if "weight_scale_inv" in module._parameters else 1
    if any(size % block_n for size in sizes[:-1]):
        return f"its parts {list(sizes)} do not start on blocks of {block_n} rows", "Leave this layer in BF16"
    return None


def _why_not_named(
    rules: LayerRules, prefix: str, module: nn.Module, own: dict[str, Tensor], names: CheckpointNames
) -> Why:
    """What is against the names of a module's tensors in a checkpoint."""
    parts = names.parts_of(prefix, len(part_sizes(rules, module) or (1,)))
    nameless = [name for name in own if name != "weight_scale_inv" and not all(names.of(f"{p}.{name}") for p in parts)]
    if not nameless:
        return None
    reason = (
        f"loads {', '.join(f'`{name}`' for name in nameless)} from names that its model's mapping does not give away"
    )
    return reason, "fp8refit does not know what this architecture calls it yet"


def _padding_of(rules: LayerRules, module: nn.Module, own: dict[str, Tensor]) -> Iterator[Tensor]:
    """Rows after the vocabulary's own."""
    for name, tensor in own.items():
        end = sum(shard.num_rows for shard in shards_of(rules, module, tensor))
        if tensor.ndim and name != "weight_scale_inv" and end < tensor.shape[0]:
            yield tensor[end:]
