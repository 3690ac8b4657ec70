"""Reads slots off a live vLLM model by what its modules hold, never by the class of the model.

A block-FP8 linear module is one with a float8_e4m3fn matrix `weight` and a float32 matrix `weight_scale_inv`. Weights of
any other quantized form are refused by name: their kernel repacked them.
"""

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fp8refit.names import FUSED_MODULES, split_fused
from fp8refit.slots import FP8_DTYPE, Inventory, Refusal, ScaleFormat, Slot, dtype_name, live_tensors
from fp8refit_vllm.compat import linear_kernel, wants_powers_of_two

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

Why: TypeAlias = tuple[str, str] | None
"""Reason and remedy, or None if there is nothing against it."""

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
        refusal = _why_refused(prefix, module, own, fused)
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
    if "weight_scale_inv" in own:
        yield from _quantized_slots(prefix, module, own, fused)
        own = {name: tensor for name, tensor in own.items() if name not in ("weight", "weight_scale_inv")}
    parts, sizes = _parts_of(prefix, module, fused)
    for name, tensor in own.items():
        rows = _num_checkpoint_rows(module, tensor)
        start = 0
        for part, size in zip(parts, sizes or (rows,), strict=True):
            view = tensor.narrow(0, start, size) if tensor.ndim else tensor
            start += size
            yield Slot(name=f"{part}.{name}", full_shape=tuple(view.shape), weight=view, module=prefix)


def _quantized_slots(
    prefix: str, module: nn.Module, own: dict[str, Tensor], fused: dict[str, tuple[str, ...]]
) -> Iterator[Slot]:
    weight, scale = own["weight"], own["weight_scale_inv"]
    block_n, block_k = _block_size(module)
    kernel = linear_kernel(module)
    parts, sizes = _parts_of(prefix, module, fused)
    start = 0
    for part, size in zip(parts, sizes or (weight.shape[0],), strict=True):
        yield Slot(
            name=f"{part}.weight",
            full_shape=(size, weight.shape[1]),
            weight=weight.narrow(0, start, size),
            scale=scale.narrow(0, start // block_n, -(-size // block_n)),
            scale_format=ScaleFormat.UE8M0 if wants_powers_of_two(kernel) else ScaleFormat.FP32,
            block_size=(block_n, block_k),
            module=prefix,
            kernel=type(kernel).__name__,
        )
        start += size


def _why_refused(
    prefix: str, module: nn.Module, own: dict[str, Tensor], fused: dict[str, tuple[str, ...]]
) -> Refusal | None:
    """Why `module` cannot be written in place, or None."""
    judge_storage = _why_not_block_fp8 if "weight_scale_inv" in own else _why_not_plain
    why = _why_not_dense(prefix, module, own) or judge_storage(module, own) or _why_not_parts(prefix, module, fused)
    return Refusal(module=prefix, reason=why[0], remedy=why[1]) if why is not None else None


def _why_not_dense(prefix: str, module: nn.Module, own: dict[str, Tensor]) -> Why:
    """What is against the module as a whole."""
    if hasattr(module, "W_UK_T"):
        return "keeps absorbed copies of its latent projections", "fp8refit does not refresh them yet"
    if hasattr(module, "w13_weight"):
        return "is a mixture-of-experts layer", "fp8refit refits dense models so far"
    if any("base_layer" in part for part in prefix.split(".")):
        return "is wrapped for LoRA", "Boot without enable_lora"
    if getattr(module, "tp_size", 1) != 1:
        return f"is split over {module.tp_size} ranks", "Boot with tensor_parallel_size=1"
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
    parts, sizes = _parts_of(prefix, module, fused)
    if sizes is None:
        return None
    if len(parts) != len(sizes):
        return (
            f"holds {len(sizes)} matrices, and the model says it is made of {', '.join(parts)}",
            "fp8refit does not know in which order this architecture stores them yet",
        )
    block_n = _block_size(module)[0] if "weight_scale_inv" in module._parameters else 1
    if any(size % block_n for size in sizes[:-1]):
        return f"its parts {list(sizes)} do not start on blocks of {block_n} rows", "Leave this layer in BF16"
    return None


def _parts_of(
    prefix: str, module: nn.Module, fused: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Checkpoint modules held by an engine module and the rows of each; rows are None for a module that is not fused."""
    parts = split_fused(prefix, fused)
    sizes = tuple(getattr(module, "output_partition_sizes", ()))
    return parts, sizes if len(sizes) > 1 else None


def _num_checkpoint_rows(module: nn.Module, tensor: Tensor) -> int:
    """Rows that a checkpoint has: vLLM pads vocabularies."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return min(rows, getattr(module, "org_vocab_size", rows))


def _padding_of(module: nn.Module, own: dict[str, Tensor]) -> list[Tensor]:
    """Rows after the vocabulary's own."""
    padded = [(tensor, _num_checkpoint_rows(module, tensor)) for tensor in own.values() if tensor.ndim]
    return [tensor[rows:] for tensor, rows in padded if rows < tensor.shape[0]]


def _is_row_major(kernel: object | None) -> bool:
    return type(kernel).__name__ in ROW_MAJOR_KERNELS or getattr(kernel, ROW_MAJOR_MARK, False) is True


def _block_size(module: nn.Module) -> tuple[int, int]:
    block_n, block_k = module.weight_block_size  # type: ignore[misc]
    return int(block_n), int(block_k)  # type: ignore[arg-type]
