"""Reads slots off a live vLLM model by what its modules hold, never by the class of the model.

A block-FP8 linear module is one with a float8_e4m3fn matrix `weight` and a float32 matrix `weight_scale_inv`. Weights of
any other quantized form are refused by name: their kernel repacked them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fp8refit.names import FUSED_MODULES, split_fused
from fp8refit.slots import FP8_DTYPE, Inventory, Refusal, ScaleFormat, Slot, live_tensors
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

    def refuse(reason: str, remedy: str) -> Refusal:
        return Refusal(module=prefix, reason=reason, remedy=remedy)

    kernel = linear_kernel(module)
    method = type(getattr(module, "quant_method", None)).__name__
    if hasattr(module, "W_UK_T"):
        return refuse("keeps absorbed copies of its latent projections", "fp8refit does not refresh them yet")
    if hasattr(module, "w13_weight"):
        return refuse("is a mixture-of-experts layer", "fp8refit refits dense models so far")
    if any("base_layer" in part for part in prefix.split(".")):
        return refuse("is wrapped for LoRA", "Boot without enable_lora")
    if getattr(module, "tp_size", 1) != 1:
        return refuse(f"is split over {module.tp_size} ranks", "Boot with tensor_parallel_size=1")
    for name, tensor in own.items():
        if tensor.numel() == 0:
            return refuse(f"its kernel took `{name}` away", "Boot with a kernel that keeps weights as loaded")
    weight, scale = own.get("weight"), own.get("weight_scale_inv")
    if scale is None:
        odd = [f"{name} ({str(tensor.dtype)[6:]})" for name, tensor in own.items() if tensor.dtype not in _SOURCE_LIKE]
        if odd or "weight_scale" in own:
            return refuse(
                f"holds {', '.join(odd) or 'weight_scale'} under {method}, which is not block FP8",
                'Boot from a checkpoint with weight_block_size, or with quantization="fp8_per_block"',
            )
        return _why_unknown_parts(prefix, module, fused)
    if not _is_row_major(kernel):
        return refuse(
            f"its kernel {type(kernel).__name__} repacks weights, or is not known to leave them as loaded",
            f"Add {type(kernel).__name__} to VLLM_DISABLED_KERNELS, or choose another with --linear-backend",
        )
    block_n, block_k = _block_size(module)
    if weight is None or weight.dtype is not FP8_DTYPE or weight.ndim != 2 or not weight.is_contiguous():
        return refuse(
            "its weight is not a row-major float8_e4m3fn matrix", "Choose another kernel (VLLM_DISABLED_KERNELS)"
        )
    expected = (-(-weight.shape[0] // block_n), -(-weight.shape[1] // block_k))
    if scale.dtype is not torch.float32 or tuple(scale.shape) != expected or not scale.is_contiguous():
        return refuse(
            f"its scales are {str(scale.dtype)[6:]} {list(scale.shape)}, not row-major float32 {list(expected)}",
            "Choose another kernel (VLLM_DISABLED_KERNELS)",
        )
    unknown = _why_unknown_parts(prefix, module, fused)
    if unknown is not None:
        return unknown
    _, sizes = _parts_of(prefix, module, fused)
    if any(size % block_n for size in (sizes or ())[:-1]):
        return refuse(
            f"its parts {list(sizes or ())} do not start on blocks of {block_n} rows", "Leave this layer in BF16"
        )
    return None


def _why_unknown_parts(prefix: str, module: nn.Module, fused: dict[str, tuple[str, ...]]) -> Refusal | None:
    parts, sizes = _parts_of(prefix, module, fused)
    if sizes is not None and len(parts) != len(sizes):
        return Refusal(
            module=prefix,
            reason=f"holds {len(sizes)} matrices, and the model says it is made of {', '.join(parts)}",
            remedy="fp8refit does not know in which order this architecture stores them yet",
        )
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
