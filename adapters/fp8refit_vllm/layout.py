"""Reads slots off a live vLLM model: what the core's reading of layers needs to know of vLLM's."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from torch import nn

from fp8refit.layers import inventory
from fp8refit.layers.experts import is_experts
from fp8refit.layers.latent import Absorbed, with_absorbed
from fp8refit.layers.rules import Experts, Kernel, Remedies, Why
from fp8refit.slots import Inventory, ScaleFormat
from fp8refit_vllm.compat import (
    deep_gemm_scale_format,
    dequantized,
    experts_backend,
    experts_by_place,
    linear_kernel,
    wants_powers_of_two,
    why_experts_move,
)
from fp8refit_vllm.names import VllmNames

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
"""vLLM's products over experts that read them as `fp8refit.layers.experts` writes them. None: DeepGEMM's own scales."""

ROW_MAJOR_MARK = "reads_row_major_block_fp8"
"""An out-of-tree kernel class with this attribute set to True says the same of itself."""

_ABSORBED_KEYS, _ABSORBED_VALUES = "W_UK_T", "W_UV"


def read_inventory(model: nn.Module) -> Inventory:
    """Everything a refit of `model` writes, and everything it cannot."""
    return with_absorbed(inventory.read_inventory(model, VllmRules(), VllmNames(model)), _absorbed_copies(model))


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
    """vLLM's ways."""

    remedies = Remedies(
        no_block_fp8='Boot from a block-FP8 checkpoint (fp8refit quantize), or with quantization="fp8_per_block"',
        other_quantization='Boot from a checkpoint with weight_block_size, or with quantization="fp8_per_block"',
        one_rank="Boot with tensor_parallel_size=1",
    )
    whole_layers = frozenset({"TPAwareGemmaRMSNorm", "TPAwareRMSNorm"})  # of vLLM's Transformers backend
    copying_loaders = frozenset(
        {
            "MiniMaxText01RMSNormTP.weight_loader",
            "default_weight_loader",
            "row_parallel_weight_loader",
            "sharded_weight_loader.<locals>.loader",
        }
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

    def is_linear(self, module: nn.Module) -> bool:
        """Every linear layer says what it is made of."""
        return hasattr(module, "output_partition_sizes") and hasattr(module, "input_size")

    def ranks_of(self, module: nn.Module) -> tuple[int, int]:
        """By the layer's own numbers: `disable_tp` and group-wise layers differ from the process group's."""
        return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)

    def part_sizes_of(self, module: nn.Module) -> tuple[int, ...]:
        """As linear layers say it."""
        return tuple(getattr(module, "output_partition_sizes", ()))

    def kernel_of(self, module: nn.Module) -> Kernel:
        """The object that vLLM's selection gave the layer."""
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

    def experts_of(self, prefix: str, module: nn.Module) -> Experts:
        """By the layer's own configuration, and the map from experts to places if experts are split over ranks."""
        layer: Any = module
        config, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
        places = module._buffers.get("_expert_map")
        backend = experts_backend(module)
        block_n, block_k = layer.weight_block_size
        return Experts(
            gate=layer.ckpt_gate_proj_name,
            up=layer.ckpt_up_proj_name,
            down=layer.ckpt_down_proj_name,
            ids=experts_by_place(places) if places is not None else tuple(range(layer.w13_weight.shape[0])),
            num_experts=config.num_logical_experts,
            hidden_size=config.hidden_dim_unpadded or config.hidden_dim,
            intermediate_size=config.intermediate_size,
            ranks=(parallel.tp_rank, parallel.tp_size),
            block_size=(int(block_n), int(block_k)),
            kernel=Kernel(
                name=backend,
                is_row_major=backend in EXPERTS_BACKENDS,
                scale_format=EXPERTS_BACKENDS.get(backend, ScaleFormat.FP32) or deep_gemm_scale_format(),
                remedy='Boot with moe_backend="triton"',
            ),
            is_up_first=backend == "FLASHINFER_CUTLASS",
            is_stack_transposed=getattr(layer, "is_fused_checkpoint_transposed", False),
        )

    def kept(self, module: nn.Module) -> Collection[str]:
        """Absorbed copies; vLLM's KV scales are buffers once a model is loaded."""
        return (_ABSORBED_KEYS, _ABSORBED_VALUES) if hasattr(module, _ABSORBED_KEYS) else ()
