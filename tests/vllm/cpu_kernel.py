"""A block-FP8 linear kernel for vLLM on a CPU without AMX, which vLLM itself has none for.

vLLM's own method, loaders and post-processing run unmodified; only the product is torch's. With `ue8m0` the weights go
through vLLM's real power-of-two requantization when the engine boots, as DeepGEMM layers do on Hopper.
"""

from inspect import signature
from weakref import WeakKeyDictionary

import cpu_experts
import cpu_fp8_cache
import cpu_fp8_latent
import cpu_mxfp8
import cpu_nvfp4
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
from vllm.platforms import PlatformEnum
from vllm.utils import torch_utils

_last: WeakKeyDictionary = WeakKeyDictionary()
"""What each kernel dequantized last, from which bytes. Not on the kernel: an engine that keeps copies of weights is refused."""


class ReferenceBlockKernel(Fp8BlockScaledMMLinearKernel):
    """Multiplies by the dequantized weight; leaves storage as it was loaded."""

    apply_input_quant = False
    reads_row_major_block_fp8 = True

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    def apply_block_scaled_mm(self, A, B, As, Bs):
        return _product(A, self._dequantized(B.view(torch.uint8), Bs)).to(self.config.out_dtype)

    def _dequantized(self, codes, scale):
        """Made again only if a byte has changed: most of a tiny engine's time would go into it."""
        last = _last.get(self)
        if last is None or not (torch.equal(codes, last[0]) and torch.equal(scale, last[1])):
            block_n, block_k = self.weight_group_shape
            n, k = codes.shape
            scale_of_each = scale.repeat_interleave(block_n, 0)[:n].repeat_interleave(block_k, 1)[:, :k]
            weight = (codes.view(torch.float8_e4m3fn).float() * scale_of_each).double()
            last = _last[self] = codes.clone(), scale.clone(), weight
        return last[2]


class PowerOfTwoBlockKernel(ReferenceBlockKernel):
    """Also requantizes to power-of-two scales when the engine boots."""

    use_deep_gemm_e8m0 = True

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        scale = getattr(layer, "weight_scale_inv", None)
        scale = layer.weight_scale if scale is None else scale  # in other containers than DeepSeek's
        requant_weight_ue8m0_inplace(layer.weight, scale, layer.weight_block_size)


class RepackingBlockKernel(ReferenceBlockKernel):
    """Stands for Marlin and its like: another layout, of which it says nothing."""

    reads_row_major_block_fp8 = False


STOCK_DISPATCH = utils.dispatch_cpu_unquantized_gemm
"""How vLLM itself packs BF16 linears on a CPU."""

KERNELS = {
    "fp32": ReferenceBlockKernel,
    "ue8m0": PowerOfTwoBlockKernel,
    "up first": ReferenceBlockKernel,  # differs in experts only
    "tiles": ReferenceBlockKernel,  # in MXFP8 and NVFP4 only
    "repacking": RepackingBlockKernel,
}


def _product(x, weight):
    """In double precision: rounded to BF16 it says the same whatever else is in the batch, which asynchronous tests rely on."""
    return x.double() @ weight.double().t()


def _scaled_product(codes, weight, *, scale_a, scale_b, bias=None, out_dtype=None, **_):
    """In place of torch's product of FP8 by scales of rows and columns, or of one for all."""
    product = _product(codes.float() * scale_a, (weight.float() * scale_b).t())
    return (product if bias is None else product + bias).to(out_dtype)


def register(kind: str) -> None:
    """Make `kind` the kernel of every block-FP8 layer in this process."""
    # On every CPU the same kernels; with AMX vLLM packs weights, and a virtual machine may report AMX and not allow it.
    torch.cpu._is_amx_tile_supported = lambda: False
    cpu_experts.register(kind)
    cpu_fp8_cache.register()
    cpu_fp8_latent.register()
    cpu_mxfp8.register(kind)
    cpu_nvfp4.register(kind)
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, KERNELS[kind])
    if "pin_memory" in signature(torch_utils.async_tensor_h2d).parameters:  # for adapters, in vLLM 0.22; it needs a GPU
        torch_utils.async_tensor_h2d.__defaults__ = (False,)
    torch._scaled_mm = _scaled_product  # which takes a CPU minutes, in most versions of torch

    def linear_of_any_batch(x, weight, bias=None):
        product = _product(x, weight)
        return (product if bias is None else product + bias).to(x.dtype)

    def keep_weight(layer, remove_weight):
        layer.cpu_linear = linear_of_any_batch

    # Stock vLLM packs BF16 linears for oneDNN on a CPU and leaves their `weight` empty; a GPU keeps it.
    utils.dispatch_cpu_unquantized_gemm = keep_weight
