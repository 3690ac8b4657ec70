"""NVFP4, in rows and in Marlin's tiles: Triton against the reference, and that against ModelOpt and exact arithmetic."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fp8refit.errors import NonFiniteError
from fp8refit.kernels import quantize_blockwise
from fp8refit.kernels.placement import half_codes_in_order, scales_in_order, unpacked
from fp8refit.kernels.reference import MARLIN_GLOBAL
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.kernels.work import Action, Task
from fp8refit.live.formats import NVFP4, Placement
from fp8refit.live.slots import FP8_DTYPE, Op
from tests.kernels.tables import assert_same_as_reference
from tests.kernels.test_quantize import SPECIALS, random_matrix

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHAPES = [(1, 16), (64, 128), (65, 160), (200, 96), (3, 1024)]


def rows_task(source: torch.Tensor, maximum: float | None = None) -> Task:
    """A task that writes a matrix in rows, over rubbish."""
    rows, columns = source.shape
    amax = source.abs().amax().to(torch.float32).reshape(1) if maximum is None else torch.tensor([maximum])
    return Task(
        op=Op.QUANTIZE,
        source=source,
        offset=(0, 0),
        target=torch.full((rows, columns // 2), 0x55, dtype=torch.uint8, device=source.device),
        scale=torch.full((rows, columns // 16), 0x19, dtype=torch.uint8, device=source.device).view(FP8_DTYPE),
        global_scale=torch.full((), 77.0, device=source.device),
        format=NVFP4,
        maximum=amax.to(source.device),
        own_maximum=source.abs().amax().to(torch.float32).reshape(1),
        round_to_bf16=False,
    )


def tiles_task(source: torch.Tensor, maximum: float | None = None) -> Task:
    """A task that writes a matrix into a part of Marlin's tiles of a wider one, all of it full of rubbish."""
    rows, columns = source.shape
    codes = torch.full((columns // 16, 2 + rows // 64, 512), 0x55, dtype=torch.uint8, device=source.device)
    scales = torch.full((columns // 16, 2 + rows // 64, 64), 0x19, dtype=torch.uint8, device=source.device)
    return replace(
        rows_task(source, maximum),
        target=codes[:, 1:-1],
        scale=scales.view(FP8_DTYPE)[:, 1:-1],
        format=replace(NVFP4, placement=Placement.MARLIN),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, device):
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    assert assert_same_as_reference([rows_task(random_matrix(*shape, dtype).to(device)) for dtype in dtypes]) == []


@pytest.mark.parametrize("shape", [(64, 16), (64, 160), (192, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_equals_reference_in_marlins_tiles(dtype, shape, device):
    assert assert_same_as_reference([tiles_task(random_matrix(*shape, dtype).to(device))]) == []


@pytest.mark.parametrize("make", [rows_task, tiles_task])
@pytest.mark.parametrize("name", SPECIALS)
def test_special_values(name, make, device):
    source = torch.full((64, 64), SPECIALS[name], dtype=torch.bfloat16, device=device)
    source[3, :32] = 0
    task = make(source)
    if not bool(torch.isfinite(task.maximum)):
        return
    assert assert_same_as_reference([task]) == []


@pytest.mark.parametrize("make", [rows_task, tiles_task])
@pytest.mark.parametrize("maximum", [0.0, 1e-3, 5.0, 1e4, 1e6])
def test_zeros_and_maxima_of_others(maximum, make, device):
    source = torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    if maximum:
        source[::2] = random_matrix(32, 64, torch.bfloat16).to(device).clamp(-maximum, maximum)
    assert assert_same_as_reference([make(source, maximum)]) == []


def test_marlins_tiles_hold_the_codes_and_scales_of_rows():
    source = random_matrix(128, 96, torch.bfloat16)
    source[0, :16] *= 1e-6
    tiles, rows = tiles_task(source), rows_task(source)
    ReferenceTable([tiles, rows]).launch(check=True)
    placed = half_codes_in_order(unpacked(tiles.target)).reshape(128, 96)
    assert torch.equal(placed, unpacked(rows.target))
    scales = scales_in_order(tiles.scale.view(torch.uint8)).reshape(128, 6)
    wide = (scales.to(torch.int16) << 7).view(torch.float16).float() / 128  # five bits of exponent, no sign
    kept = rows.scale.float()
    assert torch.equal(wide, torch.where(kept < 2.0**-6, 0.0, kept))
    assert (kept < 2.0**-6).any()
    assert torch.equal(tiles.global_scale, rows.global_scale * MARLIN_GLOBAL)


def nearest(value: Fraction) -> int:
    """The code of the nearest value, the even one of two."""
    size = abs(value)
    code = min(range(8), key=lambda code: (abs(size - Fraction(VALUES[code])), code % 2))
    return code | (8 if value < 0 else 0)


def test_codes_are_the_nearest_ones():
    row = torch.zeros(2, 16)
    row[0] = torch.tensor(
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.26, 4.99, 5.01, -3.51, -0.24]
    )
    row[1, 0] = 6.0 * 448  # the scale of the weight is 1, and that of the first block is 1
    codes, scales, over_all = quantize_blockwise(row, format=NVFP4)
    assert over_all.item() == 1.0
    assert scales.float().tolist() == [[1.0], [448.0]]
    assert unpacked(codes)[0].tolist() == [nearest(Fraction(value)) for value in row[0].tolist()]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_are_flagged(value, device):
    source = random_matrix(64, 96, torch.bfloat16).to(device)
    source[63, 95] = value
    with pytest.raises(NonFiniteError):
        quantize_blockwise(source, format=NVFP4)
    for make in (rows_task, tiles_task):
        maximum = torch.zeros(1, device=device)
        task = replace(make(source), maximum=maximum, own_maximum=maximum)
        find = replace(
            task, op=Op.MAXIMUM, target=maximum, box_shape=tuple(source.shape), scale=None, global_scale=None
        )
        for table in (TritonTable([find, task], device), ReferenceTable([find, task])):
            table.launch(check=True)
            assert table.bad_tasks() == [0]  # what finds the maximum, once


@pytest.mark.parametrize("make", [rows_task, tiles_task])
def test_changed_codes_and_scales_are_counted(make, device):
    task = make(random_matrix(64, 64, torch.bfloat16).to(device))
    for table in (TritonTable([task], device), ReferenceTable([task])):
        table.launch(check=True)
        assert not table.bad_tasks()
        task.target[0, 0] ^= 1
        task.scale.view(torch.uint8)[0, 0] ^= 1
        task.global_scale.mul_(2)
        table.launch(check=True, action=Action.COMPARE)
        assert table.differing_tasks() == [0]
        table.launch(check=True, action=Action.COUNT)
        assert table.changes() == {0: (task.target[0, 0].numel(), task.scale[0, 0].numel() + 1)}
        table.launch(check=True, action=Action.COMPARE)
        assert table.differing_tasks() == []
