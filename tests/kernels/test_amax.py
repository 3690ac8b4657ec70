"""Maxima: the kernel equals torch, whatever it reads and however it lies in memory."""

import math

import pytest
import torch

from fp8refit.kernels import Maxima
from fp8refit.kernels.amax import raise_maxima_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN, INF = float("nan"), float("inf")


def random_values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def raise_maxima(device):
    """The kernel. It is defined for the interpreter or the GPU when it is first imported, which `device` prepares."""
    from fp8refit.kernels.triton_amax import raise_maxima_triton

    return raise_maxima_triton


@pytest.fixture(params=["kernel", "torch"])
def make_maxima(request, device, raise_maxima):
    """Makes `Maxima` that go by the kernel, or by torch."""

    def make(num_places: int) -> Maxima:
        maxima = Maxima(num_places, device)
        maxima._raise_maxima = raise_maxima if request.param == "kernel" else raise_maxima_reference
        return maxima

    return make


@pytest.fixture
def assert_same_as_torch(device, raise_maxima):
    """Holds the kernel to the bits that torch gives; NaNs may differ in theirs. Gives the values."""

    def check(*tensors: torch.Tensor | None, num_places: int = 8, first_place: int = 2) -> list[float]:
        bits = torch.zeros(num_places, dtype=torch.int32, device=device)
        expected = bits.clone()
        raise_maxima(bits, first_place, tensors)
        raise_maxima_reference(expected, first_place, tensors)
        values = bits.view(torch.float32)
        torch.testing.assert_close(values, expected.view(torch.float32), rtol=0, atol=0, equal_nan=True)
        return values.tolist()

    return check


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("num_cols", [1, 3, 16, 255, 256, 257, 640])
def test_any_shape(num_rows, num_cols, dtype, device, assert_same_as_torch):
    values = random_values(num_rows, num_cols, dtype=dtype).to(device)
    assert assert_same_as_torch(values)[2] == values.abs().max().item() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["first", "last", "last row", "last column"])
def test_the_largest_is_found_wherever_it_is(place, dtype, device, assert_same_as_torch):
    values = random_values(70, 520, dtype=dtype).to(device)
    row, col = {"first": (0, 0), "last": (-1, -1), "last row": (-1, 17), "last column": (17, -1)}[place]
    values[row, col] = -1000
    assert assert_same_as_torch(values)[2] == 1000


def test_slices_of_a_fused_activation(device, make_maxima):
    qkv = random_values(45, 512 + 128 + 128, dtype=torch.bfloat16).to(device)
    q, k, v = qkv.split([512, 128, 128], dim=1)
    q[3, 5], k[44, 127], v[0, 0] = 10, -20, 30
    maxima = make_maxima(6)
    maxima.update(0, [q, k, v])
    maxima.update(3, [x.unflatten(1, (-1, 64)) for x in (q, k, v)])
    assert maxima.read() == [10, 20, 30, 10, 20, 30]


@pytest.mark.parametrize(
    "view",
    [
        lambda wide: wide[:, 0],
        lambda wide: wide[:, :, 1:7],
        lambda wide: wide[:, 1:],
        lambda wide: wide[1:, 2, 3:],
        lambda wide: wide[:, :, ::2],
        lambda wide: wide.transpose(0, 2),
        lambda wide: wide[:, 0, 4:5],
        lambda wide: wide[:1],
        lambda wide: wide[:, :1, :1],
        lambda wide: wide[:, 0].T,
        lambda wide: wide[0, 0].expand(9, -1),
    ],
    ids=["one head", "parts of heads", "last heads", "unaligned", "steps", "transposed", "one column", "one row",
         "one value a row", "transposed matrix", "expanded"],
)  # fmt: skip
def test_any_strides_and_nothing_beside_the_view(view, device, assert_same_as_torch):
    wide = torch.full((40, 4, 16), NAN, device=device)
    values = view(wide)
    values.copy_(random_values(*values.shape)) if values.stride(0) else wide.fill_(-3)
    assert assert_same_as_torch(values)[2] == values.abs().max().item()


def test_tensors_of_different_shapes_and_dtypes_in_one_call(device, assert_same_as_torch):
    tensors = [torch.full((length, 7 * length), -float(length), dtype=dtype) for length, dtype in enumerate(DTYPES, 3)]
    assert assert_same_as_torch(*(tensor.to(device) for tensor in tensors)) == [0, 0, 3, 4, 5, 0, 0, 0]


def test_more_tensors_than_a_launch_takes(device, assert_same_as_torch):
    tensors = [torch.full((3, 5), float(value), device=device) for value in range(1, 8)]
    assert assert_same_as_torch(*tensors, num_places=9, first_place=1) == [0, 1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_none_and_empty_tensors_leave_their_place(missing, device, make_maxima):
    for nothing in (None, torch.zeros((0, 8), device=device), torch.zeros((4, 0), device=device)):
        tensors = [torch.full((3, 8), value, device=device) for value in (5.0, 6.0, 7.0)]
        expected = [5.0, 6.0, 7.0]
        tensors[missing], expected[missing] = nothing, 0.0
        maxima = make_maxima(3)
        maxima.update(0, tensors)
        assert maxima.read() == expected
        maxima.update(0, [nothing] * 3)
        maxima.update(3, [])
        assert maxima.read() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_wins_over_inf_and_inf_over_the_rest(dtype, device, assert_same_as_torch):
    values = random_values(50, 300, dtype=dtype).to(device)
    with_inf, with_nan = values.clone(), values.clone()
    with_inf[49, 299] = with_nan[0, 0] = -INF
    with_nan[33, 257] = -NAN
    found = assert_same_as_torch(with_inf, with_nan, values)
    assert found[2] == INF and math.isnan(found[3]) and math.isfinite(found[4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_of_a_dtype(dtype, device, assert_same_as_torch):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    values = [[-info.max, 1.0], [-smallest, 0.0], [-0.0, -0.0], [info.smallest_normal, smallest]]
    tensors = [torch.tensor([row], dtype=torch.float64).to(dtype).to(device) for row in values]
    assert assert_same_as_torch(*tensors)[2:6] == [info.max, smallest, 0.0, info.smallest_normal]
    assert all(math.copysign(1, value) == 1 for value in assert_same_as_torch(*tensors))


def test_updates_accumulate(device, make_maxima):
    maxima = make_maxima(3)
    seen = [[1.0, -4.0, 2.0], [-3.0, 0.5, 2.0], [2.0, INF, NAN], [5.0, 9.0, INF]]
    found = []
    for values in seen:
        maxima.update(0, [torch.full((2, 3), value, device=device) for value in values])
        found.append(maxima.read())
    assert found[:2] == [[1, 4, 2], [3, 4, 2]]
    assert found[2][:2] == [3, INF] and math.isnan(found[2][2])
    assert found[3][:2] == [5, INF] and math.isnan(found[3][2])


def test_maxima_made_in_inference_mode_serve_outside_of_it(device, make_maxima):
    with torch.inference_mode():
        maxima = make_maxima(2)
        maxima.update(0, [torch.ones((2, 3), device=device)])
    needs_grad = torch.full((2, 3), -2.0, device=device, requires_grad=True)
    maxima.update(0, [needs_grad, needs_grad * 2])
    assert maxima.read() == [2, 4]
    with torch.no_grad():
        maxima.update(0, [needs_grad * 3])
    with torch.inference_mode():
        maxima.update(1, [needs_grad * 4])
        assert maxima.read() == [6, 8]


def test_a_default_device_elsewhere_does_no_harm(device, make_maxima):
    with torch.device("meta"):
        maxima = make_maxima(2)
        maxima.update(1, [torch.full((2, 3), 7.0, device=device)])
        assert maxima.read() == [0, 7]


@pytest.mark.parametrize("first_place", [-1, 2])
def test_places_out_of_range_are_refused(first_place, device, make_maxima):
    with pytest.raises(AssertionError, match="first_place"):
        make_maxima(3).update(first_place, [torch.ones((1, 1), device=device)] * 2)
