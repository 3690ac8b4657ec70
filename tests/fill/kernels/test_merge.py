"""Merged weights: the kernel against float64, whatever shape, dtype and strides."""

import pytest
import torch

from fp8refit.fill.kernels.merge import add_product_reference


@pytest.fixture(params=["kernel", "torch"])
def variant(request):
    return request.param


@pytest.fixture
def device(variant, device):
    """The CPU for torch, which merges these dtypes only there: on CUDA its product of BF16 is rounded more than once."""
    return device if variant == "kernel" else torch.device("cpu")


@pytest.fixture
def add_product(variant, device):
    from fp8refit.fill.kernels.triton_merge import add_product_triton

    return add_product_triton if variant == "kernel" else add_product_reference


def random_values(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def assert_merged(found, weight, up, down, scale):
    """Every value is one that lies next to the exact one, but for what float32 sums differ in."""
    exact = weight.double() + scale * (up.double() @ down.double())
    eps = torch.finfo(weight.dtype).eps
    slack = (
        torch.finfo(torch.float32).eps
        * up.shape[1]
        * (weight.double().abs() + scale * up.double().abs() @ down.double().abs())
    )
    assert ((found.double() - exact).abs() <= exact.abs() * eps / 2 + slack).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 257), (200, 96)])
@pytest.mark.parametrize("rank", [1, 8, 16, 64, 100])
def test_any_shape_and_rank(rank, shape, dtype, device, add_product):
    weight = random_values(*shape, dtype=dtype, device=device)
    up = random_values(shape[0], rank, dtype=dtype, device=device)
    down = random_values(rank, shape[1], dtype=dtype, device=device)
    before = weight.clone()
    out = torch.full_like(weight, torch.nan)
    assert add_product(weight, up, down, 0.375, out=out) is out
    assert_merged(out, weight, up, down, 0.375)
    assert torch.equal(weight, before)


def test_strides_and_rows_of_a_buffer(device, add_product):
    weight = random_values(96, 160, dtype=torch.bfloat16, device=device).mT
    up = random_values(8, 160, dtype=torch.bfloat16, device=device).mT
    down = random_values(96, 8, dtype=torch.bfloat16, device=device).mT
    buffer = torch.full((200, 96), torch.nan, dtype=torch.bfloat16, device=device)
    add_product(weight, up, down, 2.0, out=buffer[20:180])
    assert_merged(buffer[20:180], weight, up, down, 2.0)
    assert buffer[:20].isnan().all() and buffer[180:].isnan().all()


def test_a_weight_in_its_own_place(device, add_product):
    weight = random_values(130, 70, dtype=torch.bfloat16, device=device)
    up, down = (random_values(*shape, dtype=torch.bfloat16, device=device) for shape in ((130, 4), (4, 70)))
    before = weight.clone()
    add_product(weight, up, down, 1.0, out=weight)
    assert_merged(weight, before, up, down, 1.0)


def test_inf_and_nan_stay_what_they_are(device, add_product):
    weight = torch.zeros(128, 128, dtype=torch.bfloat16, device=device)
    weight[0, 0], weight[1, 1] = torch.nan, torch.inf
    up, down = (torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((128, 16), (16, 128)))
    add_product(weight, up, down, 1.0, out=weight)
    assert weight[0, 0].isnan() and weight[1, 1].isinf() and weight.isfinite().sum() == 128 * 128 - 2
