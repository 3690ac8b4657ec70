"""The layout of buckets: every element once where it belongs, in order, aligned, whole blocks, and no bucket too large."""

import random
from collections import Counter
from math import prod

import pytest
import torch
from pydantic import ValidationError

from fp8refit.errors import StagingMemoryError
from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import SCALE_SUFFIX
from fp8refit.transport.collective.buckets import HEADER_BYTES, NUM_BUFFERS, Cut, WireTensor, lay_out, take_buffers

CODES = {"dtype": "float8_e4m3fn", "format": BlockFormat(), "row_step": 128}
NUM_SECTIONS = 3


def random_tensors(seed):
    """Matrices that travel as codes and as values, vectors, scalars, stacks, empty ones, and some that are never cut."""
    chosen = random.Random(seed)
    for index in range(chosen.randrange(1, 40)):
        rows, cols = chosen.choice([1, 7, 128, 130, 1000, 3000]), chosen.choice([1, 16, 128, 200, 1024])
        kinds = [
            {"shape": (rows, cols), **CODES},
            {"shape": (rows, cols), "dtype": "bfloat16", "row_step": chosen.choice([0, 1, 128])},
            {"shape": (rows,), "dtype": "float32"},
            {"shape": (), "dtype": "float32"},
            {"shape": (chosen.randrange(5), rows, cols), "dtype": "bfloat16"},
            {"shape": (0, cols), "dtype": "bfloat16"},
            {"shape": (rows, cols), "dtype": "bfloat16", "travels": False},
        ]
        kind = chosen.choice(kinds)
        yield WireTensor(name=f"w{index}", cut=random_cut(chosen, kind), **kind)


def random_cut(chosen, kind):
    """Parts of a matrix for three sections, which may overlap, leave something out, or be empty; or none."""
    if len(kind["shape"]) < 2 or chosen.random() < 0.5:
        return None
    dim = chosen.randrange(2)
    length, step = kind["shape"][dim], 128 if "format" in kind or kind.get("row_step") == 128 else 1
    spans = []
    for _ in range(NUM_SECTIONS):
        first, end = sorted(min(step * chosen.randrange(-(-length // step) + 1), length) for _ in range(2))
        spans.append((first, end - first) if first < end else (0, 0))
    return Cut(dim=dim, spans=tuple(spans))


def laid_out(seed, bucket_bytes=50_000):
    tensors = tuple(random_tensors(seed))
    return tensors, lay_out(tensors, bucket_bytes, NUM_SECTIONS)


def placements_of(bucket, tensors):
    return ((tensors[run.tensor], placement) for run in bucket.runs for placement in run.placements)


def wanted(tensor, portion):
    """How many elements of a tensor a portion has to bring, in all buckets."""
    if tensor.cut is None:
        return prod(tensor.shape) if portion == 0 else 0
    if portion == 0:
        return 0
    count = tensor.cut.spans[portion - 1][1]
    return prod((*tensor.shape[: tensor.cut.dim], count, *tensor.shape[tensor.cut.dim + 1 :]))


@pytest.mark.parametrize("seed", range(60))
def test_every_element_comes_once_to_whom_it_belongs_and_in_order(seed):
    tensors, buckets = laid_out(seed, random.Random(-seed).choice([2_000, 50_000, 1 << 20, 1 << 28]))
    runs = [run for bucket in buckets for run in bucket.runs]
    order = [(run.tensor, run.first_row) for run in runs]
    assert order == sorted(order)
    brought, ends = Counter(), {}
    for tensor, run in ((tensors[run.tensor], run) for run in runs):
        assert run.first_row >= ends.get(run.tensor, 0)
        assert run.first_row == 0 or (tensor.row_step and run.first_row % tensor.row_step == 0)
        ends[run.tensor] = run.first_row + run.num_rows
        for placement in run.placements:
            if tensor.shape:
                first, count = placement.start[0], placement.shape[0]
                assert run.first_row <= first and first + count <= run.first_row + run.num_rows
            if tensor.cut is not None:
                first, count = tensor.cut.spans[placement.portion - 1]
                start, size = placement.start[tensor.cut.dim], placement.shape[tensor.cut.dim]
                assert first <= start and start + size <= first + count
            brought[run.tensor, placement.portion] += prod(placement.shape)
    for index, tensor in enumerate(tensors):
        for portion in range(1 + NUM_SECTIONS):
            assert brought[index, portion] == (wanted(tensor, portion) if tensor.travels else 0)


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_aligned_and_apart_and_views_are_of_their_boxes(seed):
    tensors, buckets = laid_out(seed)
    for bucket in buckets:
        portions = bucket.portions(torch.zeros(bucket.num_bytes, dtype=torch.uint8))
        assert [portion.numel() for portion in portions] == list(bucket.portion_bytes)
        ends = [HEADER_BYTES] + [0] * NUM_SECTIONS
        for tensor, placement in placements_of(bucket, tensors):
            metas = tensor.metas
            assert [part.name for part in placement.parts] == list(metas)
            for part in placement.parts:
                assert part.offset_bytes % 256 == 0 and part.offset_bytes >= ends[placement.portion]
                ends[placement.portion] = part.offset_bytes + part.num_bytes
                view = part.view(portions[placement.portion])
                assert view.dtype is part.dtype is metas[part.name].dtype
                assert all(n <= size for n, size in zip(view.shape, metas[part.name].shape, strict=True))
            assert placement.parts[0].shape == placement.shape
        assert all(end <= size for end, size in zip(ends, bucket.portion_bytes, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_larger_only_where_one_run_of_rows_is(seed):
    tensors, buckets = laid_out(seed)
    least = max(tensor.num_bytes(0, min(tensor.row_step or tensor.num_rows, tensor.num_rows)) for tensor in tensors)
    for bucket in buckets:
        is_one_run = len(bucket.runs) == 1 and bucket.runs[0].num_rows == tensors[bucket.runs[0].tensor].row_step
        assert bucket.num_bytes <= max(50_000, HEADER_BYTES + least) or is_one_run


@pytest.mark.parametrize("section", range(NUM_SECTIONS))
def test_a_section_gets_what_all_get_and_its_own_portion_at_the_same_places(section):
    tensors, buckets = laid_out(3)
    for bucket in buckets:
        whole = torch.arange(bucket.num_bytes).to(torch.uint8)
        sent, own = bucket.portions(whole), bucket.of_section(section)
        buffer = torch.cat([sent[0], sent[1 + section]])
        assert own.num_bytes == buffer.numel()
        expected = [
            part.view(sent[placement.portion]).reshape(-1).view(torch.uint8).tolist()
            for _, placement in placements_of(bucket, tensors)
            if placement.portion in (0, 1 + section)
            for part in placement.parts
        ]
        portions = own.portions(buffer)
        assert [
            part.view(portions[placement.portion]).reshape(-1).view(torch.uint8).tolist()
            for _, placement in placements_of(own, tensors)
            for part in placement.parts
        ] == expected


def test_scales_of_a_box_are_those_of_its_blocks():
    cut = Cut(dim=1, spans=((0, 128), (128, 172)))
    tensor = WireTensor(name="w", shape=(1000, 300), cut=cut, **CODES)
    buckets = lay_out([tensor], 160 * 1024, 2)
    second = buckets[1].runs[0]
    codes, scales = second.placements[1].parts
    assert (codes.name, scales.name) == ("w", "w" + SCALE_SUFFIX)
    assert second.first_row == buckets[0].runs[0].num_rows == codes.start[0]
    assert (codes.start[1], codes.shape[1]) == (128, 172)
    assert scales.start == (codes.start[0] // 128, 1)
    assert scales.shape == (-(-codes.shape[0] // 128), 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (-1,), "dtype": "bfloat16"},
        {"shape": (1 << 39, 1 << 10), "dtype": "bfloat16"},
        {"shape": (1,) * 9, "dtype": "bfloat16"},
        {"shape": (1,), "dtype": "complex256"},
        {"shape": (1,), "dtype": "bfloat16", "name": "n" * 2000},
        {"shape": (256,), **CODES},
        {"shape": (256, 2), **CODES, "row_step": 64},
        {"shape": (256, 2), **CODES, "dtype": "bfloat16"},
        {"shape": (256, 2), **CODES, "format": {"block_size": (0, 128)}},
        {"shape": (256, 2), **CODES, "cut": {"dim": 0, "spans": ((0, 64), (64, 192))}},
        {"shape": (256, 2), **CODES, "cut": {"dim": 0, "spans": ((0, 128), (128, 256))}},
        {"shape": (256, 2), "dtype": "bfloat16", "cut": {"dim": 2, "spans": ((0, 1), (1, 1))}},
        {"shape": (256, 2), "dtype": "bfloat16", "cut": {"dim": 1, "spans": ((0, 2),)}},
        {"shape": (256, 2), "dtype": "bfloat16", "cut": {"dim": 1, "spans": ((-1, 2), (1, 1))}},
    ],
    ids=str,
)
def test_what_cannot_be_a_weight_is_refused_before_memory_is_taken(fields):
    with pytest.raises(ValidationError):
        WireTensor(**{"name": "w", **fields})


@pytest.mark.parametrize("num_tensors", [1, 2, 3, 8])
def test_buffers_are_as_large_as_the_largest_bucket_and_no_more_than_the_buckets(num_tensors):
    tensors = [WireTensor(name=f"t{size}", shape=(1 << 20, size), dtype="uint8") for size in range(1, num_tensors + 1)]
    buckets = lay_out(tensors, 1 << 20)
    buffers = take_buffers(buckets, torch.device("cpu"), remedy="")
    assert len(buffers) == min(len(buckets), NUM_BUFFERS)
    assert {buffer.numel() for buffer in buffers} == {max(bucket.num_bytes for bucket in buckets)}


def test_no_room_for_buffers_says_what_to_do(monkeypatch):
    buckets = lay_out([WireTensor(name="t", shape=(4 << 20,), dtype="uint8")], 1 << 20)

    def empty(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(
        StagingMemoryError, match=r"no room for 3 buffers of 1 MiB on cpu; leave some\. Nothing was written"
    ):
        take_buffers(buckets, torch.device("cpu"), remedy="leave some")
