"""Both of our quantizers against one that was written apart from them: the same bytes, whatever the matrix."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fp8refit import NonFiniteError, quantize_blockwise
from fp8refit.kernels.placement import half_codes_in_order, unpacked
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.live.formats import FLOAT_SCALES, NVFP4, BlockFormat, ScaleFormat
from fp8refit.live.slots import SOURCE_DTYPES
from tests.kernels.interpreter import convert_float, create_fma
from tests.kernels.tables import assert_same_as_reference, quantize_task
from tests.kernels.test_two_levels import rows_task, tiles_task
from tests.second_quantizer import (
    quantize,
    quantize_groups,
    quantize_tensor,
    quantize_two_levels,
    round_to_bf16,
    to_numpy,
)

BLOCKS = [(128, 128), (64, 64), (16, 32), (1, 128), (96, 80)]
LAYOUTS = {
    "dense": lambda wide, rows, cols: wide[:rows, :cols].contiguous(),
    "rows of a wider one": lambda wide, rows, cols: wide[:rows, 3 : 3 + cols],
    "every second row": lambda wide, rows, cols: wide[: 2 * rows : 2, :cols],
    "every second column": lambda wide, rows, cols: wide[:rows, : 2 * cols : 2],
    "transposed": lambda wide, rows, cols: wide[:cols, :rows].T,
    "one row again and again": lambda wide, rows, cols: wide[:1, :cols].expand(rows, -1),
    "off any alignment": lambda wide, rows, cols: wide.flatten()[1 : 1 + rows * cols].view(rows, cols),
}
EDGES = (448.0, 464.0, 465.0, 447.0, 463.0, 1.0, 1.0625, 1.1875, 15.5, 240.0, 248.0)
"""The largest code, the largest value that becomes it, powers of two, and ties between codes."""
TINY = (0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 9.1835e-41, 6e-8, 1e-10, 1.0001e-10, 9.99e-11, 1e-4, 9.99e-5)
"""Denormals of every dtype, and both floors of a block's maximum."""

# Values larger than the dtype's largest become it, where it has no Inf to offer.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Triton's, with casts that round; on a GPU the kernels themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setattr("triton.runtime.interpreter._convert_float", convert_float)
            patch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_fma", create_fma)
        yield


@st.composite
def matrices(draw, *, max_side: int = 150):
    """A finite matrix of any dtype and layout, each of whose blocks has a maximum at some edge."""
    rows, cols = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    dtype = draw(st.sampled_from(SOURCE_DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    side = 2 * max(rows, cols) + 4
    values = rng.standard_normal((side, side)) * 2.0 ** draw(st.integers(-40, 30))
    # Squares of 16 that differ from their neighbours by orders of magnitude, with edges and tiny values in them.
    values *= np.kron(2.0 ** rng.integers(-12, 12, (side // 16 + 1,) * 2), np.ones((16, 16)))[:side, :side]
    for share, pool in ((0.02, TINY), (0.02, EDGES)):
        chosen = rng.random(values.shape) < share * draw(st.integers(0, 2))
        powers = 2.0 ** rng.integers(-3, 4, values.shape) if pool is EDGES else 1.0
        signs = rng.choice([-1.0, 1.0], values.shape)
        values = np.where(chosen, rng.choice(pool, values.shape) * powers * signs, values)
    match draw(st.sampled_from(["as they are", "at edges", "at ties"])):
        case "at edges":
            values = _at_edges(values, rng, dtype)
        case "at ties":
            values = _at_ties(values, rng)
    largest = torch.finfo(dtype).max
    wide = torch.from_numpy(values).clamp(-largest, largest).to(dtype)
    if draw(st.integers(0, 9)) == 0:
        wide[rng.integers(side, size=5), rng.integers(side, size=5)] = largest
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](wide, rows, cols)


def _at_edges(values: np.ndarray, rng: np.random.Generator, dtype: torch.dtype) -> np.ndarray:
    """The same with the largest of each square of 16 a step below, at or a step above an edge times a power of two."""
    step = torch.finfo(dtype).eps
    values = values / np.abs(values).max()
    for top in range(0, len(values), 16):
        for left in range(0, len(values), 16):
            edge = rng.choice(EDGES[:5]) * 2.0 ** rng.integers(-20, 6)
            values[top : top + 16, left : left + 16] *= edge
            values[top, left] = edge * (1 + rng.integers(-1, 2) * step)
    return values


def _at_ties(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every value lies right between two codes times the scale, which is an odd number: to round twice shows."""
    mantissas = 2 * rng.integers(8, 16, values.shape) + 1
    values = mantissas * 2.0 ** rng.integers(-8, 4, values.shape) * rng.choice([-1.0, 1.0], values.shape)
    values[::16, ::16] = 448.0
    return values * rng.choice([3.0, 5.0, 7.0, 9.0])


blocks = st.sampled_from(BLOCKS)
formats = st.sampled_from([kind.value for kind in FLOAT_SCALES])


def assert_equal(codes, scale, expected_codes, expected_scale) -> None:
    assert torch.equal(scale.cpu().view(torch.int32), expected_scale.view(torch.int32))
    assert torch.equal(codes.cpu().view(torch.uint8), expected_codes.view(torch.uint8))


@given(weight=matrices(), block_size=blocks, scale_format=formats)
def test_the_specification_is_the_second_quantizer(weight, block_size, scale_format):
    codes, scale = quantize_blockwise(weight, block_size=block_size, scale_format=scale_format)
    assert_equal(codes, scale, *quantize_tensor(weight, block_size, scale_format))


@given(weight=matrices(max_side=90), block_size=blocks, scale_format=formats, rounds=st.booleans())
def test_the_kernel_is_the_second_quantizer(weight, block_size, scale_format, rounds):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = quantize_task(
        weight.to(device), block_size=block_size, scale_format=ScaleFormat(scale_format), round_to_bf16=rounds
    )
    table = TritonTable([task], device)
    table.launch(check=True)
    values = to_numpy(weight)
    if weight.dtype is torch.float32 and rounds:
        with np.errstate(over="ignore"):
            values = round_to_bf16(values)
        if not np.isfinite(values).all():
            assert table.bad_tasks() == [0]
            return
    assert table.bad_tasks() == []
    codes, scales = quantize(values, block_size, scale_format)
    assert_equal(task.target, task.scale, torch.from_numpy(codes), torch.from_numpy(scales))


groups = st.sampled_from([kind.value for kind in ScaleFormat if kind.has_exponents])


@given(
    weight=matrices(max_side=90), columns=st.sampled_from([16, 32, 64, 128]), scale_format=groups, rounds=st.booleans()
)
def test_scales_of_groups_are_those_of_the_second_quantizer(weight, columns, scale_format, rounds):
    """The specification and the kernel."""
    block_format = BlockFormat(block_size=(1, columns), scale_format=ScaleFormat(scale_format))
    expected = list(map(torch.from_numpy, quantize_groups(to_numpy(weight), columns, scale_format)))
    codes, scales = quantize_blockwise(weight, format=block_format)
    assert torch.equal(codes.view(torch.uint8), expected[0]) and torch.equal(scales, expected[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = quantize_task(
        weight.to(device), block_size=(1, columns), scale_format=ScaleFormat(scale_format), round_to_bf16=rounds
    )
    table = TritonTable([task], device)
    table.launch(check=True)
    if weight.dtype is not torch.float32 or not rounds:
        assert torch.equal(task.target.cpu().view(torch.uint8), expected[0])
        assert torch.equal(task.scale.cpu(), expected[1])


@given(weight=matrices(max_side=90), raised=st.sampled_from([1.0, 1.3, 200.0]), is_tiled=st.booleans())
def test_scales_of_two_levels_are_those_of_the_second_quantizer(weight, raised, is_tiled):
    """The specification and the kernel, with the largest value here or in another matrix that shares the scale."""
    rows, columns = len(weight) // 64 * 64 if is_tiled else len(weight), weight.shape[1] // 16 * 16
    weight = weight[:rows, :columns]
    assume(weight.numel())
    values = to_numpy(weight)
    own = float(np.abs(values).max())
    maximum = min(own * raised, float(np.finfo(np.float32).max))
    codes, scales, over_all = quantize_two_levels(values, np.float32(maximum))
    if raised == 1.0:
        found = quantize_blockwise(weight, format=NVFP4)
        assert torch.equal(found[0], torch.from_numpy(codes)) and found[2].item() == over_all
        assert torch.equal(found[1].view(torch.uint8), torch.from_numpy(scales))
    task = tiles_task(weight, maximum) if is_tiled else rows_task(weight, maximum)
    assert assert_same_as_reference([task]) == []
    held = half_codes_in_order(unpacked(task.target)).reshape(rows, columns) if is_tiled else unpacked(task.target)
    assert torch.equal(held, unpacked(torch.from_numpy(codes)))


@given(weight=matrices(max_side=40), block_size=blocks, scale_format=formats, data=st.data())
def test_no_value_that_is_none_goes_unseen(weight, block_size, scale_format, data):
    weight = weight.clone()
    place = data.draw(st.integers(0, weight.shape[0] - 1)), data.draw(st.integers(0, weight.shape[1] - 1))
    weight[place] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    with pytest.raises(NonFiniteError):
        quantize_blockwise(weight, block_size=block_size, scale_format=scale_format)
