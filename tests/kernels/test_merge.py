"""Merged weights: the kernel against float64, whatever shape, dtype and strides."""

import pytest
import torch

from fp8refit.kernels.merge import Product, add_product_reference


@pytest.fixture(params=["kernel", "torch"])
def variant(request):
    return request.param


ONLY_KERNELS = pytest.mark.parametrize("variant", ["kernel"])


@pytest.fixture
def device(variant, device):
    """The CPU for torch, which merges these dtypes only there: on CUDA its product of BF16 is rounded more than once."""
    return device if variant == "kernel" else torch.device("cpu")


@pytest.fixture
def add_product(variant, device):
    from fp8refit.kernels.triton_merge import add_product_triton

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
        * (weight.double().abs() + abs(scale) * up.double().abs() @ down.double().abs())
    )
    slack += torch.finfo(weight.dtype).tiny * eps  # of values below the normal ones
    assert ((found.double() - exact).abs() <= exact.abs() * eps / 2 + slack).all()


@pytest.mark.parametrize("low_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 257), (200, 96)])
@pytest.mark.parametrize("rank", [1, 8, 16, 64, 100])
def test_any_shape_and_rank(rank, shape, dtype, low_dtype, device, add_product):
    """Matrices of fp32 are not rounded to the dtype of the weight."""
    weight = random_values(*shape, dtype=dtype, device=device)
    up = random_values(shape[0], rank, dtype=low_dtype or dtype, device=device)
    down = random_values(rank, shape[1], dtype=low_dtype or dtype, device=device)
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


@ONLY_KERNELS
@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_in_one_launch_are_each_as_alone(dtype, low_dtype, device):
    from fp8refit.kernels.triton_merge import add_product_triton, add_products_triton

    products, alone = [], []
    for rows, cols, rank, scale in [(128, 128, 16, 0.5), (200, 96, 8, 1.0), (1, 16, 64, 2.0), (257, 272, 100, 0.375)]:
        weight = random_values(rows, cols, dtype=dtype, device=device)
        # Whole numbers have the same sums in any order: interpreted kernels leave it to numpy, which goes by the processor.
        up = (4 * random_values(rows, rank, dtype=low_dtype, device=device)).round()
        down = (4 * random_values(rank, cols, dtype=low_dtype, device=device)).round()
        out = torch.full_like(weight, torch.nan)
        products.append(Product(weight=weight, up=up, down=down, scale=scale, out=out))
        alone.append(add_product_triton(weight, up, down, scale, out=torch.full_like(weight, torch.nan)))
    assert add_products_triton(products) == []
    for each, expected in zip(products, alone, strict=True):
        assert torch.equal(each.out, expected)
        assert_merged(each.out, each.weight, each.up, each.down, each.scale)


@ONLY_KERNELS
def test_the_table_of_the_same_products_is_kept_and_values_are_read_again(device):
    from fp8refit.kernels.triton_merge import _upload, add_products_triton

    shapes = {"weight": (64, 32), "up": (64, 16), "down": (16, 32), "out": (64, 32)}
    tensors = {name: random_values(*shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    _upload.cache_clear()
    for scale, change, hits, misses in ((0.5, 0, 0, 1), (0.5, 1, 1, 1), (-0.25, 0, 1, 2), (0.5, 1, 2, 2)):
        tensors["up"] += change
        product = Product(**tensors, scale=scale)
        assert add_products_triton([product]) == []
        assert_merged(product.out, product.weight, product.up, product.down, scale)
        assert _upload.cache_info()[:2] == (hits, misses)
    tensors["out"] = torch.empty_like(tensors["out"])
    add_products_triton([Product(**tensors, scale=0.5)])
    assert_merged(tensors["out"], tensors["weight"], tensors["up"], tensors["down"], 0.5)


@ONLY_KERNELS
def test_unusual_layouts_are_left_to_the_kernel_for_one(device):
    from fp8refit.kernels.triton_merge import add_products_triton

    def product(**changed):
        shapes = {"weight": (64, 32), "up": (64, 16), "down": (16, 32), "out": (64, 32)}
        tensors = {name: random_values(*shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
        return Product(**tensors | {"scale": 1.0} | changed)

    buffer = torch.zeros(64 * 40 + 1, dtype=torch.bfloat16, device=device)
    unusual = [
        product(weight=torch.zeros(32, 64, dtype=torch.bfloat16, device=device).mT),
        product(up=torch.zeros(16, 64, dtype=torch.bfloat16, device=device).mT),
        product(down=torch.zeros(32, 16, dtype=torch.bfloat16, device=device).mT),
        product(out=buffer[1 : 64 * 32 + 1].view(64, 32)),
        product(out=buffer[: 64 * 40].view(64, 40)[:, :32]),
        product(weight=torch.zeros(64, 32, dtype=torch.float64, device=device)),
        product(weight=torch.zeros(64, 30, dtype=torch.bfloat16, device=device)),
        product(weight=torch.zeros(0, 32, dtype=torch.bfloat16, device=device)),
    ]
    usual = product()
    before = [each.out.clone() for each in unusual]
    assert add_products_triton([*unusual, usual]) == unusual
    assert all(torch.equal(each.out, held) for each, held in zip(unusual, before, strict=True))
    assert_merged(usual.out, usual.weight, usual.up, usual.down, 1.0)
