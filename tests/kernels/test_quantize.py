"""The quantizer: Triton against the torch reference, and the reference against exact arithmetic."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8refit import NonFiniteError, dequantize_blockwise, quantize_blockwise
from fp8refit.kernels.reference import block_scales, quantize_reference
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.kernels.work import Action, Task
from fp8refit.live.formats import FLOAT_SCALES, PER_ROW, PER_TENSOR, WHOLE, BlockFormat, ScaleFormat
from fp8refit.live.slots import FP8_DTYPE, SOURCE_DTYPES, Op
from tests.kernels.tables import assert_same_as_reference, quantize_task

# The interpreter multiplies Inf by the zero that is its block's inverse scale.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")

SHAPES = [(1, 1), (127, 129), (128, 128), (129, 127), (256, 384), (1, 640), (300, 272)]
BLOCKS = [(128, 128), (64, 64), (32, 128), (96, 80), (1, WHOLE)]
COMBINATIONS = [
    (torch.bfloat16, ScaleFormat.FP32),
    (torch.bfloat16, ScaleFormat.UE8M0),
    (torch.float32, ScaleFormat.UE8M0),
    (torch.float16, ScaleFormat.FP32),
    (torch.bfloat16, ScaleFormat.FP32_FLOORED),
    (torch.bfloat16, ScaleFormat.FP32_RECIPROCAL),
    (torch.bfloat16, ScaleFormat.FP32_DIVIDING),
]
LAYOUTS = {
    "dense": lambda wide: wide.contiguous(),
    "columns": lambda wide: wide[:, 3:],
    "aligned columns": lambda wide: wide[:, 16:],
    "every second row": lambda wide: wide[::2],
    "every second column": lambda wide: wide[:, ::2],
    "transposed": lambda wide: wide.T,
    "unaligned start": lambda wide: wide.flatten()[1 : 1 + (wide.shape[0] - 1) * wide.shape[1]].view(-1, wide.shape[1]),
    "one row repeated": lambda wide: wide[:1].expand(wide.shape[0], -1),
}
SPECIALS = {
    "zeros": 0.0,
    "negative zeros": -0.0,
    "fp32 denormals": 1e-42,
    "below both floors": 1e-12,
    "between the floors": 1e-6,
    "448": 448.0,
    "464": 464.0,
    "next after 464 in fp32": 464.00003,
    "BF16 after 464": 466.0,
    "largest bf16": 3.3895e38,
}


def random_matrix(rows: int, cols: int, dtype: torch.dtype, *, exponent: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Normal values times 2**exponent, finite in `dtype`, with one outlier column."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, cols), generator=generator, dtype=torch.float64)
    values[:, cols // 2] *= 100
    largest = torch.finfo(dtype).max
    return (values * 2.0**exponent).clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_reference(shape, block_size, device):
    tasks = [
        quantize_task(random_matrix(*shape, dtype).to(device), block_size=block_size, scale_format=scale_format)
        for dtype, scale_format in COMBINATIONS
    ]
    assert assert_same_as_reference(tasks) == []


@pytest.mark.parametrize("shape", [(1, 1), (1, 640), (5, 272)])
def test_kernel_equals_reference_with_one_row_a_block(shape, device):
    tasks = [
        quantize_task(random_matrix(*shape, dtype).to(device), block_size=(1, 128), scale_format=scale_format)
        for dtype, scale_format in product(SOURCE_DTYPES, FLOAT_SCALES)
    ]
    assert assert_same_as_reference(tasks) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
def test_kernel_reads_any_strides(layout, dtype, device):
    source = LAYOUTS[layout](random_matrix(150, 208, dtype).to(device))
    tasks = [quantize_task(source, block_size=block_size) for block_size in ((128, 128), (1, WHOLE))]
    assert assert_same_as_reference(tasks) == []


@pytest.mark.parametrize("action", [Action.WRITE, Action.COMPARE])
@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
@pytest.mark.parametrize("shape", [(3, 2047), (5, 2048), (2, 4097), (2, 20000), (2, 33000), (33, 300)], ids=str)
def test_rows_are_held_whole_or_read_twice(shape, dtype, action, device):
    """Long ones are read twice, and so are those that lie as columns in memory."""
    rows, cols = shape
    dense = random_matrix(rows, cols, dtype)
    dense[:, -1] = 200  # in the last tile
    sources = [dense.to(device), dense.t().contiguous().to(device).t()]
    tasks = [quantize_task(source, block_size=(1, WHOLE), scale_format=PER_ROW.scale_format) for source in sources]
    half = quantize_task(sources[0], block_size=(1, WHOLE), shape=(rows, cols // 2))
    tasks.append(replace(half, format=PER_ROW, columns=(cols, cols - cols // 2)))
    assert assert_same_as_reference(tasks, action=action) == []


@pytest.mark.parametrize("action", [Action.WRITE, Action.COMPARE])
@pytest.mark.parametrize("columns", [(0, 208), (0, 96), (96, 112), (3, 50), (207, 1)], ids=str)
@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
def test_a_scale_of_a_whole_row_is_the_same_for_whoever_holds_a_part(dtype, columns, action, device):
    """A rank holds some columns; the outlier, at column 104, is not always among them."""
    first, length = columns
    source = random_matrix(150, 208, dtype)
    whole = quantize_blockwise(source, format=PER_ROW)
    task = quantize_task(
        source.to(device), block_size=(1, WHOLE), scale_format=PER_ROW.scale_format, shape=(150, length)
    )
    task = replace(task, format=PER_ROW, columns=(208, first))
    assert assert_same_as_reference([task], action=action) == []
    if action is Action.WRITE:
        table = TritonTable([task], device)
        table.launch(check=True)
        assert table.bad_tasks() == []
        held = whole[0].view(torch.uint8)[:, first : first + length]
        assert torch.equal(task.target.view(torch.uint8).cpu(), held) and torch.equal(task.scale.cpu(), whole[1])
        table.launch(check=True, action=Action.COMPARE)
        assert table.differing_tasks() == []
        task.scale[149] *= 2
        table.launch(check=True, action=Action.COMPARE)
        assert table.differing_tasks() == [0]


def test_what_is_not_finite_in_a_row_is_flagged_for_whoever_holds_another_part(device):
    source = random_matrix(20, 208, torch.bfloat16)
    source[13, 200] = torch.inf
    task = quantize_task(source.to(device), block_size=(1, WHOLE), shape=(20, 64))
    assert assert_same_as_reference([replace(task, format=PER_ROW, columns=(208, 0))]) == [0]


def test_a_row_is_divided_by_its_scale_as_vllm_divides(device):
    """1.0625 times the scale is between two codes: multiplied by the reciprocal, some values go to the other one."""
    source = random_matrix(64, 4096, torch.bfloat16, seed=3)
    codes, scale = quantize_blockwise(source, format=PER_ROW)
    amax = source.float().abs().amax(dim=1, keepdim=True)
    assert torch.equal(scale, (amax / torch.tensor(448.0)).clamp_min(1 / (448 * 512)))
    expected = (source / scale).clamp(-448, 448).to(FP8_DTYPE)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    task = quantize_task(source.to(device), block_size=(1, WHOLE), scale_format=PER_ROW.scale_format)
    assert assert_same_as_reference([task]) == []
    other, _ = quantize_blockwise(source, format=replace(PER_ROW, scale_format=ScaleFormat.FP32))
    assert not torch.equal(codes.view(torch.uint8), other.view(torch.uint8))


def sharing(sources: list[torch.Tensor], held: tuple[slice, slice] = (slice(None), slice(None))) -> list[Task]:
    """Tasks that quantize parts of matrices with one scale, which is that of all values of all of them."""
    device = sources[0].device
    maximum, scale = torch.zeros(1, device=device), torch.full((1, 1), -7.0, device=device)
    tasks: list[Task] = []
    for source in sources:
        offset = tuple(each.start or 0 for each in held)
        task = quantize_task(source, block_size=(WHOLE, WHOLE), offset=offset, shape=tuple(source[held].shape))
        task = replace(task, format=PER_TENSOR, scale=scale, maximum=maximum)
        whole = replace(task, op=Op.MAXIMUM, target=maximum, scale=None, maximum=None, offset=(0, 0))
        tasks += [task, replace(whole, box_shape=tuple(source.shape))]
    return tasks


@pytest.mark.parametrize(
    "held", [(slice(None), slice(None)), (slice(32, 96), slice(16, 80)), (slice(3, 40), slice(5, 6))]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
def test_a_shared_scale_covers_all_values_of_all_matrices(dtype, layout, held, device):
    """The largest is in the last one, where nobody holds it."""
    sources = [LAYOUTS[layout](random_matrix(rows, 208, dtype).to(device)) for rows in (300, 150)]
    sources[1][-1, -1] = 300
    tasks, expected = sharing(sources, held), sharing(sources, held)
    table, reference = TritonTable(tasks, device), ReferenceTable(expected)
    for each in (table, reference):
        each.launch(check=True)
        assert each.bad_tasks() == []
    assert torch.equal(tasks[0].scale, torch.tensor([[300.0]], device=device) / torch.tensor(448.0, device=device))
    for task, other in zip(tasks, expected, strict=True):
        assert torch.equal(task.target.view(torch.uint8), other.target.view(torch.uint8))
    for source, task in zip(sources, tasks[::2], strict=True):
        codes, _, _ = quantize_reference(source[held].float(), PER_TENSOR, given=tasks[0].scale)
        assert torch.equal(task.target.view(torch.uint8), codes.view(torch.uint8))
    for each, compared in ((table, tasks), (reference, expected)):
        each.launch(check=True, action=Action.COMPARE)
        assert each.differing_tasks() == []
        compared[2].target.view(torch.uint8)[0, 0] ^= 1
        each.launch(check=True, action=Action.COMPARE)
        assert each.differing_tasks() == [2]


def test_what_is_not_finite_is_named_where_it_is_although_the_scale_is_shared(device):
    sources = [random_matrix(64, 208, torch.bfloat16).to(device) for _ in range(3)]
    sources[1][63, 200] = torch.nan
    tasks = sharing(sources, (slice(0, 32), slice(None)))
    for table in (TritonTable(tasks, device), ReferenceTable(tasks)):
        table.launch(check=True, action=Action.CHECK)
        assert table.bad_tasks() == [3]


@pytest.mark.parametrize("value", [0.0, 1e-38, 448.0, torch.finfo(torch.bfloat16).max])
def test_one_function_quantizes_with_one_scale(value, device):
    weight = random_matrix(130, 140, torch.bfloat16).to(device).clamp(-1, 1) * value
    codes, scale = quantize_blockwise(weight, format=PER_TENSOR)
    expected, expected_scale, _ = quantize_reference(weight, PER_TENSOR)
    assert scale.shape == (1, 1) and torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("value", SPECIALS.values(), ids=SPECIALS.keys())
def test_kernel_equals_reference_on_special_blocks(value, device):
    tasks = []
    for scale_format in FLOAT_SCALES:
        uniform = torch.full((64, 64), value, device=device)
        alone = torch.zeros((64, 64), device=device)
        alone[-1, -1] = -value
        tasks += [quantize_task(weight, block_size=(64, 64), scale_format=scale_format) for weight in (uniform, alone)]
    assert assert_same_as_reference(tasks) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_kernel_equals_reference_at_any_magnitude(data, device):
    rows, cols = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    weight = random_matrix(
        rows,
        cols,
        data.draw(st.sampled_from(SOURCE_DTYPES)),
        exponent=data.draw(st.floats(-100, 127)),
        seed=data.draw(st.integers(0, 2**31)),
    )
    for value in data.draw(st.lists(st.sampled_from([0.0, -0.0, 1e-40, 6e-8, 3e4, -1.0]), max_size=4)):
        weight[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))] = value
    task = quantize_task(
        weight.to(device),
        block_size=data.draw(st.sampled_from([*BLOCKS, (1, 128)] if rows < 10 else BLOCKS)),
        scale_format=data.draw(st.sampled_from(FLOAT_SCALES)),
        round_to_bf16=data.draw(st.booleans()),
    )
    assert_same_as_reference([task])


@pytest.mark.parametrize("round_to_bf16", [True, False])
def test_fp32_is_rounded_to_bf16_only_when_asked(round_to_bf16, device):
    weight = random_matrix(128, 128, torch.float32).to(device)
    task = quantize_task(weight, round_to_bf16=round_to_bf16)
    assert_same_as_reference([task])
    source = weight.to(torch.bfloat16) if round_to_bf16 else weight
    codes, scale, _ = quantize_reference(source, BlockFormat())
    assert torch.equal(task.target.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(task.scale, scale)


def test_ties_go_to_even_on_the_way_to_bf16(device):
    # Between 1 and 1 + 2**-7, BF16's neighbours, and between the next two: both go to the even mantissa.
    weight = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23]], device=device)
    task = quantize_task(weight, round_to_bf16=True)
    assert_same_as_reference([task])
    rounded = torch.tensor([[1.0, 1 + 2**-6, -1.0, 1 + 2**-7]], device=device)
    codes, scale, _ = quantize_reference(rounded, BlockFormat())
    assert torch.equal(task.target.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(task.scale, scale)


@pytest.mark.parametrize("offset", [(0, 0), (64, 32), (65, 33), (0, 16)])
def test_a_slice_is_quantized_in_the_blocks_of_its_slot(offset, device):
    weight = random_matrix(300, 272, torch.bfloat16).to(device)
    task = quantize_task(weight, offset=offset, shape=(200, 160))
    assert assert_same_as_reference([task]) == []
    box = weight[offset[0] : offset[0] + 200, offset[1] : offset[1] + 160]
    codes, scale, _ = quantize_reference(box, BlockFormat())
    assert torch.equal(task.target.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(task.scale, scale)


def test_a_part_of_fused_storage_is_written_without_its_neighbours(device):
    fused = torch.full((384, 300), 0x55, dtype=torch.uint8, device=device).view(FP8_DTYPE)
    scales = torch.full((3, 5), -7.0, device=device)
    task = quantize_task(random_matrix(128, 272, torch.bfloat16).to(device))
    weight, scale = fused[128:256, 4:276], scales[1:2, 1:4]
    placed = replace(task, target=weight, scale=scale)
    assert assert_same_as_reference([placed]) == []
    outside = fused.view(torch.uint8).clone()
    outside[128:256, 4:276] = 0x55
    assert (outside == 0x55).all()
    assert scales[1, 0] == scales[1, 4] == scales[0, 1] == scales[2, 1] == -7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", SOURCE_DTYPES)
def test_a_bad_value_flags_its_task_alone(value, dtype, device):
    weights = [random_matrix(129, 127, dtype, seed=seed).to(device) for seed in range(3)]
    weights[1][128, 126] = value
    tasks = [quantize_task(weight, scale_format=scale_format) for scale_format in FLOAT_SCALES for weight in weights]
    assert assert_same_as_reference(tasks) == [3 * number + 1 for number in range(len(FLOAT_SCALES))]


def test_a_bad_value_is_not_looked_for_unless_asked(device):
    task = quantize_task(torch.full((2, 2), float("nan"), device=device))
    table = TritonTable([task], device)
    table.launch(check=False)
    assert table.bad_tasks() == []


def test_fp32_beyond_bf16_is_flagged_only_if_it_is_rounded(device):
    weight = torch.full((2, 2), 3.4e38, device=device)
    tasks = [quantize_task(weight, round_to_bf16=True), quantize_task(weight, round_to_bf16=False)]
    assert assert_same_as_reference(tasks) == [0]


def test_quantize_blockwise_on_one_strip_of_a_real_matrix():
    weight = random_matrix(128, 11008, torch.bfloat16)
    codes, scale = quantize_blockwise(weight)
    assert codes.shape == weight.shape and scale.shape == (1, 86)
    amax = weight.float().abs().view(128, 86, 128).amax(dim=(0, 2))
    assert torch.equal(scale[0], amax / torch.tensor(448.0))
    error = (dequantize_blockwise(codes, scale) - weight.float()).abs().view(128, 86, 128)
    # Half a step of E4M3 at the top of the block is 16 / 448 of its maximum.
    assert bool((error <= amax[:, None] * (16 / 448) * (1 + 1e-5)).all())


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_a_block_of_zeros_has_zero_codes_and_a_positive_scale(scale_format):
    codes, scale = quantize_blockwise(torch.zeros(128, 256), scale_format=scale_format)
    assert not codes.view(torch.uint8).any()
    assert bool((torch.isfinite(scale) & (scale > 0)).all())


def freed():
    weight = torch.zeros(3, 3)
    weight.untyped_storage().resize_(0)
    return weight


BLOCK_SIZES = [(0, 128), (-1, 1), (128,), (1, 2, 3), 128, None, (1.5, 2), ("a", "b")]
"""That are none."""


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.zeros(3), {}, "pass a matrix"),
        (torch.zeros(()), {}, "pass a matrix"),
        (torch.zeros(3, 3, dtype=torch.int32), {}, "takes a matrix of"),
        (torch.zeros(3, 3, device="meta"), {}, "weight is on the meta device"),
        (torch.zeros(3, 3).to_sparse(), {}, "weight is torch.sparse_coo"),
        (freed(), {}, "weight reads more than the 0 bytes of its storage"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), {}, "weight is a nested tensor"),
        *((torch.zeros(3, 3), {"block_size": size}, "block_size is ") for size in BLOCK_SIZES),
        (torch.zeros(3, 3), {"scale_format": "fp16"}, "'fp16'; use one of 'fp32', 'ue8m0'"),
        (torch.zeros(3, 3), {"scale_format": []}, "use one of 'fp32', 'ue8m0'"),
    ],
)
def test_quantize_blockwise_refuses(weight, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_blockwise(weight, **options)


@pytest.mark.parametrize("value", [None, 5, "weight", [[1.0]]])
def test_what_is_no_tensor_is_refused(value):
    codes, scale = quantize_blockwise(torch.ones(3, 3))
    with pytest.raises(TypeError, match="weight is of type"):
        quantize_blockwise(value)
    with pytest.raises(TypeError, match="codes is of type"):
        dequantize_blockwise(value, scale)
    with pytest.raises(TypeError, match="scale is of type"):
        dequantize_blockwise(codes, value)
    with pytest.raises(TypeError, match="dtype is "):
        dequantize_blockwise(codes, scale, dtype=value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.ones(3, 3)}, "codes are torch.float32"),
        ({"codes": torch.ones(3)}, "codes has shape"),
        ({"scale": torch.ones(1, 1, dtype=torch.float64)}, "scales torch.float64"),
        ({"scale": torch.ones(())}, "scale has shape"),
        ({"scale": torch.ones(1, 1, device="meta")}, "scale is on the meta device"),
        *(({"block_size": size}, "block_size is ") for size in BLOCK_SIZES),
    ],
)
def test_dequantize_blockwise_refuses(changed, message):
    codes, scale = quantize_blockwise(torch.ones(3, 3))
    with pytest.raises(ValueError, match=message):
        dequantize_blockwise(**{"codes": codes, "scale": scale} | changed)


def test_quantize_blockwise_refuses_nan():
    with pytest.raises(NonFiniteError):
        quantize_blockwise(torch.tensor([[1.0, float("nan")]]))


def test_dequantize_blockwise_refuses_scales_of_another_shape():
    codes, _ = quantize_blockwise(torch.ones(129, 128))
    with pytest.raises(ValueError, match=r"need scales \[2, 1\]"):
        dequantize_blockwise(codes, torch.ones(1, 1))


# The reference's own arithmetic, in exact rational numbers.

E4M3_VALUES = [
    Fraction(code & 7, 512) if code < 8 else Fraction(8 + (code & 7)) * Fraction(2) ** ((code >> 3) - 10)
    for code in range(127)
]


def nearest_float32(value: Fraction) -> Fraction:
    """The float32 nearest to a positive `value`, ties to even."""
    exponent = -149
    while Fraction(2) ** (exponent + 24) <= value:
        exponent += 1
    return round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent


def nearest_e4m3(value: Fraction) -> int:
    """The code nearest to `value`, ties to the even code, values beyond the range to the largest."""
    return min(range(127), key=lambda code: (abs(E4M3_VALUES[code] - value), code & 1))


def smallest_power_of_two(amax: Fraction) -> Fraction:
    """The smallest power of two `s` with `amax / s <= 464`."""
    return next(s for k in range(-200, 200) if amax <= 464 * (s := Fraction(2) ** k))


def exact_scale(amax: float, scale_format: ScaleFormat) -> Fraction:
    floors = {ScaleFormat.FP32: Fraction(1, 10**10), ScaleFormat.FP32_DIVIDING: Fraction(1, 512)}
    amax = max(Fraction(amax), nearest_float32(floors.get(scale_format, Fraction(1, 10**4))))
    match scale_format:
        case ScaleFormat.UE8M0:
            return smallest_power_of_two(amax)
        case ScaleFormat.FP32_RECIPROCAL:
            return nearest_float32(amax * nearest_float32(Fraction(1, 448)))
    return nearest_float32(amax / 448)


FINITE_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(FINITE_FLOATS, min_size=1, max_size=12),
    top=st.floats(width=32, min_value=2.0**-20, max_value=2.0**20),
    scale_format=st.sampled_from(FLOAT_SCALES),
)
def test_reference_equals_exact_arithmetic(values, top, scale_format):
    # Near `top` the values share a block's range; far from it they saturate or vanish.
    for block in (values, [top, *(top * value / 2.0**127 for value in values)]):
        weight = torch.tensor([block], dtype=torch.float32)
        codes, scale, is_bad = quantize_reference(weight, BlockFormat(scale_format=scale_format))
        expected_scale = exact_scale(weight.abs().max().item(), scale_format)
        assert not is_bad and Fraction(scale.item()) == expected_scale
        scale_or_inverse = expected_scale if scale_format.divides else 1 / nearest_float32(1 / expected_scale)
        for value, code in zip(weight[0].tolist(), codes.view(torch.uint8)[0].tolist(), strict=True):
            expected = nearest_e4m3(min(nearest_float32(abs(Fraction(value)) / scale_or_inverse), Fraction(448)))
            assert code & 0x7F == expected
            assert code >> 7 == torch.tensor(value).signbit()


@pytest.mark.parametrize("amax", [0.0, 1e-42, 1e-12, 1e-10, 1.1e-10, 1e-6, 9.9e-5, 1e-4, 1.01e-4])
@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
def test_scales_near_the_floors_are_exact(scale_format, amax):
    amax = torch.tensor(amax)
    assert Fraction(block_scales(amax, BlockFormat(scale_format=scale_format)).item()) == exact_scale(
        amax.item(), scale_format
    )


@settings(max_examples=200, deadline=None)
@given(mantissa=st.integers(0, 2**23 - 1), exponent=st.integers(-13, 127))
def test_power_of_two_scale_is_the_smallest_that_keeps_464(mantissa, exponent):
    check_power_of_two_scale((1 + mantissa / 2**23) * 2.0**exponent)


@pytest.mark.parametrize("exponent", range(-20, 119, 7))
def test_power_of_two_scale_at_464_and_its_neighbours(exponent):
    for mantissa in (448.0, 464.0, 464.0 - 2**-15, 464.0 + 2**-15, 512.0, 256.0):
        check_power_of_two_scale(mantissa * 2.0**exponent)


def check_power_of_two_scale(amax: float) -> None:
    scale = block_scales(torch.tensor(amax), BlockFormat(scale_format=ScaleFormat.UE8M0)).item()
    assert Fraction(scale) == exact_scale(amax, ScaleFormat.UE8M0), f"{amax=}"
