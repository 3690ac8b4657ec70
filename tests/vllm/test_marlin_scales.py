"""A slice of a weight in NVFP4 as a refit writes it for Marlin, and as vLLM's own post-processing of a checkpoint leaves it.

The largest value of the weight may lie on another rank. Then vLLM raises the scales of this slice by a power of two that
depends on its own values. The packing of codes (`gptq_marlin_repack`, a CUDA kernel) is vLLM's own Python.
"""

from dataclasses import replace

import pytest
import torch

from fp8refit.kernels.placement import packed
from fp8refit.kernels.reference import global_scale_of, quantize_two_levels
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.work import Task
from fp8refit.live.formats import NVFP4, Placement
from fp8refit.live.slots import FP8_DTYPE, Op

pytestmark = pytest.mark.vllm
ROWS, COLUMNS = 192, 256


class Layer(torch.nn.Module):
    """What vLLM has of a layer once a checkpoint was loaded."""

    def __init__(self, weight: torch.Tensor, over_all: torch.Tensor) -> None:
        super().__init__()
        codes, scales = quantize_two_levels(weight, NVFP4, over_all)
        self.output_size_per_partition, self.input_size_per_partition = ROWS, COLUMNS
        self.params_dtype = torch.bfloat16
        self.weight = torch.nn.Parameter(packed(codes), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        self.weight_global_scale = torch.nn.Parameter(over_all.reshape(()), requires_grad=False)


@pytest.fixture(scope="module")
def prepared():
    """vLLM's own function."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    from tests.vllm.cpu_nvfp4 import repack

    def run(layer: Layer) -> Layer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marlin_utils_fp4.ops, "gptq_marlin_repack", repack)
            patch.setattr(marlin_utils_fp4, "marlin_make_workspace_new", lambda *_: None, raising=False)
            marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
        return layer

    return run


@pytest.mark.parametrize("times", [1.0, 1.9, 2.1, 7.0, 300.0, 447.0])
def test_scales_are_raised_by_what_vllm_raises_them(times, prepared):
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3:7, :64] *= 2.0**-9
    own = weight.abs().amax().float().reshape(1)
    task = Task(
        op=Op.QUANTIZE,
        source=weight,
        offset=(0, 0),
        target=torch.full((COLUMNS // 16, ROWS // 64, 512), 0x55, dtype=torch.uint8),
        scale=torch.full((COLUMNS // 16, ROWS // 64, 64), 0x19, dtype=torch.uint8).view(FP8_DTYPE),
        global_scale=torch.tensor(77.0),
        format=replace(NVFP4, placement=Placement.MARLIN),
        maximum=own * times,
        own_maximum=own,
    )
    ReferenceTable([task]).launch(check=True)
    layer = prepared(Layer(weight, global_scale_of(own * times, NVFP4.scale_format)))
    assert task.target.flatten().tolist() == layer.weight.view(torch.uint8).flatten().tolist()
    assert task.scale.view(torch.uint8).flatten().tolist() == layer.weight_scale.view(torch.uint8).flatten().tolist()
    assert task.global_scale.item() == layer.weight_global_scale.item()
