"""Reads slots off a live SGLang model: what the core's reading of layers needs to know of SGLang's.

SGLang registers the scales of an FP8 KV cache as parameters of its attention layers, whatever the cache's dtype is. They are
no weights: no slot holds them, a trainer need not send them, and a refit leaves them as they are, as vLLM's buffers are left.
They are listed as live, so one that was replaced is noticed.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8refit.layers import inventory
from fp8refit.layers.experts import is_experts
from fp8refit.layers.latent import with_absorbed
from fp8refit.layers.rules import Experts, Kernel, Remedies, Why
from fp8refit.slots import Inventory, ScaleFormat
from fp8refit_sglang.experts import ModelExperts, Places, refreshes_of_routers
from fp8refit_sglang.latent import absorbed_copies, fused_rows, has_known_rule, is_latent, why_not_absorbed

ROW_MAJOR_KERNELS = frozenset(
    {
        "cutlass_w8a8_block_fp8_linear_with_fallback",
        "deepgemm_w8a8_block_fp8_linear_with_fallback",
        "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback",
        "triton_w8a8_block_fp8_linear",
    }
)
"""SGLang's products that read block-FP8 weights as a checkpoint stores them, on the GPUs where scales stay float32."""

_DERIVED_SCALES = ("weight_scale_inv_deepgemm", "weight_scale_inv_shuffled", "weight_scale_inv_swizzled")
_COPIED_NORMS = (
    *("_hpc_q_norm_w_fp32", "_hpc_k_norm_w_fp32", "_post_expert_norm_weight"),
    *("_input_layernorm_weight_bf16", "_post_attention_layernorm_weight_bf16"),
)
_SPLIT_WEIGHTS = ("_hc_attn_bf16_parts", "_hc_attn_tf32_parts", "_hc_ffn_bf16_parts", "_hc_ffn_tf32_parts")
_KV_SCALES = ("k_scale", "v_scale")
_NOT_YET = "fp8refit does not refresh them yet"
_ANOTHER_KERNEL = 'Boot with fp8_gemm_runner_backend="triton", "deep_gemm" or "cutlass"'


def read_inventory(model: nn.Module, places: Places | None = None) -> Inventory:
    """Everything a refit of `model` writes, and everything it cannot.

    Args:
        model: The live model.
        places: Where its experts lie; None if they lie in the checkpoint's order.
    """
    rules = SglangRules(model, places)
    found = with_absorbed(inventory.read_inventory(model, rules), absorbed_copies(model, rules.block_size_of))
    return replace(found, refreshes=(*found.refreshes, *refreshes_of_routers(model)))


class SglangRules:
    """SGLang's ways (seen with 0.5.15, 0.5.17 and 0.5.23).

    Args:
        model: The live model.
        places: Where its experts lie.
    """

    remedies = Remedies(
        no_block_fp8="Boot from a block-FP8 checkpoint (fp8refit quantize)",
        other_quantization="Boot from a checkpoint with weight_block_size (fp8refit quantize)",
        one_rank="Boot with tp_size=1",
    )
    whole_layers: frozenset[str] = frozenset()
    copying_loaders = frozenset({"default_weight_loader", "sharded_weight_loader.<locals>.loader"})

    def __init__(self, model: nn.Module, places: Places | None = None) -> None:
        self._experts = ModelExperts(model, places)
        self._fused_rows = fused_rows(model)
        self._absorbs_as_known = has_known_rule(model)

    def why_refused(self, module: nn.Module) -> Why:
        """Tensors that SGLang derived from weights, layouts that it packed them into, and experts of unknown places."""
        why = _why_derived(module) or _why_packed(module) or _why_split_apart(module)
        if why is None and is_latent(module):
            why = why_not_absorbed(module, is_known_rule=self._absorbs_as_known)
        return why or (self._experts.why_refused(module) if is_experts(module) else None)

    def is_linear(self, module: nn.Module) -> bool:
        """Row-parallel and replicated layers do not say `output_partition_sizes`."""
        return hasattr(module, "input_size") and hasattr(module, "output_size")

    def ranks_of(self, module: nn.Module) -> tuple[int, int]:
        """By the layer's own group (0.5.23: none for a layer that is not split), else by its own numbers."""
        group: Any = getattr(module, "tp_group", None)
        if hasattr(group, "rank_in_group"):
            return group.rank_in_group, group.world_size
        return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)

    def part_sizes_of(self, module: nn.Module) -> tuple[int, ...]:
        """As linear layers say it, but those of latent attention, which say less than there is."""
        return self._fused_rows.get(module) or tuple(getattr(module, "output_partition_sizes", ()))

    def kernel_of(self, module: nn.Module) -> Kernel:
        """The function that SGLang's dispatch gave the layer."""
        name = _product_of(module)
        # Where SGLang rounds scales to powers of two it marks them, and those are refused.
        return Kernel(
            name=name,
            is_row_major=name in ROW_MAJOR_KERNELS,
            scale_format=ScaleFormat.FP32,
            remedy=_ANOTHER_KERNEL,
        )

    def block_size_of(self, module: nn.Module) -> tuple[int, int]:
        """Of the weight as it is after loading."""
        method: Any = module.quant_method
        block_n, block_k = getattr(method, "weight_block_size", None) or method.quant_config.weight_block_size
        return int(block_n), int(block_k)

    def experts_of(self, prefix: str, module: nn.Module) -> Experts:
        """By the layer's own numbers, and by what the model says of all of its layers."""
        return self._experts.read(module, self.block_size_of(module))

    def kept(self, module: nn.Module) -> Collection[str]:
        """The KV scales of an attention layer, which keeps a copy of each as a Python number."""
        return _KV_SCALES if hasattr(module, "k_scale_float") else ()


def _why_derived(module: nn.Module) -> Why:
    """What SGLang computed from weights at boot and nothing refreshes after a write."""
    if getattr(module, "_block_fp8_bf16_weight", None) is not None:
        return "keeps a BF16 copy of its weight", "Boot with SGLANG_OPT_HOPPER_BLOCK_FP8_BF16=0"
    for name in (*_DERIVED_SCALES, *_COPIED_NORMS, *_SPLIT_WEIGHTS):
        if getattr(module, name, None) is not None:
            return f"keeps copies derived from its weights (`{name}`)", _NOT_YET
    if hasattr(module, "base_layer"):
        return "is wrapped for LoRA", "Boot without enable_lora"
    error = getattr(module, "_derived_weight_cache_error", None)
    return ("keeps copies derived from its weights", str(error)) if error is not None else None


def _why_packed(module: nn.Module) -> Why:
    """What is against the layout of a weight or of its scales."""
    if getattr(module, "use_intel_amx_backend", False):
        return "its weight is packed for Intel AMX", "Refit engines on GPUs"
    if getattr(getattr(module, "quant_method", None), "use_marlin", False):
        return "its kernel Marlin repacks weights", "Boot without SGLANG_FORCE_FP8_MARLIN, on a GPU that multiplies FP8"
    scale = module._parameters.get("weight_scale_inv")
    is_marked = getattr(scale, "format_ue8m0", False) or getattr(scale, "power_of_two", False)
    if scale is not None and (is_marked or scale.dtype is torch.int32):
        return "its kernel takes scales that are powers of two (UE8M0)", 'Boot with fp8_gemm_runner_backend="triton"'
    return None


def _why_split_apart(module: nn.Module) -> Why:
    """What is against a layer whose keys and values are cut over other ranks than its queries."""
    group = getattr(module, "tp_group", None)
    if getattr(module, "kv_tp_group", group) is not group:
        return "cuts keys and values over other ranks than queries", SglangRules.remedies.one_rank
    return None


def _product_of(module: nn.Module) -> str:
    """The name of the function that multiplies by a block-FP8 module's weight, else that of the method that does."""
    method = getattr(module, "quant_method", None)
    product = getattr(method, "w8a8_block_fp8_linear", None)
    product = getattr(product, "func", product)  # of a partial
    return getattr(product, "__name__", type(method).__name__)
