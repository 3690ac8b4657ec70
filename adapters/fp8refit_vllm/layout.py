"""Tells the core what vLLM's kernels do to weights after loading."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.live.slots import Refresh
from fp8refit.tracing.rules import Kernel, Why
from fp8refit.tracing.stored import is_experts
from fp8refit_vllm.activations import ACTIVATION_SCALES
from fp8refit_vllm.compat import block_format, dequantized, has_small_scales, linear_kernel, wants_powers_of_two
from fp8refit_vllm.experts import (
    MARLIN,
    NOT_MXFP8,
    experts_backend,
    kernel_of_experts,
    scales_of_experts,
    sync_experts,
    why_not_read,
)

ROW_MAJOR_KERNELS = frozenset(
    {
        "BlockWiseTorchFP8ScaledMMLinearKernel",
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
        "CutlassFP8ScaledMMLinearKernel",
        "CutlassFp8BlockScaledMMKernel",
        "DeepGemmFp8BlockScaledMMKernel",
        "EmulationMxfp8LinearKernel",
        "FlashInferFp8BlockScaledMMKernel",
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        "PerTensorTorchFP8ScaledMMLinearKernel",
        "TritonFp8BlockScaledMMKernel",
    }
)
"""vLLM kernels that read weights with scales per block or row in rows, as checkpoints hold them."""
TILED_KERNELS = frozenset(("MarlinMxfp8LinearKernel", "MarlinNvFp4LinearKernel"))
"""Those that read tiles, in which the placement of a `BlockFormat` says where codes and scales are."""

ROW_MAJOR_MARK = "reads_row_major_block_fp8"
"""Out-of-tree kernel classes set this attribute to True to declare the same."""

NOT_NVFP4 = (
    "Boot from a checkpoint of ModelOpt's W4A16_NVFP4 (fp8refit quantize --like) with dtype=\"bfloat16\" and Marlin's kernel, "
    'or boot BF16 with quantization="fp8_per_block"'
)
"""What to do if NVFP4 is held in a way that is not known."""
_ABSORBED = "W_UK_T", "W_UV"
_WORKSPACE = "workspace"
"""Locks of Marlin's kernels, in versions before 0.31."""
_JOINED_GATES = "_combined_gate_weight"
_EPLB = "router.eplb_state"
_KV_SCALES = (
    *("_q_scale", "_k_scale", "_v_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu"),
    *("q_range", "k_range", "v_range"),
)
_KEPT = frozenset((*_ABSORBED, _JOINED_GATES, "kv_cache", "lora_manager", *_KV_SCALES, *ACTIVATION_SCALES))
_KEPT_BY_LORA = frozenset(("punica_wrapper", "adapter_enabled"))


def _is_tiled(module: nn.Module) -> bool:
    """Whether Marlin multiplies by its weights."""
    if is_experts(module):
        return experts_backend(module) == MARLIN
    return "weight" in module._parameters and type(linear_kernel(module)).__name__ in TILED_KERNELS


def _unlock(locks: Tensor) -> None:
    locks.zero_()


def _join_gates(layer: Any) -> None:
    if layer._combined_gate_weight is not None:
        layer._combined_gate_weight.copy_(torch.cat([layer.gate.weight, layer.shared_expert_gate.weight]))


class VllmRules:
    """Implements `fp8refit.tracing.rules.KernelRules` for vLLM."""

    other_quantization = (
        'Boot with quantization="fp8_per_block" (a server: --quantization fp8_per_block), "fp8_per_channel", '
        '"fp8_per_tensor" or "mxfp8", or from an FP8 checkpoint with scales per block or row (fp8refit quantize)'
    )
    to_quantize: str | None = other_quantization
    absorbed = _ABSORBED

    def why_refused(self, module: nn.Module) -> Why:
        """Refuse absorbed copies that are quantized, gathered or packed, and experts that move."""
        if hasattr(module, "W_K"):
            return (
                "keeps absorbed copies of its latent projections quantized for AITER",
                "Boot with VLLM_ROCM_USE_AITER_FP4BMM=0 and VLLM_ROCM_USE_AITER_FP8BMM=0",
            )
        if getattr(module, "W_UK_T_dcp_qrep", None) is not None:
            return "also keeps the absorbed keys of other ranks", "Boot with dcp_q_replicate=False"
        if getattr(module, "is_amx_bmm_enabled", False):
            return "packs its latent projections for Intel AMX", 'Boot with attention_backend="CPU_MLA"'
        if hasattr(module, "input_global_scale"):
            return "has activations in four bits (NVFP4), or was booted for them", NOT_NVFP4
        return why_not_read(module) if is_experts(module) else None

    def kernel_of(self, module: nn.Module) -> Kernel:
        """The kernel that vLLM selected for a linear layer, or its expert backend."""
        if is_experts(module):
            return kernel_of_experts(module)
        kernel = linear_kernel(module)
        name, held = type(kernel).__name__, None
        if name in ROW_MAJOR_KERNELS or name in TILED_KERNELS or getattr(kernel, ROW_MAJOR_MARK, False) is True:
            held = block_format(module, has_powers_of_two=wants_powers_of_two(kernel))
        another = f"Add {name} to VLLM_DISABLED_KERNELS, or choose another with --linear-backend"
        remedy = NOT_MXFP8 if "Mxfp8" in name else NOT_NVFP4 if has_small_scales(module) else another
        return Kernel(name=name, format=held, remedy=remedy)

    def swaps_halves(self, module: nn.Module) -> bool:
        """Whether up projections are stored before gate projections, as FlashInfer's CUTLASS kernel does."""
        gates = getattr(getattr(module, "moe_config", None), "is_act_and_mul", True)
        return gates and experts_backend(module) == "FLASHINFER_CUTLASS"

    def kept(self, module: nn.Module) -> Collection[str]:
        """Absorbed copies, joined gates and scales of activations, which are refreshed; KV caches and their scales; LoRA
        adapters; where experts are (EPLB).
        """
        own = vars(module) | module._buffers | module._parameters
        is_adapted = "base_layer" in module._modules
        kept = [key for key in own if key in _KEPT or (is_adapted and ("lora" in key or key in _KEPT_BY_LORA))]
        kept += [_EPLB] if "router" in own else []
        return [*kept, *([_WORKSPACE] if _WORKSPACE in own and _is_tiled(module) else [])]

    def dequantize(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """By vLLM's own function."""
        return dequantized(layer, dtype)

    def refreshes(self, model: nn.Module) -> Iterator[Refresh]:
        """What vLLM's experts, routers and attention derive from weights at boot or at their first forward."""
        for name, module in model.named_modules():
            layer: Any = module
            if is_experts(module):
                found = scales_of_experts(layer.quant_method.moe_quant_config)
                scales = tuple(each for each in found if each is not None)
                yield Refresh(name=f"{name} scales", run=partial(sync_experts, module), written=scales)
            locks = vars(module).get(_WORKSPACE)
            if isinstance(locks, Tensor) and _is_tiled(module):  # sleep discards their zeros
                yield Refresh(name=f"{name}: locks", run=partial(_unlock, locks), written=(locks,), is_constant=True)
            if hasattr(module, _JOINED_GATES):
                yield Refresh(name=f"{name}: joined gates", run=partial(_join_gates, module))
            impl = getattr(module, "impl", None)
            source = getattr(impl, "_sinks_source", None)
            if impl is not None and source is not None and impl.sinks is not source:  # FlashInfer wants them in float32
                yield Refresh(name=f"{name}: sinks", run=partial(impl.sinks.copy_, source), written=(impl.sinks,))
