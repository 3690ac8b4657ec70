"""The layout of buckets: every row once, in order, aligned, whole blocks, and no bucket larger than it has to be."""

import random

import pytest
import torch
from pydantic import ValidationError

from fp8refit.slots import SCALE_SUFFIX
from fp8refit.transport.buckets import HEADER_BYTES, WireTensor, lay_out

CODES = {"dtype": "float8_e4m3fn", "block_size": (128, 128), "row_step": 128}


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
        yield WireTensor(name=f"w{index}", **chosen.choice(kinds))


@pytest.mark.parametrize("seed", range(40))
def test_every_row_lies_in_one_place(seed):
    tensors = tuple(random_tensors(seed))
    bucket_bytes = random.Random(-seed).choice([2_000, 50_000, 1 << 20, 1 << 28])
    buckets = lay_out(tensors, bucket_bytes)
    placed = [placement for bucket in buckets for placement in bucket.placements]
    expected = [index for index, tensor in enumerate(tensors) if tensor.travels and 0 not in tensor.shape]
    assert list(dict.fromkeys(placement.tensor for placement in placed)) == expected, "all, in their order"
    for index in expected:
        tensor, next_row = tensors[index], 0
        for placement in (each for each in placed if each.tensor == index):
            assert placement.first_row == next_row
            assert next_row == 0 or (tensor.row_step and next_row % tensor.row_step == 0)
            next_row += placement.num_rows
        assert next_row == tensor.num_rows


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_aligned_and_apart_and_views_are_of_their_rows(seed):
    tensors = tuple(random_tensors(seed))
    for bucket in lay_out(tensors, 50_000):
        end, memory = HEADER_BYTES, torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for placement in bucket.placements:
            metas = tensors[placement.tensor].metas
            assert [part.name for part in placement.parts] == list(metas)
            for part in placement.parts:
                assert part.offset_bytes % 256 == 0 and part.offset_bytes >= end
                end = part.offset_bytes + part.num_bytes
                view = part.view(memory)
                assert view.dtype is part.dtype is metas[part.name].dtype
                assert view.shape[1:] == metas[part.name].shape[1:]
        assert end <= bucket.num_bytes


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_larger_only_where_one_run_of_rows_is(seed):
    tensors = tuple(random_tensors(seed))
    least = max(tensor.num_bytes(min(tensor.row_step or tensor.num_rows, tensor.num_rows)) for tensor in tensors)
    for bucket in lay_out(tensors, 50_000):
        assert bucket.num_bytes <= max(50_000, HEADER_BYTES + least)


def test_scales_of_a_run_of_rows_are_those_of_its_blocks():
    tensor = WireTensor(name="w", shape=(1000, 300), **CODES)
    first, second, *_ = (placement for bucket in lay_out([tensor], 160 * 1024) for placement in bucket.placements)
    codes, scales = second.parts
    assert (codes.name, scales.name) == ("w", "w" + SCALE_SUFFIX)
    assert second.first_row == first.num_rows == codes.first_row
    assert scales.first_row == codes.first_row // 128
    assert scales.shape == (-(-codes.shape[0] // 128), 3)


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
        {"shape": (256, 2), **CODES, "block_size": (0, 128)},
    ],
    ids=str,
)
def test_what_cannot_be_a_weight_is_refused_before_memory_is_taken(fields):
    with pytest.raises(ValidationError):
        WireTensor(**{"name": "w", **fields})
