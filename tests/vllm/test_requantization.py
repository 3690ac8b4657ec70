"""vLLM's requantization at boot leaves our power-of-two bytes as they are: the law behind `ScaleFormat.UE8M0`.

vLLM compiles its block cast. Here it runs eagerly: without a GPU a compiled one would be other code anyway, and
compiling takes a minute.
"""

import pytest
import torch

from fp8refit import quantize_blockwise

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def requantize():
    """vLLM's own function, on copies."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    def run(codes: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = codes.clone(), scale.clone()
        with torch.compiler.set_stance("force_eager"):
            requant_weight_ue8m0_inplace(codes, scale, block_size)
        return codes, scale

    return run


def matrix_with_maxima(maxima: torch.Tensor, block_size: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """A float32 matrix whose blocks have exactly these largest magnitudes, and values down to a thousandth of them."""
    num_n, num_k = maxima.shape
    block_n, block_k = block_size
    generator = torch.Generator().manual_seed(0)
    shape = (num_n, block_n, num_k, block_k)
    blocks = (
        10 ** (-3 * torch.rand(shape, generator=generator)) * torch.rand(shape, generator=generator).sub(0.5).sign()
    )
    blocks[:, 0, :, 0] = 1
    return (blocks * maxima[:, None, :, None]).view(num_n * block_n, num_k * block_k)


def assert_is_fixed_point(weight: torch.Tensor, requantize, block_size: tuple[int, int] = (128, 128)) -> None:
    codes, scale = quantize_blockwise(weight, block_size=block_size, scale_format="ue8m0")
    codes_after, scale_after = requantize(codes, scale, block_size)
    assert torch.equal(scale_after, scale)
    assert torch.equal(codes_after.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_uniform_block_maxima(dtype, requantize):
    maxima = 10 ** (12 * torch.rand((16, 24), generator=torch.Generator().manual_seed(1)) - 8)
    assert_is_fixed_point(matrix_with_maxima(maxima).to(dtype), requantize)


@pytest.mark.parametrize("maximum", [0.0, 1e-8, 1e-6, 9.9e-5, 1e-4, 1.01e-4])
def test_blocks_near_and_below_the_floor(maximum, requantize):
    assert_is_fixed_point(matrix_with_maxima(torch.full((2, 3), maximum)), requantize)


@pytest.mark.parametrize("top", [448.0, 464.0])
def test_block_maxima_at_the_edges_of_a_power_of_two(top, requantize):
    edges = torch.tensor([top * 2.0**k for k in range(-20, 8)])
    after = torch.nextafter(edges, torch.full_like(edges, torch.inf))
    before = torch.nextafter(edges, torch.zeros_like(edges))
    assert_is_fixed_point(matrix_with_maxima(torch.stack([before, edges, after])), requantize)


def test_ragged_edges_and_other_blocks(requantize):
    maxima = 10 ** (12 * torch.rand((3, 3), generator=torch.Generator().manual_seed(2)) - 8)
    assert_is_fixed_point(matrix_with_maxima(maxima)[:300, :272], requantize)
    assert_is_fixed_point(matrix_with_maxima(maxima, (64, 64))[:150, :170], requantize, (64, 64))


def test_the_usual_rounding_up_of_448_is_no_fixed_point(requantize):
    """Why 464: with `2 ** ceil(log2(amax / 448))` a block whose maximum rounds down to 224 is halved at boot."""
    maximum = 230.0 * 2.0**10
    weight = matrix_with_maxima(torch.full((1, 1), maximum))
    scale = torch.full((1, 1), 2.0**10)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    codes_after, scale_after = requantize(codes, scale, (128, 128))
    assert scale_after.item() == 2.0**9
    assert not torch.equal(codes_after.view(torch.uint8), codes.view(torch.uint8))
    assert_is_fixed_point(weight, requantize)
