"""A product for SGLang's block-FP8 experts on a CPU, beside that of its linear layers (`cpu_linear.py`).

Routing, dispatch to the experts of each rank, loaders and post-processing are SGLang's own. Its Triton kernel, DeepGEMM and
CUTLASS never run, and the activations between the two products are not quantized.
"""

import torch
from cpu_linear import dequantized
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8MoE


def register() -> None:
    """Let block-FP8 experts of this process multiply by their dequantized weights."""
    fp8.Fp8MoEMethod.apply = _apply
    CompressedTensorsW8A8Fp8MoE.apply_weights = _apply


def _apply(self, layer, dispatch_output):
    x = dispatch_output.hidden_states
    weights, ids, _ = dispatch_output.topk_output
    # One after another in the order of experts, and in double precision: a row says the same whatever else is in the batch.
    result = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(layer.w13_weight)):
        rows, places = torch.where(ids == expert)  # another rank's experts are -1
        if len(rows):
            result[rows] += weights[rows, places].double()[:, None] * _forward(self, layer, expert, x[rows].double())
    return StandardCombineInput(hidden_states=result.to(x.dtype))


def _forward(method, layer, expert: int, x: torch.Tensor) -> torch.Tensor:
    sizes = (getattr(each, "weight_block_size", None) for each in (method, getattr(method, "quant_config", None)))
    block_size = next((size for size in sizes if size is not None), None)
    named = {name.removesuffix("_inv"): tensor for name, tensor in layer.named_parameters()}
    w13, w2 = (
        _dequantized(weight[expert], scale[expert], block_size)
        for weight, scale in ((named[f"{half}_weight"], named[f"{half}_weight_scale"]) for half in ("w13", "w2"))
    )
    gate, up = (x @ w13.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.t()


def _dequantized(weight: torch.Tensor, scale: torch.Tensor, block_size: list[int] | None) -> torch.Tensor:
    """By scales of blocks or of rows, or by one for all."""
    if scale.ndim == 0:
        return weight.double() * scale.double()
    return dequantized(weight, scale, block_size or (1, weight.shape[-1])).double()
