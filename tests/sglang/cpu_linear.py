"""A product for SGLang's block-FP8 linear layers on a CPU without AMX, which SGLang itself has none for.

SGLang's own method, dispatch, loaders and post-processing run unmodified, on the branch that CUDA takes; only the product of
its Triton kernel is torch's. DeepGEMM, CUTLASS and their power-of-two requantization never run.
"""

import functools

import torch
from sglang.srt.layers import parameter
from sglang.srt.layers.quantization import fp8, fp8_utils, w8a8_fp8
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8
from sglang.srt.models.deepseek_common import attention_backend_handler, deepseek_weight_loader
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from torch import Tensor


def register() -> None:
    """Let block-FP8 layers of this process keep a GPU's layout, and multiply by the dequantized weight."""
    fp8._is_cpu = False  # else weights are packed for AMX, or refused without it
    parameter._is_cpu = False  # else loaders cast silently what CUDA's refuse to
    deepseek_weight_loader._is_cuda = True  # else absorbed copies are quantized anew, with one scale for all
    # Torch-native attention reads latents from the KV cache, in prefill too, where SGLang would have it read keys and values.
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)

    @functools.wraps(fp8_utils.triton_w8a8_block_fp8_linear)
    def multiply(input, weight, block_size, weight_scale, input_scale=None, bias=None):
        assert input_scale is None
        # In double precision: rounded to BF16 it says the same whatever else is in the batch.
        product = input.double() @ dequantized(weight, weight_scale, block_size).double().t()
        return (product if bias is None else product + bias).to(input.dtype)

    @functools.wraps(fp8_utils.apply_fp8_linear)
    def multiply_by_rows(input, weight, weight_scale, input_scale=None, bias=None, **options):
        assert input_scale is None and weight_scale.numel() == weight.shape[1]
        product = input.double() @ (weight.double() * weight_scale.double().view(1, -1))
        return (product if bias is None else product + bias).to(input.dtype)

    fp8_utils.triton_w8a8_block_fp8_linear = multiply
    for module in (compressed_tensors_w8a8_fp8, fp8, w8a8_fp8):
        module.apply_fp8_linear = multiply_by_rows
    for module in (fp8, w8a8_fp8):  # as on a GPU that multiplies FP8; then weights get one scale per row
        module.cutlass_fp8_supported = lambda *_: True
        module.per_token_group_quant_fp8 = quantize_rows
    fp8.scaled_fp8_quant = quantize_weight
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True  # it asks a GPU what it can do


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """As the kernel for rows that are groups."""
    assert group_size == x.shape[1]
    scale = x.float().abs().amax(1, keepdim=True) / torch.full((len(x), 1), 448.0)
    return (x.float() * (torch.ones_like(scale) / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def quantize_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernel for whole matrices."""
    codes, scale = quantize_rows(x.reshape(1, -1), x.numel())
    return codes.view(x.shape), scale.view(1)


def dequantized(weight: Tensor, scale: Tensor, block_size: list[int]) -> Tensor:
    """The float32 values of a matrix of codes."""
    block_n, block_k = block_size
    n, k = weight.shape
    return weight.float() * scale.repeat_interleave(block_n, 0)[:n].repeat_interleave(block_k, 1)[:, :k]
