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
