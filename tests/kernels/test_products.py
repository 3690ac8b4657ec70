"""Products added while their weights are quantized: the bits are those of merging first and quantizing what was merged."""

from dataclasses import replace

import pytest
import torch

from fp8refit.kernels.merge import Product
from fp8refit.kernels.products import LowRank
from fp8refit.kernels.rows import can_merge
from fp8refit.kernels.table import join_tables
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.kernels.work import Action
from fp8refit.live.formats import FLOAT_SCALES, BlockFormat, ScaleFormat
from fp8refit.live.slots import Op
from tests.kernels.tables import assert_same_as_reference, copy_task, quantize_task, storage_bytes, twin


def values(*shape, dtype=torch.bfloat16, device, seed=0):
    """Random values. On a CPU their products have exact sums: the interpreter adds up in the order of its tiles."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))
    return (found if device.type == "cuda" else (found * 8).round() / 8).to(device, dtype)


def product_of(source, rank, *, scale=0.5, low_dtype=None, seed=0):
    options = {"dtype": low_dtype or source.dtype, "device": source.device, "seed": seed}
    (rows, cols) = source.shape
    return LowRank(values(rows, rank, **options), values(rank, cols, **options), scale)


def merging_task(source, rank=16, *, product=None, **options):
    return replace(quantize_task(source, **options), product=product or product_of(source, rank))


def merged_first(task):
    """The same task on what the kernel that only merges makes."""
    from fp8refit.kernels.triton_merge import add_products_triton

    if task.product is None:
        return twin(task)
    up, down, scale = task.product.up, task.product.down, task.product.scale
    out = torch.full_like(task.source, torch.nan)
    assert add_products_triton([Product(weight=task.source, up=up, down=down, scale=scale, out=out)]) == []
    return replace(twin(task), source=out, product=None)


def assert_written(tasks, expected):
    for task, other in zip(tasks, expected, strict=True):
        assert storage_bytes(task.target) == storage_bytes(other.target)
        assert task.scale is None or storage_bytes(task.scale) == storage_bytes(other.scale)


def assert_same_as_merged_first(tasks):
    assert all(task.product is None or can_merge(task) for task in tasks)
    expected = [merged_first(task) for task in tasks]
    for each in (tasks, expected):
        table = TritonTable(each, tasks[0].source.device)
        table.launch(check=True)
        assert table.bad_tasks() == []
    assert_written(tasks, expected)


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("rank", [1, 8, 16, 64, 100])
@pytest.mark.parametrize(
    ("offset", "shape"), [((0, 0), (200, 160)), ((64, 32), (130, 112)), ((128, 0), (1, 16)), ((0, 144), (128, 16))]
)
def test_any_rank_box_and_scale_format(offset, shape, rank, scale_format, device):
    source = values(200, 160, device=device)
    assert_same_as_merged_first(
        [merging_task(source, rank, offset=offset, shape=shape, scale_format=scale_format)],
    )


@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("round_to_bf16", [False, True])
def test_any_dtype(dtype, low_dtype, round_to_bf16, device):
    source = values(130, 272, dtype=dtype, device=device)
    product = product_of(source, 40, low_dtype=low_dtype, scale=0.375)
    assert_same_as_merged_first([merging_task(source, product=product, round_to_bf16=round_to_bf16)])


def test_rows_of_an_adapter_that_lie_apart(device):
    source = values(160, 208, device=device)[:, :176]
    up, down = values(160, 48, device=device)[:, :16], values(16, 320, device=device)[:, 32:208]
    assert_same_as_merged_first(
        [merging_task(source, product=LowRank(up, down, -2.0), offset=(32, 16), shape=(128, 160))]
    )


def mixed_tasks(device):
    """With and without products, of several kinds."""
    sources = [values(130 + 16 * number, 144, device=device) for number in range(5)]
    return [
        merging_task(sources[0], 16),
        quantize_task(sources[1]),
        merging_task(sources[2], 8, scale_format=ScaleFormat.UE8M0),
        copy_task(sources[3], torch.float32),
        merging_task(sources[4], 16, offset=(16, 16), shape=(128, 128)),
    ]


def test_with_and_without_products_in_one_table(device):
    assert_same_as_merged_first(mixed_tasks(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the order of sums is not defined")
def test_the_reference_gives_the_same(device):
    tasks = mixed_tasks(device)
    tasks[2].product.up[3, 4] = torch.nan
    assert assert_same_as_reference(tasks) == [2]


@pytest.mark.parametrize("held", ["up", "down", "source"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_flagged_where_it_counts(value, held, device):
    tasks = mixed_tasks(device)
    tensor = tasks[4].source if held == "source" else getattr(tasks[4].product, held)
    tensor[2, 3] = value  # before the box of the task
    table = TritonTable(tasks, device)
    table.launch(check=True)
    assert table.bad_tasks() == []
    tensor[17 if held != "down" else 2, 3 if held == "up" else 20] = value
    table.launch(check=True)
    assert table.bad_tasks() == [4]


def again(task, seed):
    """The task with another source and another product, laid out alike."""
    source = values(*task.source.shape, dtype=task.source.dtype, device=task.source.device, seed=seed)
    product = task.product
    if product is not None:
        product = product_of(source, product.up.shape[1], scale=product.scale * (seed + 1), seed=seed)
    return replace(task, source=source, product=product)


@pytest.mark.parametrize("runs", [[(0, 5)], [(0, 1), (1, 2), (2, 3), (3, 5)], [(2, 5), (0, 2)]])
def test_a_table_is_pointed_at_other_products(runs, device):
    """Of tables that were joined: in any runs, and whatever of source, matrices and scale has changed."""
    tasks = mixed_tasks(device)
    table = join_tables([TritonTable(tasks[:3], device), TritonTable(tasks[3:], device)])
    for seed in (1, 1, 2):
        now = [again(task, seed) for task in tasks]
        for first, last in runs:
            part = now[first:last]
            assert table.run(
                first, [each.source for each in part], products=[each.product for each in part], check=True
            )
        assert table.bad_tasks() == []
        expected = [merged_first(each) for each in now]
        TritonTable(expected, device).launch(check=True)
        assert_written(now, expected)


def test_what_has_not_changed_is_not_uploaded_again(device, monkeypatch):
    from fp8refit.kernels import triton_table

    tasks, uploads = mixed_tasks(device), []
    table = TritonTable(tasks, device)
    monkeypatch.setattr(triton_table._Numbers, "upload", lambda self, start, end: uploads.append((start, end)))
    for factor, expected in ((1, []), (2, [(0, 5)]), (2, [])):
        products = [
            replace(task.product, scale=task.product.scale * factor) if task.product is not None else None
            for task in tasks
        ]
        uploads.clear()
        assert table.run(0, [task.source for task in tasks], products=products, check=True)
        assert uploads == expected


def test_what_differs_is_found_and_stays(device):
    tasks = mixed_tasks(device)
    table = TritonTable(tasks, device)
    table.launch(check=True)
    table.launch(check=True, action=Action.COMPARE)
    assert (table.bad_tasks(), table.differing_tasks()) == ([], [])
    tasks[0].product.up[1] *= 2
    tasks[2].target.view(torch.uint8)[3, 4] ^= 1
    held = [storage_bytes(task.target) for task in tasks]
    table.launch(check=True, action=Action.COMPARE)
    assert table.differing_tasks() == [0, 2]
    assert [storage_bytes(task.target) for task in tasks] == held


def test_what_the_kernel_does_not_take_is_refused(device):
    source = values(64, 32, device=device)
    up, down = values(64, 16, device=device), values(16, 32, device=device)
    usual = merging_task(source, product=LowRank(up, down, 1.0))
    assert can_merge(usual)
    wide = torch.zeros(64, 40, dtype=torch.bfloat16, device=device)
    unusual = [
        replace(usual, product=None),
        replace(usual, op=Op.COPY),
        replace(usual, is_transposed=True),
        replace(usual, select=(0,)),
        replace(usual, format=BlockFormat(block_size=(64, 64))),
        replace(usual, product=LowRank(up.mT.contiguous().mT, down, 1.0)),
        replace(usual, product=LowRank(up, down.mT.contiguous().mT, 1.0)),
        replace(usual, product=LowRank(up, down.float(), 1.0)),
        replace(usual, product=LowRank(up.double(), down.double(), 1.0)),
        replace(usual, product=LowRank(up.to("meta"), down.to("meta"), 1.0)),
        replace(usual, source=wide[:, :32]),
        merging_task(source, product=LowRank(up, down, 1.0), offset=(0, 8), shape=(64, 16)),
        merging_task(source, product=LowRank(up, down, 1.0), shape=(64, 24)),
    ]
    assert [number for number, task in enumerate(unusual) if can_merge(task)] == []
