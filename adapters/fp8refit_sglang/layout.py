"""Tells the core what SGLang's kernels do to weights after loading.

SGLang registers KV-cache scales as parameters of its attention layers, whatever the cache's dtype. They are not
weights: they have no slots, trainers need not send them, and a refit leaves them alone. They are listed as live, so
that a replaced one is noticed.
"""

from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8refit.kernels import dequantize_blockwise
from fp8refit.live.names import name_of_scale
from fp8refit.live.slots import Refresh
from fp8refit.tracing.rules import Kernel, Why
from fp8refit.tracing.stored import is_experts, own_tensors
from fp8refit_sglang.experts import (
    FROM_FP8,
    ROUTER_COPY,
    block_format,
    kernel_of_experts,
    quantizes_itself,
    refreshes_of_routers,
    why_not_read,
)
from fp8refit_sglang.latent import ABSORBED, has_known_rule, is_latent, why_not_absorbed

ROW_MAJOR_KERNELS = frozenset(
    {
        "cutlass_w8a8_block_fp8_linear_with_fallback",
        "deepgemm_w8a8_block_fp8_linear_with_fallback",
        "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback",
        "triton_w8a8_block_fp8_linear",
    }
)
"""SGLang's kernels that read block-FP8 weights in checkpoint layout, on GPUs where scales stay float32."""

_METHODS_OF_ROWS = frozenset({"CompressedTensorsW8A8Fp8", "Fp8LinearMethod", "W8A8Fp8LinearMethod"})
"""What multiplies by weights with one scale per row, by `apply_fp8_linear`."""

_KV_SCALES = ("k_scale", "v_scale")
_ANOTHER_KERNEL = 'Boot with fp8_gemm_runner_backend="triton", "deep_gemm" or "cutlass"'


class SglangRules:
    """Implements `fp8refit.tracing.rules.KernelRules` for SGLang.

    Args:
        model: The live model.
    """

    other_quantization = (
        "Boot from an FP8 checkpoint with scales per block or row (fp8refit quantize), for which no flag is needed, or a "
        'model without latent attention with quantization="fp8" (a server: --quantization fp8), in SGLang 0.5.17 and later'
    )
    to_quantize: str | None = other_quantization
    absorbed = ABSORBED

    def __init__(self, model: nn.Module) -> None:
        self._absorbs_as_known = has_known_rule(model)

    def why_refused(self, module: nn.Module) -> Why:
        """Refuse modules with tensors derived from weights that nothing refreshes, and modules with packed weights."""
        why = _why_derived(module) or _why_packed(module)
        if why is None and is_latent(module):
            why = why_not_absorbed(module, is_known_rule=self._absorbs_as_known)
        return why or (why_not_read(module) if is_experts(module) else None)

    def kernel_of(self, module: nn.Module) -> Kernel:
        """The function that SGLang selected for a linear layer, or its expert runner; of none that packs codes."""
        weights = [each for name, each in module.named_parameters(recurse=False) if name.endswith("weight")]
        if any(each.dtype is torch.uint8 for each in weights):
            method = type(getattr(module, "quant_method", None)).__name__
            return Kernel(name=method, format=None, remedy=self.other_quantization)
        if is_experts(module):
            return kernel_of_experts(module)
        name, held = _product_of(module), block_format(module)
        # Codes that AITER shuffled are not columns in the memory of rows, and keep their shape.
        are_rows = name in _METHODS_OF_ROWS and cast(Tensor, module.weight).mT.is_contiguous()
        # From a checkpoint, these repeat the scale of a whole weight for each of its rows.
        are_rows &= name != "Fp8LinearMethod" or quantizes_itself(module)
        is_read = held is not None and (are_rows if held.has_rows else name in ROW_MAJOR_KERNELS)
        remedy = FROM_FP8 if quantizes_itself(module) else _ANOTHER_KERNEL
        return Kernel(name=name, format=held if is_read else None, remedy=remedy)

    def swaps_halves(self, module: nn.Module) -> bool:
        """Never true of the kernels that read weights in checkpoint layout."""
        return False

    def kept(self, module: nn.Module) -> Collection[str]:
        """What is refreshed, absorbed copies and routers in float32; the KV scales of an attention layer; what sends tokens to
        experts, which holds no weights and numbers its rank's experts at the first forward; the tokens that a draft knows; and
        the LoRA adapters of a wrapper.
        """
        if "base_layer" in module._modules:
            return [key for key in vars(module) if not key.startswith("_")]
        return (
            *ABSORBED,
            ROUTER_COPY,
            "dispatcher",
            "hot_token_id",
            *(_KV_SCALES if hasattr(module, "k_scale_float") else ()),
        )

    def dequantize(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """By its scales of blocks or rows, if it has any."""
        own = dict(own_tensors(layer))
        weight, scale = own["weight"], own.get("weight_scale_inv")
        if scale is None:
            return weight
        held = block_format(layer)
        assert held is not None, f"{layer=}"
        return dequantize_blockwise(weight, scale, block_size=held.block_size, dtype=dtype)

    def refreshes(self, model: nn.Module) -> Iterable[Refresh]:
        """Routers in float32."""
        return refreshes_of_routers(model)


def scale_of(module: nn.Module) -> Tensor | None:
    """The scales of a block-FP8 linear layer, under the name of whatever container."""
    named = {name_of_scale(name): tensor for name, tensor in module._parameters.items()}
    return named.get("weight_scale_inv")


def _why_derived(module: nn.Module) -> Why:
    """Why a module is refused for tensors that SGLang derived from its weights at boot; None if there are none."""
    if getattr(module, "_block_fp8_bf16_weight", None) is not None:
        return "keeps a BF16 copy of its weight", "Boot with SGLANG_OPT_HOPPER_BLOCK_FP8_BF16=0"
    error = getattr(module, "_derived_weight_cache_error", None)
    return ("keeps copies derived from its weights", str(error)) if error is not None else None


def _why_packed(module: nn.Module) -> Why:
    """Why a module is refused for the layout of its weight or scales; None if it is not."""
    if hasattr(module, "pack_params"):  # DeepSeek's first experts, Xverse's and Afmoe's
        return "multiplies by the codes of its packed experts without their scales", "Serve this model in BF16"
    if getattr(module, "use_intel_amx_backend", False):
        return "its weight is packed for Intel AMX", "Use a GPU"
    if getattr(getattr(module, "quant_method", None), "use_marlin", False):
        return (
            "its kernel Marlin repacks weights",
            "Boot without SGLANG_FORCE_FP8_MARLIN, on a GPU with FP8 matrix products",
        )
    scale = scale_of(module)
    is_marked = getattr(scale, "format_ue8m0", False) or getattr(scale, "power_of_two", False)
    if scale is not None and (is_marked or scale.dtype is torch.int32):
        return "its kernel needs scales that are powers of two (UE8M0)", 'Boot with fp8_gemm_runner_backend="triton"'
    return None


def _product_of(module: nn.Module) -> str:
    """The name of the function that multiplies by a block-FP8 weight; otherwise of the quant method."""
    method = getattr(module, "quant_method", None)
    holders = getattr(module, "scheme", None), method  # compressed-tensors has schemes
    products = (getattr(each, "w8a8_block_fp8_linear", None) for each in holders if getattr(each, "block_quant", True))
    product = next((each for each in products if each is not None), None)
    product = getattr(product, "func", product)  # of a partial
    return getattr(product, "__name__", type(holders[0] or method).__name__)
