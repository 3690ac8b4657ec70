"""MXFP8 linear kernels for vLLM on a CPU, which vLLM has none for: its own emulation, and Marlin's with the packing emulated.

vLLM's own methods and post-processing run unmodified. The operation that packs codes (`gptq_marlin_repack`, a CUDA kernel) is
replaced by vLLM's own Python for it, and the product is torch's.
"""

import os

import torch
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum

from fp8refit.kernels import dequantize_blockwise
from fp8refit.kernels.placement import codes_in_rows, scales_in_rows

BLOCK = (1, 32)


def repack(b_q_weight, size_k, size_n, num_bits):
    """`gptq_marlin_repack` without act-order, for four codes in a word along K."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    codes = b_q_weight.view(torch.uint8).view(size_k // 4, size_n, 4).transpose(1, 2).reshape(size_k, size_n)
    return marlin_weights(codes.to(torch.int32), size_k, size_n, num_bits, get_weight_perm(num_bits))


def make_marlin():
    """Under the name of vLLM's, by which it is known."""
    from vllm.model_executor.kernels.linear.mxfp8 import marlin
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8

    class MarlinMxfp8LinearKernel(marlin.MarlinMxfp8LinearKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def process_weights_after_loading(self, layer):
            marlin_utils_fp8.ops.gptq_marlin_repack = repack
            super().process_weights_after_loading(layer)

        def apply_weights(self, layer, x, bias=None):
            codes = layer.weight.view(torch.float8_e4m3fn).view(len(layer.weight), -1, 1024)
            scales = layer.weight_scale.view(torch.uint8).view(len(layer.weight_scale), -1, 64)
            weight = dequantize_blockwise(codes_in_rows(codes), scales_in_rows(scales), block_size=BLOCK)
            product = x.double() @ weight[: layer.output_size_per_partition].double().t()
            if bias is not None:
                product += bias.view(-1, 4, 4, 2).transpose(1, 2).reshape(-1)
            return product.to(x.dtype)

    return MarlinMxfp8LinearKernel


def register(kind):
    """Make rows, or tiles, what every MXFP8 layer in this process holds."""
    if not hasattr(linear, "_POSSIBLE_MXFP8_KERNELS"):
        return
    if kind == "tiles":
        kernel = make_marlin()
    else:
        os.environ["VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"] = "0"
        from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel as kernel
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [kernel]


def register_experts(kind, experts):
    """Make these the experts of every MXFP8 layer in this process, in rows or in tiles."""
    try:
        from vllm.model_executor.layers.fused_moe.oracle import mxfp8
    except ImportError:
        return  # older versions have no such experts
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8

    backends = mxfp8.Fp8MoeBackend
    chosen = backends.MARLIN if kind == "tiles" else getattr(backends, "TRITON_MXFP8", None)
    mxfp8._mxfp8_backend_to_kernel_cls = lambda backend: [experts] if backend is chosen else []
    if kind == "tiles":
        marlin_utils_fp8.ops.gptq_marlin_repack = repack
