"""Calibration batches and KV scales in every form that users have them."""

import asyncio
from collections import UserDict

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8refit.config import KvConfig, KvOrder
from fp8refit.errors import InvalidCalibrationError, UnsupportedEngineError
from fp8refit.ranks.kv.calibration import order_of

ROWS = ((3, 1, 4), (1, 5, 9))


async def tokenize(prompts):
    return [[ord(character) for character in prompt] for prompt in prompts]


async def refuse_to_tokenize(prompts):
    raise UnsupportedEngineError(f"no tokenizer for {len(prompts)}")


def order(calibration=None, kv_scales=None, *, tokenize=tokenize, **config):
    return asyncio.run(order_of(calibration, kv_scales, KvConfig(**config), tokenize))


def token_ids(calibration, **options):
    found = order(calibration, **options)
    assert found.scales == {}
    assert all(type(token) is int for row in found.token_ids for token in row)
    return found.token_ids


def test_nothing_is_asked_of_the_ranks_if_nothing_is_wanted():
    assert order() is None


BATCHES = {
    "lists": [[3, 1, 4], [1, 5, 9]],
    "tuples": ROWS,
    "int64": torch.tensor(ROWS),
    "int32": torch.tensor(ROWS, dtype=torch.int32),
    "uint8": torch.tensor(ROWS, dtype=torch.uint8),
    "transposed": torch.tensor(ROWS).t().contiguous().t(),
    "numpy": np.array(ROWS),
    "numpy-int32": np.array(ROWS, dtype=np.int32),
    "list-of-tensors": [torch.tensor(row) for row in ROWS],
    "list-of-arrays": [np.array(row) for row in ROWS],
    "lists-of-numpy-integers": [[np.int64(token) for token in row] for row in ROWS],
    "mapping": {"input_ids": torch.tensor(ROWS)},
    "mapping-of-lists": {"input_ids": [list(row) for row in ROWS], "token_type_ids": 0},
    "batch-encoding": UserDict(input_ids=torch.tensor(ROWS), attention_mask=torch.ones(2, 3, dtype=torch.int64)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batches_of_sequences(batch):
    assert token_ids(batch) == ROWS


SEQUENCES = {
    "list": [3, 1, 4],
    "tuple": (3, 1, 4),
    "tensor": torch.tensor([3, 1, 4]),
    "numpy": np.array([3, 1, 4]),
    "mapping": {"input_ids": [3, 1, 4], "attention_mask": [1, 1, 1]},
    "range": range(3, 6),
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_one_sequence_is_a_batch_of_one(sequence):
    expected = (3, 4, 5) if isinstance(sequence, range) else (3, 1, 4)
    assert token_ids(sequence) == (expected,)


def test_sequences_may_differ_in_length():
    assert token_ids([[7], [8, 9], (0,)]) == ((7,), (8, 9), (0,))


@pytest.mark.parametrize("bits", [int, bool])
@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensor", "numpy", "list"])
def test_the_mask_says_what_is_padding(kind, bits):
    mask = [list(map(bits, row)) for row in [[0, 0, 1], [1, 1, 0]]]
    batch = {"input_ids": kind([[0, 0, 7], [8, 9, 0]]), "attention_mask": kind(mask)}
    assert token_ids(batch) == ((7,), (8, 9))


def test_a_token_like_padding_is_kept_if_the_mask_says_so():
    assert token_ids({"input_ids": torch.tensor([[0, 5, 0]]), "attention_mask": torch.tensor([[0, 1, 1]])}) == ((5, 0),)


def test_prompts_go_through_the_tokenizer():
    assert token_ids("ab") == ((97, 98),)
    assert token_ids(["ab", "c"]) == ((97, 98), (99,))
    with pytest.raises(UnsupportedEngineError, match="no tokenizer for 2"):
        order(["ab", "c"], tokenize=refuse_to_tokenize)


def test_token_ids_need_no_tokenizer():
    assert token_ids([[1, 2]], tokenize=refuse_to_tokenize) == ((1, 2),)


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(1, ((3,),)), (3, (ROWS[0],)), (4, (ROWS[0], (1,))), (6, ROWS), (7, ROWS)],
)
def test_whole_sequences_are_used_and_the_last_is_cut_short(max_tokens, expected):
    assert token_ids(ROWS, max_tokens=max_tokens) == expected


def test_the_batch_of_the_user_is_left_alone():
    rows = [[np.int64(3), 1], [2]]
    kept = [list(row) for row in rows]
    token_ids(rows)
    assert rows == kept and type(rows[0][0]) is np.int64


with FakeTensorMode():
    FAKE = torch.ones(2, 3, dtype=torch.int64)

BAD_BATCHES = {
    "empty-list": ([], "holds no"),
    "empty-tensor": (torch.empty(0, 4, dtype=torch.int64), "holds no"),
    "empty-sequence": ([[1], []], "sequence 1 holds no token"),
    "no-columns": (torch.empty(2, 0, dtype=torch.int64), "sequence 0 holds no token"),
    "all-padding": ({"input_ids": [[1], [2]], "attention_mask": [[1], [0]]}, "sequence 1 holds no token"),
    "empty-prompt": (["a", ""], "sequence 1 holds no token"),
    "negative": ([[1, -2]], "sequence 0 holds -2, which is not a token id"),
    "ignored-label": (torch.tensor([[1, -100]]), "holds -100, which is not a token id"),
    "float": ([[1, 2.0]], "holds 2.0, which is not a token id"),
    "bool": ([[1, True]], "holds True, which is not a token id"),
    "none": ([[1, None]], "holds None, which is not a token id"),
    "mixed": (["a", 3], "which is not a token id"),
    "mixed-depth": ([[1], 2], "which is not a token id"),
    "deep": ([[[1, 2]]], "which is not a token id"),
    "floats": (torch.ones(2, 3), r"a tensor of torch\.float32 and shape \[2, 3\]"),
    "bools": (torch.ones(2, 3, dtype=torch.bool), "a tensor of bools is a mask; pass the token ids"),
    "meta": (torch.ones(2, 3, dtype=torch.int64, device="meta"), "a tensor that is on the meta device"),
    "list-of-meta": ([torch.ones(3, dtype=torch.int64, device="meta")], "a tensor that is on the meta device"),
    "numbers-on-meta": ([torch.tensor(3, device="meta")], "a tensor that is on the meta device"),
    "sparse": (torch.eye(3, dtype=torch.int64).to_sparse(), r"a tensor that is torch\.sparse_coo; send it dense"),
    "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a tensor that is a nested tensor"),
    "jagged": (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "a tensor that is a nested tensor",
    ),
    "fake": (FAKE, "a tensor that is a FakeTensor without memory"),
    "sequence-among-numbers": ([torch.ones(2, dtype=torch.int64), 3], "which is not a token id"),
    "float-numbers": ([torch.tensor(3.0)], "which is not a token id"),
    "mask-of-floats": (
        {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 2)},
        r"attention_mask is a tensor of torch\.float32 .* a mask is of integers or bools",
    ),
    "mask-of-rows": (
        {"input_ids": [[1, 2]], "attention_mask": [torch.ones(2), 3]},
        "attention_mask has another shape|attention_mask holds values that are neither true nor false",
    ),
    "mask-on-meta": (
        {"input_ids": [[1, 2]], "attention_mask": torch.ones(1, 2, dtype=torch.int64, device="meta")},
        "attention_mask is a tensor that is on the meta device",
    ),
    "cube": (torch.ones(2, 3, 4, dtype=torch.int64), r"shape \[2, 3, 4\]"),
    "scalar": (torch.tensor(3), r"shape \[\]"),
    "numpy-floats": (np.ones((2, 3)), "calibration: .*token id"),
    "number": (3, "int is not a batch of token ids or prompts"),
    "bytes": (b"abc", "bytes is not a batch"),
    "no-input-ids": ({"attention_mask": [[1]]}, r"a mapping without input_ids \(attention_mask\)"),
    "mask-shape": ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask has another shape"),
    "mask-rows": ({"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]}, "attention_mask has another shape"),
}


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_anything_else_is_refused(batch, message):
    with pytest.raises(InvalidCalibrationError, match=message):
        order(batch)


def test_scales_are_numbers_by_name():
    given = {"model.a.k_scale": 0.5, "module.model.b.k_scale": torch.tensor([2]), "c": torch.tensor(0.25), "d": 3}
    expected = {"model.a.k_scale": 0.5, "model.b.k_scale": 2.0, "c": 0.25, "d": 3.0}
    assert order(kv_scales=given) == KvOrder(scales=expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"a has shape \[2\]; a KV-cache scale is a single number"),
        (torch.ones(0), r"a has shape \[0\]"),
        ("1.0", "a is '1.0'; give a number"),
        (True, "a is True; give a number"),
        (None, "a is None; give a number"),
        (torch.ones(1, device="meta"), "a is on the meta device"),
        (torch.ones(1).to_sparse(), "a is torch.sparse_coo"),
        (torch.tensor([1j]), "a is not a number"),
        (10**400, "a is not a number"),
    ],
)
def test_scales_that_are_no_numbers_are_refused(value, message):
    with pytest.raises(InvalidCalibrationError, match=message):
        order(kv_scales={"a": value})


@pytest.mark.parametrize(
    ("kv_scales", "message"),
    [
        ([("a", 1.0)], "kv_scales: is a list; give a mapping of names to numbers"),
        (torch.ones(2), "kv_scales: is a Tensor"),
        ({}, "holds no scale"),
        ({3: 1.0}, "has 3 for a name"),
        ({None: 1.0}, "has None for a name"),
        ({"\ud800": 1.0}, "for a name; names must be strings"),
        ({"a": 1.0, "module.a": 2.0}, "a is given twice, the second time as module.a"),
    ],
)
def test_scales_that_are_not_by_name_are_refused(kv_scales, message):
    with pytest.raises(InvalidCalibrationError, match=message):
        order(kv_scales=kv_scales)


def test_measured_or_given_but_not_both():
    with pytest.raises(InvalidCalibrationError, match="not both"):
        order([[1]], {"a": 1.0})
