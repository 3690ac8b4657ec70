"""NVFP4 linear kernels for vLLM on a CPU, which vLLM has none for: rows, and Marlin's tiles with the packing emulated.

vLLM's own methods, loaders and post-processing run unmodified. The operation that packs codes (`gptq_marlin_repack`, a CUDA
kernel) is replaced by vLLM's own Python for it, and the product is torch's.
"""

import torch
from vllm.model_executor.kernels import linear

from fp8refit.kernels.placement import half_codes_in_order, scales_in_order, unpacked

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def repack(b_q_weight, size_k, size_n, num_bits, **_):
    """`gptq_marlin_repack` without act-order, for eight codes in a word along K, or for four."""
    if num_bits == 8:
        import cpu_mxfp8

        return cpu_mxfp8.repack(b_q_weight, size_k, size_n, num_bits)
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    bytes_ = b_q_weight.view(torch.uint8).view(size_k // 8, size_n, 4)
    codes = unpacked(bytes_).transpose(1, 2).reshape(size_k, size_n)
    return marlin_weights(codes.to(torch.int32), size_k, size_n, num_bits, get_weight_perm(num_bits))


def dequantized(codes, scales, over_all):
    """The values of codes (N, K), each in a byte, and scales (N, K / 16)."""
    values = VALUES[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    return values * scales.float().repeat_interleave(16, 1) * over_all


def make(name):
    """Marlin's under the name of vLLM's, by which it is known; one of the tests', which says that it reads rows."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    class Kernel(NvFp4LinearKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        @classmethod
        def can_implement(cls, config):
            return True, None

        def process_weights_after_loading(self, layer):
            if name.startswith("Marlin"):
                marlin_utils_fp4.ops.gptq_marlin_repack = repack
                marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)

        def apply_weights(self, layer, x, bias=None):
            weight = self._values(layer)
            product = x.double() @ weight[: layer.output_size_per_partition].double().t()
            if bias is not None:
                product += bias.view(-1, 4, 4, 2).transpose(1, 2).reshape(-1) if name.startswith("Marlin") else bias
            return product.to(x.dtype)

        def _values(self, layer):
            if not name.startswith("Marlin"):
                return dequantized(unpacked(layer.weight), layer.weight_scale, layer.weight_global_scale)
            codes = half_codes_in_order(unpacked(layer.weight.view(torch.uint8).view(len(layer.weight), -1, 512)))
            raised = scales_in_order(layer.weight_scale.view(torch.uint8).view(len(layer.weight_scale), -1, 64))
            size_n = 64 * codes.shape[0]
            wide = (raised.reshape(size_n, -1).to(torch.int16) << 7).view(torch.float16).float() / 2**7
            return dequantized(codes.reshape(size_n, -1), wide, layer.weight_global_scale / 2.0**119)

    Kernel.__name__ = Kernel.__qualname__ = name
    Kernel.reads_row_major_block_fp8 = not name.startswith("Marlin")
    return Kernel


def dequantized_experts(codes, scales, over_all):
    """Stacks of experts as Marlin's kernels read them, as values."""
    halves = half_codes_in_order(unpacked(codes.view(torch.uint8).view(*codes.shape[:2], -1, 512)))
    raised = scales_in_order(scales.view(torch.uint8).view(*scales.shape[:2], -1, 64))
    num_experts, size_n = len(codes), 64 * halves.shape[1]
    wide = (raised.reshape(num_experts, size_n, -1).to(torch.int16) << 7).view(torch.float16).float() / 2**7
    parts = zip(halves.reshape(num_experts, size_n, -1), wide, over_all / 2.0**119, strict=True)
    return torch.stack([dequantized(*each) for each in parts])


def register_experts(experts):
    """Make these the experts of every layer in NVFP4 in this process, in tiles."""
    try:
        from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    except ImportError:
        return  # older versions have no such experts
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    marlin = nvfp4.NvFp4MoeBackend.MARLIN
    nvfp4.backend_to_kernel_cls = lambda backend: [experts] if backend is marlin else []
    marlin_utils_fp4.ops.gptq_marlin_repack = repack


def register(kind):
    """Make rows, or tiles, what every NVFP4 layer in this process holds."""
    if not hasattr(linear, "MarlinNvFp4LinearKernel"):
        return
    from vllm.model_executor.layers.quantization import modelopt

    kernel = make("MarlinNvFp4LinearKernel" if kind == "tiles" else "ReferenceNvFp4LinearKernel")
    for module in (linear, modelopt):
        if hasattr(module, "MarlinNvFp4LinearKernel"):
            module.MarlinNvFp4LinearKernel = kernel
