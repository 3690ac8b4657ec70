"""SGLang's expert kernels: which of them read block-FP8 weights in checkpoint layout, and the routers' float32
copies.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from fp8refit.live.formats import PER_ROW, BlockFormat
from fp8refit.live.slots import Refresh
from fp8refit.tracing.rules import Kernel, Why
from fp8refit_sglang.compat import own_rows, own_weights

ROW_MAJOR_RUNNERS = frozenset({"cutlass", "deep_gemm", "triton"})
"""SGLang's expert kernels that read block-FP8 weights in checkpoint layout, on GPUs where scales stay float32."""

_METHODS = frozenset({"CompressedTensorsW8A8Fp8MoE", "Fp8MoEMethod", "W8A8FP8MoEMethod"})
"""What gives its runner the weights as they were loaded."""
_MOVES_ROWS = ("w13_swiglu_interleaved", "use_flashinfer_trtllm_moe", "_aiter_runner")
"""What says so of the method of layers that are not quantized."""
_ROWS_STAY = 'Boot with moe_runner_backend="triton" and without SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED'
ROUTER_COPY = "_weight_fp32"
FROM_FP8 = "Boot from an FP8 checkpoint (fp8refit quantize), without --quantization"
_REMEDIES = {
    "KTEPWrapperMethod": "Boot without kt_weight_path: some of its experts are computed on the CPU",
    "PagedExpertsMoEMethod": "Boot without enable_paged_experts",
}
_ANOTHER_RUNNER = 'Boot with moe_runner_backend="triton" or "deep_gemm", and without moe_a2a_backend="megamoe"'


def why_not_read(layer: Any) -> Why:
    """Why `layer` cannot be refitted, apart from its kernel and tensor shapes; None if it can."""
    if getattr(layer, "_dwdp_bound", False):
        return "reads other ranks' experts from copies", "Boot without dwdp_size"
    method = getattr(layer, "quant_method", None)
    if any(getattr(method, flag, False) for flag in _MOVES_ROWS):
        return "its kernel moves rows of experts that are not quantized", _ROWS_STAY
    scales = (layer._parameters.get(f"{name}_weight_scale_inv") for name in ("w13", "w2"))
    if any(getattr(scale, "format_ue8m0", False) or getattr(scale, "power_of_two", False) for scale in scales):
        return "its kernel needs scales that are powers of two (UE8M0)", 'Boot with moe_runner_backend="triton"'
    return None


def quantizes_itself(layer: Any) -> bool:
    """Whether SGLang quantized a layer when it was booted."""
    method = getattr(layer, "quant_method", None)
    configs = (getattr(method, name, None) for name in ("quant_config", "quantization_config"))
    return any(getattr(config, "is_checkpoint_fp8_serialized", True) is False for config in configs)


def block_format(layer: Any) -> BlockFormat | None:
    """The format of a layer whose kernel reads rows, with the block size of the weight after loading; None if it is not known.

    SGLang marks scales that it rounds to powers of two; those are refused.
    """
    method = getattr(layer, "quant_method", None)
    holders = layer, getattr(layer, "scheme", None), method, getattr(method, "quant_config", None)
    sizes = (getattr(each, "weight_block_size", None) for each in holders)
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        return own_rows(layer.weight.device) if quantizes_itself(layer) else PER_ROW
    rows, columns = size
    return BlockFormat(block_size=(int(rows), int(columns)))


def kernel_of_experts(layer: Any) -> Kernel:
    """The runner that SGLang chose. 0.5.15 and 0.5.17 record it only on the quant method, and not for every runner."""
    method = getattr(layer, "scheme", None) or layer.quant_method  # compressed-tensors has schemes
    runner = getattr(layer, "runner_backend", None) or getattr(getattr(method, "runner", None), "runner_backend", None)
    method_name = type(method).__name__
    name = runner.value if runner is not None and method_name in _METHODS else method_name
    if getattr(layer, "_mega_moe_weights_built", False):
        name = "megamoe"
    if quantizes_itself(layer):
        is_read = method_name == "Fp8MoEMethod" and name in ROW_MAJOR_RUNNERS
        return Kernel(name=name, format=own_weights(layer.w13_weight.device) if is_read else None, remedy=FROM_FP8)
    held = block_format(layer) if name in ROW_MAJOR_RUNNERS else None
    if held is not None and held.has_rows and torch.version.hip is not None:
        held = None  # AITER shuffles such weights, and they keep their shape
    return Kernel(name=name, format=held, remedy=_REMEDIES.get(method_name, _ANOTHER_RUNNER))


def refreshes_of_routers(model: nn.Module) -> tuple[Refresh, ...]:
    """Refresh the float32 copies of GLM's router weights, which the first forward makes (from 0.5.12 to 0.5.17)."""
    return tuple(
        Refresh(name=f"{name}: float32 copy", run=partial(_copy_router, module))
        for name, module in model.named_modules()
        if ROUTER_COPY in module._buffers
    )


def _copy_router(router: Any) -> None:
    copy = router._buffers[ROUTER_COPY]
    if copy is not None:
        copy.copy_(router._parameters["weight"].detach())
