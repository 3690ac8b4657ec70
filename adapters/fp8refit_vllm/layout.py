"""Reads slots off a live vLLM model by what its modules hold, never by the class of the model.

A block-FP8 linear module is one with a float8_e4m3fn matrix `weight` and a float32 matrix `weight_scale_inv`. Weights of
any other quantized form are refused by name: their kernel repacked them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.names import FUSED_MODULES, split_fused
from fp8refit.slots import FP8_DTYPE, Inventory, Refusal, ScaleFormat, Slot, dtype_name, live_tensors
from fp8refit_vllm.compat import linear_kernel, wants_powers_of_two
from fp8refit_vllm.shards import Shard, Why, part_sizes, shards_of, why_not_sharded

ROW_MAJOR_KERNELS = frozenset(
    {
        "BlockWiseTorchFP8ScaledMMLinearKernel",
        "CutlassFp8BlockScaledMMKernel",
        "DeepGemmFp8BlockScaledMMKernel",
        "FlashInferFp8BlockScaledMMKernel",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "TritonFp8BlockScaledMMKernel",
    }
)
"""vLLM's kernels that read block-FP8 weights as a checkpoint stores them."""

ROW_MAJOR_MARK = "reads_row_major_block_fp8"
"""An out-of-tree kernel class with this attribute set to True says the same of itself."""

_SOURCE_LIKE = (torch.bfloat16, torch.float16, torch.float32)


def read_inventory(model: nn.Module) -> Inventory:
    """Everything a refit of `model` writes, and everything it cannot."""
    fused = {
        leaf: tuple(parts) for leaf, parts in getattr(model, "packed_modules_mapping", {}).items()
    } or FUSED_MODULES
    slots: list[Slot] = []
    refusals: list[Refusal] = []
    padding: list[Tensor] = []
    names_by_storage: dict[tuple[int, torch.Size], str] = {}
    aliases: dict[str, str] = {}
    is_split = any(getattr(module, "tp_size", 1) != 1 for module in model.modules())
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {name: tensor.data for name, tensor in module._parameters.items() if tensor is not None}
        for name, tensor in list(own.items()):
            full_name = f"{prefix}.{name}"
            first = (
                names_by_storage.setdefault((tensor.data_ptr(), tensor.shape), full_name)
                if tensor.numel()
                else full_name
            )
            if first != full_name:
                aliases[full_name] = first
                del own[name]
        if not own and not hasattr(module, "W_UK_T"):
            continue
        refusal = _why_refused(prefix, module, own, fused, is_split=is_split)
        if refusal is not None:
            refusals.append(refusal)
        else:
            slots.extend(_slots_of(prefix, module, own, fused))
            padding.extend(_padding_of(module, own))
    if not refusals and not any(slot.is_quantized for slot in slots):
        refusals.append(
            Refusal(
                module=type(model).__name__,
                reason="holds no block-FP8 weight",
                remedy='Boot from a block-FP8 checkpoint (fp8refit quantize), or with quantization="fp8_per_block"',
            )
        )
    return Inventory(
        slots=tuple(slots),
        live=live_tensors(model),
        aliases=aliases,
        padding=tuple(padding),
        refusals=tuple(refusals),
    )


def _slots_of(
    prefix: str, module: nn.Module, own: dict[str, Tensor], fused: dict[str, tuple[str, ...]]
) -> Iterator[Slot]:
    parts = split_fused(prefix, fused)
    for name, tensor in own.items():
        if name == "weight_scale_inv":
            continue
        for part, shard in zip(parts, shards_of(module, tensor), strict=True):
            yield Slot(
                name=f"{part}.{name}",
                full_shape=shard.full_shape,
                offset=shard.offset,
                weight=shard.view(tensor),
                module=prefix,
                **(_quantized_fields(module, own["weight_scale_inv"], shard) if _is_block_fp8(name, own) else {}),
            )


def _quantized_fields(module: nn.Module, scale: Tensor, shard: Shard) -> dict[str, Any]:
    """What a slot says of block FP8 beside its weight."""
    block_n, block_k = _block_size(module)
    kernel = linear_kernel(module)
    return {
        "scale": scale.narrow(0, shard.first_row // block_n, -(-shard.num_rows // block_n)),
        "scale_format": ScaleFormat.UE8M0 if wants_powers_of_two(kernel) else ScaleFormat.FP32,
        "block_size": (block_n, block_k),
        "kernel": type(kernel).__name__,
    }


def _why_refused(
    prefix: str, module: nn.Module, own: dict[str, Tensor], fused: dict[str, tuple[str, ...]], *, is_split: bool
) -> Refusal | None:
    """Why `module` cannot be written in place, or None."""
    judge_storage = _why_not_block_fp8 if "weight_scale_inv" in own else _why_not_plain
    why = (
        _why_not_dense(prefix, module, own)
        or judge_storage(module, own)
        or _why_not_parts(prefix, module, fused)
        or why_not_sharded(module, own, is_split=is_split)
    )
    return Refusal(module=prefix, reason=why[0], remedy=why[1]) if why is not None else None


def _why_not_dense(prefix: str, module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against the module as a whole."""
    if hasattr(module, "W_UK_T"):
        return "keeps absorbed copies of its latent projections", "fp8refit does not refresh them yet"
    if hasattr(module, "w13_weight"):
        return "is a mixture-of-experts layer", "fp8refit refits dense models so far"
    if any("base_layer" in part for part in prefix.split(".")):
        return "is wrapped for LoRA", "Boot without enable_lora"
    for name, tensor in own.items():
        if tensor.numel() == 0:
            return f"its kernel took `{name}` away", "Boot with a kernel that keeps weights as loaded"
    return None


def _why_not_plain(module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against a module without block scales."""
    odd = [f"{name} ({dtype_name(tensor.dtype)})" for name, tensor in own.items() if tensor.dtype not in _SOURCE_LIKE]
    if not odd and "weight_scale" not in own:
        return None
    method = type(getattr(module, "quant_method", None)).__name__
    return (
        f"holds {', '.join(odd) or 'weight_scale'} under {method}, which is not block FP8",
        'Boot from a checkpoint with weight_block_size, or with quantization="fp8_per_block"',
    )


def _why_not_block_fp8(module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against a module with block scales."""
    kernel = linear_kernel(module)
    name = type(kernel).__name__
    other_kernel = f"Add {name} to VLLM_DISABLED_KERNELS, or choose another with --linear-backend"
    if not _is_row_major(kernel):
        return f"its kernel {name} repacks weights, or is not known to leave them as loaded", other_kernel
    weight, scale = own.get("weight"), own["weight_scale_inv"]
    if weight is None or weight.dtype is not FP8_DTYPE or weight.ndim != 2 or not weight.is_contiguous():
        return "its weight is not a row-major float8_e4m3fn matrix", other_kernel
    grid = tuple(-(-length // size) for length, size in zip(weight.shape, _block_size(module), strict=True))
    if scale.dtype is not torch.float32 or tuple(scale.shape) != grid or not scale.is_contiguous():
        found = f"{dtype_name(scale.dtype)} {list(scale.shape)}"
        return f"its scales are {found}, not row-major float32 {list(grid)}", other_kernel
    return None


def _why_not_parts(prefix: str, module: nn.Module, fused: dict[str, tuple[str, ...]]) -> Why:
    """What is against the matrices that a fused module holds."""
    parts, sizes = split_fused(prefix, fused), part_sizes(module) or ()
    if len(parts) != max(len(sizes), 1):
        return (
            f"holds {len(sizes) or 'no'} fused matrices, and the model says it is made of {', '.join(parts)}",
            "fp8refit does not know in which order this architecture stores them yet",
        )
    block_n = _block_size(module)[0] if "weight_scale_inv" in module._parameters else 1
    if any(size % block_n for size in sizes[:-1]):
        return f"its parts {list(sizes)} do not start on blocks of {block_n} rows", "Leave this layer in BF16"
    return None


def _padding_of(module: nn.Module, own: dict[str, Tensor]) -> Iterator[Tensor]:
    """Rows after the vocabulary's own."""
    for name, tensor in own.items():
        end = sum(shard.num_rows for shard in shards_of(module, tensor))
        if tensor.ndim and name != "weight_scale_inv" and end < tensor.shape[0]:
            yield tensor[end:]


def _is_row_major(kernel: object | None) -> bool:
    return type(kernel).__name__ in ROW_MAJOR_KERNELS or getattr(kernel, ROW_MAJOR_MARK, False) is True


def _is_block_fp8(name: str, own: dict[str, Tensor]) -> bool:
    return name == "weight" and "weight_scale_inv" in own


def _block_size(module: nn.Module) -> tuple[int, int]:
    block_n, block_k = module.weight_block_size  # type: ignore[misc]
    return int(block_n), int(block_k)
