"""vLLM's expert kernels: which of them read block-FP8 weights in checkpoint layout, and what they derive from scales."""

from typing import Any

from torch import Tensor, nn

from fp8refit.live.names import name_of_scale
from fp8refit.live.slots import SCALE_SUFFIX
from fp8refit.tracing.rules import Kernel, Why
from fp8refit_vllm.compat import MX_SCALES, block_format, has_small_scales

_DEEP_GEMM = ("DEEPGEMM", "BATCHED_DEEPGEMM")
EXPERTS_BACKENDS = frozenset({"TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS", *_DEEP_GEMM})
"""vLLM's expert kernels that read weights in the layout that slots are written in."""
MARLIN = "MARLIN"
_UNQUANTIZED = EXPERTS_BACKENDS.difference(_DEEP_GEMM)
_OF_MXFP8 = frozenset({MARLIN, "TRITON_MXFP8", "EMULATION"})
"""Those that read MXFP8, in tiles or in rows."""

NOT_MXFP8 = 'Boot with quantization="fp8_per_block"'
"""What to do if an MXFP8 layer is held in a way that is not known."""
NOT_NVFP4_EXPERTS = (
    'Boot with enable_expert_parallel=True, moe_backend="marlin" and dtype="bfloat16", or boot BF16 with '
    'quantization="fp8_per_block"'
)
"""What to do if experts are NVFP4 in a way that is not known."""
_ANOTHER_BACKEND = 'Boot with moe_backend="triton"'

_LEAST_FLASHINFER_SCALE = 1e-10


def experts_backend(module: nn.Module) -> str:
    """The name of the backend that multiplies a layer's experts."""
    method = getattr(module, "quant_method", None)
    found = (getattr(method, f"{kind}_backend", None) for kind in ("fp8", "nvfp4", "unquantized"))
    backend = next(filter(None, found), None)
    return str(getattr(backend, "name", type(method).__name__))


def kernel_of_experts(module: Any) -> Kernel:
    """The backend that multiplies a layer's experts."""
    backend, held = experts_backend(module), None
    if has_small_scales(module):
        # Of slices, Marlin's scales would follow from those of all experts.
        if backend == MARLIN and module.moe_config.tp_size == 1:
            held = block_format(module, has_powers_of_two=False)
        return Kernel(name=backend, format=held, remedy=NOT_NVFP4_EXPERTS)
    is_known = backend in (_OF_MXFP8 if _is_mxfp8(module) else EXPERTS_BACKENDS)
    if is_known and not _multiplies_scales(module):
        held = block_format(module, has_powers_of_two=backend in _DEEP_GEMM and _rounds_scales())
    remedy = NOT_MXFP8 if _is_mxfp8(module) else _ANOTHER_BACKEND
    return Kernel(name=backend, format=held, remedy=remedy)


def _is_mxfp8(module: nn.Module) -> bool:
    scale = module._parameters.get("w13_weight_scale")
    return scale is not None and scale.dtype in MX_SCALES


def _multiplies_scales(module: Any) -> bool:
    """Whether a backend keeps products of its scales and those of activations."""
    return getattr(module.quant_method.moe_quant_config, "g1_alphas", None) is not None


def _rounds_scales() -> bool:
    """Whether DeepGEMM's experts get scales that are powers of two at boot."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return bool(is_deep_gemm_e8m0_used())


def why_not_read(module: Any) -> Why:
    """Why a layer of experts cannot be refitted, apart from its kernel for FP8 weights and its tensors; None if it can."""
    backend = experts_backend(module)
    is_quantized = getattr(module.quant_method, "unquantized_backend", None) is None
    if not is_quantized and backend not in _UNQUANTIZED:
        return f"its kernel {backend} repacks experts, or is not known to leave them as loaded", _ANOTHER_BACKEND
    return _why_experts_move(module)


def _why_experts_move(module: Any) -> Why:
    """Why a layer's experts may not be where they were loaded; None if they are, or `eplb` says where they are."""
    config = module.moe_config
    if config.num_experts != config.num_logical_experts and not config.moe_parallel_config.enable_eplb:
        reason = f"holds {config.num_experts} experts for {config.num_logical_experts} of the checkpoint"
        return reason, "Boot without redundant experts, and with shared experts apart"
    return None


def sync_experts(module: Any) -> None:
    """Update what an expert kernel derived from its parameters, after they were written.

    The kernel reads scales through `moe_quant_config`, which points to other tensors after vLLM's own reload.
    FlashInfer clamps scales to at least 1e-10 at boot.
    """
    held = [tensor for name, tensor in module._parameters.items() if name_of_scale(name).endswith(SCALE_SUFFIX)]
    if not held:
        return
    if experts_backend(module) == "FLASHINFER_CUTLASS":
        for scale in held:
            scale.data.clamp_(min=_LEAST_FLASHINFER_SCALE)
    config = module.quant_method.moe_quant_config
    given = [module._parameters.get(name) for name in ("w13_input_scale", "w2_input_scale")]
    for scale, live in zip(scales_of_experts(config), (*held, *given), strict=True):
        if scale is not None and live is not None and scale.data_ptr() != live.data_ptr():
            scale.copy_(live)


def scales_of_experts(config: Any) -> tuple[Tensor | None, ...]:
    """What the kernel reads: scales of both weights, and static ones of what they are given."""
    return config.w1_scale, config.w2_scale, getattr(config, "a1_scale", None), getattr(config, "a2_scale", None)
