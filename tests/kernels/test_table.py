"""The work table: copies, flags, refreshes, and tasks of many kinds in one table."""

from dataclasses import replace

import pytest
import torch

from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.kernels.table import compile_table, join_tables
from fp8refit.kernels.triton_launch import Launch
from fp8refit.kernels.triton_table import TritonTable, _Numbers
from fp8refit.kernels.work import Action
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat
from fp8refit.live.slots import FP8_DTYPE, Op
from tests.kernels.tables import assert_same_as_reference, copy_task, quantize_task, storage_bytes, twin

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
POWERS_OF_TWO = BlockFormat(scale_format=ScaleFormat.UE8M0)
TABLES = [TritonTable, lambda tasks, device: ReferenceTable(tasks)]
SPECIAL_VALUES = torch.tensor(
    [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-11, 30000.0, 6e-8, 6e-5, 1e-40, -1e-42]
)


def random_values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_copy_rounds_to_nearest_even(source, target, device):
    values = torch.cat([SPECIAL_VALUES, random_values(1000)]).to(source).to(device)
    task = copy_task(values, target)
    assert assert_same_as_reference([task]) == []
    assert torch.equal(task.target, values.to(target))


@pytest.mark.parametrize(
    "view",
    [
        lambda wide: wide[0, 0, 0],
        lambda wide: wide[0, 0],
        lambda wide: wide[0, :, 5],
        lambda wide: wide[:, 1:, 2:],
        lambda wide: wide.transpose(0, 2),
        lambda wide: wide[::2, :, ::3],
        lambda wide: wide[0].T,
        lambda wide: wide.flatten()[1:],
        lambda wide: wide[:0],
        lambda wide: wide,
    ],
    ids=["0-d", "1-D", "1-D strided", "3-D slice", "3-D transposed", "3-D steps", "2-D transposed", "unaligned",
         "empty", "dense"],
)  # fmt: skip
def test_copy_reads_any_shape_and_strides(view, device):
    source = view(random_values(6, 8, 32).to(torch.bfloat16).to(device))
    task = copy_task(source, torch.float32)
    assert assert_same_as_reference([task]) == []
    assert torch.equal(task.target, source.float())


def test_copy_of_more_than_one_tile(device):
    source = random_values(3, 9000).to(device)
    tasks = [copy_task(source, torch.bfloat16), copy_task(source[:, 1:], torch.bfloat16)]
    assert assert_same_as_reference(tasks) == []
    assert torch.equal(tasks[1].target, source[:, 1:].bfloat16())


def test_copy_into_a_strided_view_leaves_its_neighbours(device):
    storage = torch.full((4, 40), 5.0, device=device)
    source = random_values(8, 64).to(device)
    task = copy_task(source, offset=(2, 16), target=storage[1:3, 4:36])
    assert assert_same_as_reference([task]) == []
    assert torch.equal(storage[1:3, 4:36], source[2:4, 16:48])
    storage[1:3, 4:36] = 5
    assert (storage == 5).all()


def test_codes_are_copied_bit_for_bit(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes[(codes & 0x7F) != 0x7F].reshape(2, 127).view(FP8_DTYPE)
    task = copy_task(codes, op=Op.COPY_CODES)
    assert assert_same_as_reference([task]) == []
    assert torch.equal(task.target.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_nan_are_flagged(code, device):
    codes = torch.zeros((2, 127), dtype=torch.uint8, device=device)
    codes[1, 126] = code
    assert assert_same_as_reference([copy_task(codes.view(FP8_DTYPE), op=Op.COPY_CODES)]) == [0]


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (1.0, {"fp32", "ue8m0"}),
        (2.0**-126, {"fp32", "ue8m0"}),
        (2.0**120, {"fp32", "ue8m0"}),
        (1.99999 * 2.0**119, {"fp32"}),
        (2.0**121, set()),
        (1.00001 * 2.0**120, set()),
        (3e38, set()),
        (1.5, {"fp32"}),
        (1 + 2**-23, {"fp32"}),
        (1e-40, {"fp32"}),
        (0.0, set()),
        (-0.0, set()),
        (-2.0, set()),
        (float("inf"), set()),
        (float("nan"), set()),
    ],
)
@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
def test_scales_are_copied_bit_for_bit_and_judged_by_their_format(scale_format, value, fits, device):
    scales = torch.ones((3, 5), device=device)
    scales[2, 4] = value
    task = copy_task(scales, op=Op.COPY_SCALES, format=BlockFormat(scale_format=scale_format))
    kind = "ue8m0" if scale_format is ScaleFormat.UE8M0 else "fp32"
    assert assert_same_as_reference([task]) == ([] if kind in fits else [0])
    assert torch.equal(task.target.view(torch.int32), scales.view(torch.int32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_copied_values_that_are_not_finite_are_flagged(value, device):
    weights = [random_values(3, 9000).to(device) for _ in range(3)]
    weights[1][2, 8999] = value
    assert assert_same_as_reference([copy_task(weight, torch.bfloat16) for weight in weights]) == [1]


def test_a_copy_that_overflows_its_target_is_flagged(device):
    values = torch.tensor([3.4e38], device=device)
    assert assert_same_as_reference([copy_task(values), copy_task(values, torch.bfloat16)]) == [1]


def mixed_tasks(device: torch.device) -> list:
    """Tasks of many kinds, in an order that is not that of their launches."""
    weight = random_values(130, 200).to(device)
    tasks = [
        copy_task(random_values(7).to(device), torch.bfloat16),
        quantize_task(weight, scale_format=ScaleFormat.UE8M0),
        copy_task(torch.ones((2, 2), device=device), op=Op.COPY_SCALES, format=POWERS_OF_TWO),
        quantize_task(weight.bfloat16(), block_size=(64, 64)),
        copy_task(weight.bfloat16().to(FP8_DTYPE), op=Op.COPY_CODES),
        quantize_task(weight, round_to_bf16=True),
        copy_task(weight.T, torch.bfloat16),
        quantize_task(weight, scale_format=ScaleFormat.UE8M0, offset=(1, 8), shape=(128, 128)),
        copy_task(torch.full((2, 2), 3.0, device=device), op=Op.COPY_SCALES),
        copy_task(torch.zeros(0, device=device)),
    ]
    return [replace(task, source=task.source.clone()) for task in tasks]


def test_tasks_of_many_kinds_in_one_table(device):
    assert assert_same_as_reference(mixed_tasks(device)) == []


def test_flags_carry_the_index_of_their_task(device):
    tasks = mixed_tasks(device)
    for index in (0, 3, 6):
        tasks[index].source[(-1,) * tasks[index].source.ndim] = float("nan")
    tasks[8].source[1, 1] = -1
    assert assert_same_as_reference(tasks) == [0, 3, 6, 8]


def test_an_empty_table_does_nothing(device):
    table = TritonTable([], device)
    table.refresh([])
    table.launch(check=True)
    assert table.bad_tasks() == []


@pytest.mark.parametrize("make_table", TABLES)
def test_checking_without_writing(make_table, device):
    tasks = mixed_tasks(device)
    tasks[0].source[3] = float("nan")
    before = [task.target.clone() for task in tasks]
    table = make_table(tasks, device)
    table.launch(check=True, action=Action.CHECK)
    assert table.bad_tasks() == [0]
    for task, target in zip(tasks, before, strict=True):
        assert torch.equal(task.target.flatten().view(torch.uint8), target.flatten().view(torch.uint8))


@pytest.mark.parametrize("make_table", TABLES)
def test_flags_are_of_one_launch(make_table, device):
    weight = random_values(4, 32).to(device)
    task = copy_task(weight)
    table = make_table([task], device)
    weight[0, 0] = float("nan")
    table.launch(check=True)
    assert table.bad_tasks() == [0]
    weight[0, 0] = 1
    table.launch(check=True)
    assert table.bad_tasks() == []


@pytest.mark.parametrize("make_table", TABLES)
def test_refresh_reads_other_sources_of_the_same_layout(make_table, device):
    tasks = [
        quantize_task(random_values(200, 160).to(device), offset=(64, 32), shape=(128, 128)),
        copy_task(random_values(2, 3, 16).to(device).transpose(1, 2), torch.bfloat16),
    ]
    table = make_table(tasks, device)
    table.launch(check=True)
    others = [-3 * random_values(200, 160).to(device), 1 - random_values(2, 3, 16).to(device).transpose(1, 2)]
    table.refresh(others)
    table.launch(check=True)
    assert table.bad_tasks() == []
    expected = quantize_task(others[0][64:192, 32:160].contiguous())
    ReferenceTable([expected]).launch(check=False)
    assert torch.equal(tasks[0].target.view(torch.uint8), expected.target.view(torch.uint8))
    assert torch.equal(tasks[0].scale, expected.scale)
    assert torch.equal(tasks[1].target, others[1].bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_a_stack_in_either_orientation(dtype, device):
    stack = random_values(3, 300, 160).to(dtype).to(device)
    matrices = [
        quantize_task(stack[expert], offset=(128, 16), shape=(140, 144)) for expert in range(3)
    ]  # what single matrices give
    for is_transposed, source in ((False, stack), (True, stack.mT.contiguous())):
        tasks = [
            replace(twin(task), source=source, select=(expert,), is_transposed=is_transposed)
            for expert, task in enumerate(matrices)
        ]
        assert assert_same_as_reference(tasks) == []
        ReferenceTable(matrices).launch(check=True)
        for task, expected in zip(tasks, matrices, strict=True):
            TritonTable([task], device).launch(check=True)
            assert storage_bytes(task.target) == storage_bytes(expected.target)
            assert torch.equal(task.scale, expected.scale)


@pytest.mark.parametrize("make_table", [TritonTable, lambda tasks, _, places: ReferenceTable(tasks, places)])
def test_refresh_takes_each_source_once(make_table, device):
    stack, vector = random_values(2, 40, 32).to(device), random_values(16).to(device)
    tasks = [
        copy_task(vector),
        *(replace(copy_task(stack[expert]), source=stack, select=(expert,)) for expert in (1, 0)),
    ]
    table = make_table(tasks, device, [0, 1, 1])
    others = [-vector, 2 * stack]
    table.refresh(others)
    table.launch(check=True)
    assert table.bad_tasks() == []
    for task, expected in zip(tasks, (others[0], others[1][1], others[1][0]), strict=True):
        assert torch.equal(task.target, expected)


@pytest.mark.parametrize("make_table", TABLES)
def test_flags_of_an_interrupted_refit_are_not_the_next_source_s(make_table, device):
    bad = torch.full((4, 32), float("nan"), device=device)
    task = copy_task(bad)
    table = make_table([task], device)
    table.launch(check=True)
    good = torch.ones((4, 32), device=device)
    table.refresh([good])
    table.launch(check=True)
    assert table.bad_tasks() == []


@pytest.mark.parametrize("is_one_run", [False, True])
@pytest.mark.parametrize("drops", ["refresh", "forget_flags"])
def test_flags_of_a_launch_that_was_interrupted_are_dropped(drops, is_one_run, device, monkeypatch):
    """The kernel has run, and nothing after it."""
    bad, good = (torch.full((4, 32), value, device=device) for value in (float("nan"), 1.0))
    task = copy_task(good)  # kept: a table holds addresses
    table, launch = TritonTable([task], device), Launch.launch

    def interrupted(launcher, *arguments):
        launch(launcher, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "launch", interrupted)
        table.refresh([bad])
        with pytest.raises(KeyboardInterrupt):
            if is_one_run:
                table.run(0, [bad], check=True)
            else:
                table.launch(check=True)
    if drops == "refresh":
        table.refresh([good])
    else:
        table.forget_flags()
    assert table.run(0, [good], check=True) and table.bad_tasks() == []


def test_a_table_that_was_interrupted_while_it_was_pointed_elsewhere_is_pointed_again(device, monkeypatch):
    first, second = (torch.full((4, 32), value, device=device) for value in (1.0, 2.0))
    task = copy_task(first)
    table = TritonTable([task], device)

    upload = _Numbers.upload

    def interrupted(*arguments):
        upload(*arguments)
        raise KeyboardInterrupt

    for again in (
        lambda: table.refresh([first]) and table.launch(check=True),
        lambda: table.run(0, [first], check=True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(_Numbers, "upload", interrupted)
            with pytest.raises(KeyboardInterrupt):
                table.refresh([second])
        again()
        assert table.bad_tasks() == []
        assert torch.equal(task.target, first)


def test_a_table_refuses_sources_of_another_alignment(device):
    # A box 8 bytes into a tensor is aligned or not, depending on where exactly an unaligned tensor starts.
    memory = torch.zeros(64, dtype=torch.bfloat16, device=device)
    table = TritonTable([copy_task(memory[8:40])], device)
    assert not table.refresh([memory[4:36]])
    assert table.refresh([memory[16:48]])


def elements_of(tensor):
    """One row of bytes for each element."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.element_size()).clone()


@pytest.mark.parametrize("make_table", TABLES)
def test_elements_and_scales_that_a_launch_changes_are_counted(make_table, device):
    tasks = mixed_tasks(device)
    held = [[elements_of(each) for each in (task.target, task.scale) if each is not None] for task in tasks]
    table = make_table(tasks, device)
    table.launch(check=True, action=Action.COUNT)
    expected = {}
    for index, (task, before) in enumerate(zip(tasks, held, strict=True)):
        after = [elements_of(each) for each in (task.target, task.scale) if each is not None]
        counts = [int((one != other).any(1).sum()) for one, other in zip(before, after, strict=True)]
        if any(counts):
            expected[index] = (counts[0], *(counts[1:] or [0]))
    assert len(expected) == len(tasks) - 1  # one is empty
    assert table.differing_tasks() == []
    assert table.changes() == expected
    table.launch(check=True, action=Action.COUNT)
    assert table.changes() == {}
    tasks[1].scale[-1, -1] += 1
    tasks[3].target.view(torch.uint8)[-1, -1] ^= 0x80
    table.launch(check=True, action=Action.COUNT)
    assert (table.bad_tasks(), table.changes()) == ([], {1: (0, 1), 3: (1, 0)})
    table.launch(check=True, action=Action.COMPARE)
    assert (table.changes(), table.differing_tasks()) == ({}, [])


@pytest.mark.parametrize("make_table", TABLES)
def test_targets_that_hold_other_bytes_are_named_and_stay(make_table, device):
    tasks = mixed_tasks(device)
    table = make_table(tasks, device)
    table.launch(check=True)
    table.launch(check=True, action=Action.COMPARE)
    assert (table.bad_tasks(), table.differing_tasks()) == ([], [])
    tasks[1].scale[-1, -1] += 1
    tasks[3].target.view(torch.uint8)[-1, -1] ^= 0x80
    tasks[6].target[-1, -1] += 1
    tasks[8].target[0, 0] *= 2
    held = [storage_bytes(task.target) for task in tasks]
    table.launch(check=True, action=Action.COMPARE)
    assert (table.bad_tasks(), table.differing_tasks()) == ([], [1, 3, 6, 8])
    assert [storage_bytes(task.target) for task in tasks] == held
    table.launch(check=True)
    table.launch(check=True, action=Action.COMPARE)
    assert table.differing_tasks() == []


def upside_down(tensor: torch.Tensor) -> torch.Tensor:
    """Other values in memory of its own, laid out alike."""
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return other.copy_(tensor.float().flip(0))


@pytest.mark.parametrize("make_table", TABLES)
def test_sources_may_come_one_by_one_and_in_any_runs(make_table, device):
    """Of tables that were joined: each task is run by its own source."""
    tasks = mixed_tasks(device)
    table = join_tables([make_table(tasks[:4], device), make_table(tasks[4:], device)])
    others = [upside_down(task.source) for task in tasks]
    expected = [replace(twin(task), source=other) for task, other in zip(tasks, others, strict=True)]
    ReferenceTable(expected).launch(check=True)
    for first, last in ((7, 8), (2, 7), (0, 1), (8, 10), (1, 2)):
        assert table.run(first, others[first:last], check=True)
    assert table.bad_tasks() == []
    for task, other in zip(tasks, expected, strict=True):
        assert storage_bytes(task.target) == storage_bytes(other.target)
    others[6][0, 0] = float("nan")
    assert table.run(5, others[5:7], check=True)
    assert table.bad_tasks() == [6]
    assert table.run(4, others[4:], check=False, action=Action.COMPARE)
    assert table.differing_tasks() == []
    others[7][5, 20] += 3
    assert table.run(7, others[7:8], check=False, action=Action.COMPARE)
    assert table.differing_tasks() == [7]


@pytest.mark.parametrize("make_table", [compile_table, TritonTable])
def test_a_table_made_in_inference_mode_serves_outside_of_it(make_table, device):
    with torch.inference_mode():
        source = torch.randn(130, 140, dtype=torch.bfloat16, device=device)
        task = quantize_task(source)
        table = make_table([task], device)
    again = torch.randn(130, 140, dtype=torch.bfloat16, device=device)
    again[3, 4] = float("nan")
    table.refresh([again])
    table.launch(check=True)
    assert table.bad_tasks() == [0]
    good = torch.ones(130, 140, dtype=torch.bfloat16, device=device)
    table.refresh([good])
    table.launch(check=True)
    assert table.bad_tasks() == []


@pytest.mark.parametrize("make_table", [compile_table, TritonTable])
def test_a_default_device_elsewhere_does_no_harm(make_table, device):
    source = torch.randn(130, 140, dtype=torch.bfloat16, device=device)
    task = quantize_task(source)
    with torch.device("meta"):
        table = make_table([task], device)
        table.launch(check=True)
        assert table.bad_tasks() == []
    assert torch.isfinite(task.scale).all() and (task.scale > 0).all()
