"""The formats of an engine that quantized itself are vLLM's own block cast (`fp8_per_block`), bit for bit.

vLLM compiles it. Here it runs eagerly, as in `test_requantization.py`; on a GPU `tests/gpu/test_kernels.py` compares the
compiled one.
"""

import pytest
import torch

from fp8refit import quantize_blockwise
from tests.vllm.test_requantization import matrix_with_maxima

pytestmark = pytest.mark.vllm

TINY = [0.0, 1e-45, 1e-40, 1e-38, 1e-12, 1e-10, 1e-6, 9.9e-5, 1e-4, 1.01e-4, 2e-4, 1.0]


@pytest.fixture(scope="module")
def cast():
    """vLLM's own function."""
    pytest.importorskip("vllm")
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    def run(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.compiler.set_stance("force_eager"):
            return per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)

    return run


def bytes_of(codes: torch.Tensor, scale: torch.Tensor) -> tuple[list[int], list[int]]:
    return codes.view(torch.uint8).flatten().tolist(), scale.view(torch.int32).flatten().tolist()


def random_weight(rows: int, cols: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, cols), generator=torch.Generator().manual_seed(seed)) * 0.02


def midpoints() -> torch.Tensor:
    """Values that lie right between two codes, or beside that, after the division."""
    tops = torch.arange(1, 129, dtype=torch.float32) * 7
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    blocks = torch.zeros(len(tops), 128, 128)
    blocks.view(len(tops), -1)[:, : len(between)] = between * tops[:, None] / 448
    blocks[:, -1, -1] = tops
    return blocks.view(-1, 128)


WEIGHTS = {
    "normal": lambda: random_weight(384, 640, 0),
    "ragged": lambda: random_weight(300, 272, 1),
    "log-uniform maxima": lambda: matrix_with_maxima(
        10 ** (12 * torch.rand((8, 24), generator=torch.Generator().manual_seed(2)) - 8)
    ),
    "tiny and zero": lambda: matrix_with_maxima(torch.tensor([TINY])),
    "midpoints": midpoints,
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_cpu_it_is_the_floored_format(name, dtype, cast):
    weight = WEIGHTS[name]().to(dtype)
    assert bytes_of(*cast(weight)) == bytes_of(*quantize_blockwise(weight, scale_format="fp32_floored"))


def test_the_format_of_checkpoints_has_another_scale_for_blocks_of_zeros(cast):
    weight = WEIGHTS["tiny and zero"]().bfloat16()
    assert bytes_of(*cast(weight)) != bytes_of(*quantize_blockwise(weight))


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_reciprocal_format_differs_by_at_most_one_bit_of_a_scale(name):
    weight = WEIGHTS[name]().bfloat16()
    (_, one), (_, other) = (
        quantize_blockwise(weight, scale_format=f"fp32_{kind}") for kind in ("floored", "reciprocal")
    )
    assert int((one.view(torch.int32) - other.view(torch.int32)).abs().max()) <= 1


def rows_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_blockwise(weight, block_size=(1, weight.shape[1]), scale_format="fp32_dividing")


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_quantized_as_vllm_does_per_channel(name, dtype):
    own = pytest.importorskip("vllm.model_executor.layers.quantization.online.fp8")
    if not hasattr(own, "_fp8_channel_scale"):
        pytest.skip("in this version an operation of the GPU quantizes")
    weight = WEIGHTS[name]().to(dtype)
    scale = own._fp8_channel_scale(weight.abs().amax(dim=-1, keepdim=True))
    assert bytes_of(own._fp8_quant_per_channel(weight, scale), scale) == bytes_of(*rows_of(weight))


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "tiny and zero"])
def test_rows_are_quantized_as_compressed_tensors_does_in_float32(name):
    """From BF16 it rounds scales and quotients to BF16. For rows of tiny values it has no floor."""
    pytest.importorskip("vllm")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    arguments = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    weight = WEIGHTS[name]().float()
    weight = weight[weight.abs().amax(dim=1) > 2**-9]
    scale, zero_point = calculate_qparams(*torch.aminmax(weight, dim=1, keepdim=True), arguments)
    codes = quantize(weight, scale, zero_point, arguments, dtype=torch.float8_e4m3fn)
    assert bytes_of(codes, scale) == bytes_of(*rows_of(weight))
