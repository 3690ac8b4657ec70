"""Formats with several scales per row: MXFP8, in rows and in Marlin's tiles; Triton against the reference, and the reference
against exact arithmetic.
"""

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
import torch

from fp8refit import dequantize_blockwise, quantize_blockwise
from fp8refit.kernels.placement import codes_in_order, scales_in_order
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.kernels.work import Action, Task
from fp8refit.live.formats import MXFP8, BlockFormat, Placement, ScaleFormat
from fp8refit.live.slots import FP8_DTYPE, Op
from tests.kernels.tables import assert_same_as_reference, quantize_task
from tests.kernels.test_quantize import SPECIALS, random_matrix

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
RULES = [ScaleFormat.MX_CEIL, ScaleFormat.MX_FLOOR, ScaleFormat.MX_UNIT]
SHAPES = [(1, 32), (64, 128), (65, 160), (200, 96), (3, 1024)]


def mx(scale_format: ScaleFormat) -> BlockFormat:
    return replace(MXFP8, scale_format=scale_format)


def marlin_task(source: torch.Tensor, scale_format: ScaleFormat = ScaleFormat.MX_CEIL) -> Task:
    """A task that writes a matrix into a part of Marlin's tiles of a wider one, all of it full of rubbish."""
    rows, columns = source.shape
    codes = torch.full((columns // 16, 2 + rows // 64, 1024), 0x55, dtype=torch.uint8, device=source.device)
    scales = torch.full((columns // 32, 2 + rows // 64, 64), 0x99, dtype=torch.uint8, device=source.device)
    return Task(
        op=Op.QUANTIZE,
        source=source,
        offset=(0, 0),
        target=codes.view(FP8_DTYPE)[:, 1:-1],
        scale=scales[:, 1:-1],
        format=replace(mx(scale_format), placement=Placement.MARLIN),
        round_to_bf16=False,
    )


@pytest.mark.parametrize("scale_format", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, scale_format, device):
    tasks = [
        quantize_task(random_matrix(*shape, dtype).to(device), block_size=(1, 32), scale_format=scale_format)
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ]
    assert assert_same_as_reference(tasks) == []


@pytest.mark.parametrize("columns", [16, 64, 128])
@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0, ScaleFormat.FP32_DIVIDING])
def test_kernel_equals_reference_with_other_scales(scale_format, columns, device):
    source = random_matrix(70, 272, torch.bfloat16).to(device)
    task = quantize_task(source, block_size=(1, columns), scale_format=scale_format)
    assert assert_same_as_reference([task]) == []


@pytest.mark.parametrize("shape", [(64, 32), (64, 160), (192, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_equals_reference_in_marlins_tiles(dtype, shape, device):
    assert assert_same_as_reference([marlin_task(random_matrix(*shape, dtype).to(device))]) == []


def test_marlins_tiles_hold_the_codes_and_scales_of_rows():
    source = random_matrix(128, 96, torch.bfloat16)
    task, codes, scales = marlin_task(source), *quantize_blockwise(source, format=MXFP8)
    ReferenceTable([task]).launch(check=True)
    assert torch.equal(codes_in_order(task.target.view(torch.uint8)).reshape(128, 96), codes.view(torch.uint8))
    assert torch.equal(scales_in_order(task.scale).reshape(128, 3), scales)


@pytest.mark.parametrize("name", SPECIALS)
@pytest.mark.parametrize("scale_format", RULES)
def test_special_values(scale_format, name, device):
    source = torch.full((3, 64), SPECIALS[name], dtype=torch.bfloat16, device=device)
    task = quantize_task(source, block_size=(1, 32), scale_format=scale_format)
    assert assert_same_as_reference([task]) == []
    assert not (task.target.view(torch.uint8) & 0x7F == 0x7F).any()


def exponent_of(amax: Fraction, scale_format: ScaleFormat) -> int:
    """The rule, in exact arithmetic."""
    exponent, amax = -127, max(amax, Fraction(2) ** -126)
    if scale_format is ScaleFormat.MX_CEIL:
        while amax > 448 * Fraction(2) ** exponent:
            exponent += 1
        return exponent
    over = {ScaleFormat.MX_FLOOR: 256, ScaleFormat.MX_UNIT: 1}[scale_format]
    while over * Fraction(2) ** (exponent + 1) <= amax:
        exponent += 1
    return min(exponent, 127)


@pytest.mark.parametrize("scale_format", RULES)
def test_scales_are_the_powers_of_two_of_the_rule(scale_format):
    tops = [
        0.0,
        1e-45,
        2.0**-127,
        2.0**-119,
        448 * 2.0**-127,
        450 * 2.0**-127,
        0.9,
        1.0,
        255.0,
        256.0,
        447.0,
        448.0,
        450.0,
    ]
    tops += [448 * 2.0**k for k in (-60, 60, 110)] + [450 * 2.0**k for k in (-60, 60, 110)] + [3.3895e38]
    tops += torch.exp2(torch.rand(500, generator=torch.Generator().manual_seed(3)) * 250 - 125).bfloat16().tolist()
    rows = torch.zeros(len(tops), 32)
    rows[:, 7] = torch.tensor(tops)
    codes, scales = quantize_blockwise(rows, format=mx(scale_format))
    expected = [exponent_of(Fraction(top), scale_format) + 127 for top in rows[:, 7].tolist()]
    assert scales.flatten().tolist() == expected
    exact = [
        Fraction(top) / Fraction(2) ** (byte - 127) for top, byte in zip(rows[:, 7].tolist(), expected, strict=True)
    ]
    nearest = torch.tensor([float(min(each, Fraction(448))) for each in exact], dtype=torch.float64)
    assert torch.equal(codes[:, 7].float(), nearest.to(torch.float32).to(FP8_DTYPE).float())


def test_a_matrix_comes_back():
    weight = random_matrix(70, 96, torch.bfloat16)
    codes, scales = quantize_blockwise(weight, format=MXFP8)
    back = dequantize_blockwise(codes, scales, block_size=(1, 32))
    least = scales.repeat_interleave(32, 1).float().sub(127).exp2() / 512
    assert ((back - weight.float()).abs() <= weight.float().abs() / 16 + least).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_are_flagged(value, device):
    source = random_matrix(70, 96, torch.bfloat16).to(device)
    source[69, 95] = value
    task = quantize_task(source, block_size=(1, 32), scale_format=ScaleFormat.MX_CEIL)
    assert assert_same_as_reference([task]) == [0]


@pytest.mark.parametrize(
    "make",
    [marlin_task, lambda source: quantize_task(source, block_size=(1, 32), scale_format=MXFP8.scale_format)],
)
def test_changed_codes_and_scales_are_counted(make, device):
    task = make(random_matrix(64, 64, torch.bfloat16).to(device))
    for table in (TritonTable([task], device), ReferenceTable([task])):
        table.launch(check=True)
        assert not table.bad_tasks()
        task.target.view(torch.uint8)[0, 0] ^= 1
        task.scale[0, 0] ^= 1
        table.launch(check=True, action=Action.COMPARE)
        assert table.differing_tasks() == [0]
        table.launch(check=True, action=Action.COUNT)
        num_codes, num_scales = prod(task.target[0, 0].shape), prod(task.scale[0, 0].shape)
        assert table.changes() == {0: (num_codes, num_scales)}
        table.launch(check=True, action=Action.COMPARE)
        assert table.differing_tasks() == []
