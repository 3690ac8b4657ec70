"""Reads slots off a live vLLM model: what the core's reading of twins needs to know of vLLM's kernels."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from torch import nn

from fp8refit.live.latent import Absorbed, with_absorbed
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import Inventory, Refusal, ScaleFormat
from fp8refit.live.tracing import twin
from fp8refit.live.tracing.rules import Kernel, Remedies, Why
from fp8refit.live.tracing.twin import Twin
from fp8refit_vllm.compat import (
    deep_gemm_scale_format,
    dequantized,
    experts_backend,
    linear_kernel,
    wants_powers_of_two,
    why_experts_move,
)

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

EXPERTS_BACKENDS: dict[str, ScaleFormat | None] = {
    "TRITON": ScaleFormat.FP32,
    "BATCHED_TRITON": ScaleFormat.FP32,
    "FLASHINFER_CUTLASS": ScaleFormat.FP32,
    "DEEPGEMM": None,
    "BATCHED_DEEPGEMM": None,
}
"""vLLM's products over experts that read them as slots are written. None: DeepGEMM's own scales."""

ROW_MAJOR_MARK = "reads_row_major_block_fp8"
"""An out-of-tree kernel class with this attribute set to True says the same of itself."""

_ABSORBED_KEYS, _ABSORBED_VALUES = "W_UK_T", "W_UV"


def read_inventory(model: nn.Module, traced: Twin | Refusal) -> Inventory:
    """Everything a refit of `model` writes, and everything it cannot.

    Args:
        model: The live model.
        traced: What the loader of its twin did, or why there is none.
    """
    if isinstance(traced, Refusal):
        return Inventory(slots=(), live=live_tensors(model), refusals=(traced,))
    return with_absorbed(twin.read_inventory(model, VllmRules(), traced), _absorbed_copies(model))


def is_experts(module: nn.Module) -> bool:
    """Whether `module` holds the matrices of experts."""
    return "w13_weight" in module._parameters


def _absorbed_copies(model: nn.Module) -> Iterator[Absorbed]:
    """What every layer of latent attention keeps of its `kv_b_proj`."""
    for name, module in model.named_modules():
        if hasattr(module, _ABSORBED_KEYS):
            layer: Any = module
            yield Absorbed(
                name=name,
                owner=layer,
                keys=_ABSORBED_KEYS,
                values=_ABSORBED_VALUES,
                source=layer.kv_b_proj.weight,
                dequantized=partial(dequantized, layer.kv_b_proj),
            )


class VllmRules:
    """A `fp8refit.live.tracing.rules.KernelRules`."""

    remedies = Remedies(
        no_block_fp8='Boot from a block-FP8 checkpoint (fp8refit quantize), or with quantization="fp8_per_block"',
        other_quantization='Boot from a checkpoint with weight_block_size, or with quantization="fp8_per_block"',
    )

    def why_refused(self, module: nn.Module) -> Why:
        """Absorbed copies of latent projections in other forms than plain ones."""
        if hasattr(module, "W_K"):
            return (
                "keeps absorbed copies of its latent projections quantized for AITER",
                "Boot with VLLM_ROCM_USE_AITER_FP4BMM=0 and VLLM_ROCM_USE_AITER_FP8BMM=0",
            )
        if getattr(module, "W_UK_T_dcp_qrep", None) is not None:
            return "keeps the absorbed keys of other ranks too", "Boot with dcp_q_replicate=False"
        if getattr(module, "is_amx_bmm_enabled", False):
            return "packs its latent projections for Intel AMX", 'Boot with attention_backend="CPU_MLA"'
        return why_experts_move(module) if is_experts(module) else None

    def kernel_of(self, module: nn.Module) -> Kernel:
        """The object that vLLM's selection gave a linear layer, or the backend of its product over experts."""
        if is_experts(module):
            backend = experts_backend(module)
            return Kernel(
                name=backend,
                is_row_major=backend in EXPERTS_BACKENDS,
                scale_format=EXPERTS_BACKENDS.get(backend, ScaleFormat.FP32) or deep_gemm_scale_format(),
                remedy='Boot with moe_backend="triton"',
            )
        kernel = linear_kernel(module)
        name = type(kernel).__name__
        return Kernel(
            name=name,
            is_row_major=name in ROW_MAJOR_KERNELS or getattr(kernel, ROW_MAJOR_MARK, False) is True,
            scale_format=ScaleFormat.UE8M0 if wants_powers_of_two(kernel) else ScaleFormat.FP32,
            remedy=f"Add {name} to VLLM_DISABLED_KERNELS, or choose another with --linear-backend",
        )

    def block_size_of(self, module: nn.Module) -> tuple[int, int]:
        """As the layer says it."""
        layer: Any = module
        block_n, block_k = layer.weight_block_size
        return int(block_n), int(block_k)

    def swaps_halves(self, module: nn.Module) -> bool:
        """FlashInfer's CUTLASS kernel keeps up projections above gate projections."""
        return experts_backend(module) == "FLASHINFER_CUTLASS"

    def kept(self, module: nn.Module) -> Collection[str]:
        """Absorbed copies; vLLM's KV scales are buffers once a model is loaded."""
        return (_ABSORBED_KEYS, _ABSORBED_VALUES) if hasattr(module, _ABSORBED_KEYS) else ()
