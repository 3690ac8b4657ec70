"""Calibration batches and KV scales of any make: token ids of the caller's, or one error that says what is wrong."""

import asyncio

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from fp8refit.config import KvConfig
from fp8refit.errors import InvalidCalibrationError
from fp8refit.ranks.kv.calibration import order_of


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)


KINDS = {
    "list": torch.Tensor.tolist,
    "tensor": lambda t: t,
    "int32": torch.Tensor.int,
    "numpy": torch.Tensor.numpy,
    "rows": list,
}
ODD = {
    "bool": lambda t: t > 0,
    "float": torch.Tensor.float,
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "nested": nested,
    "fake": fake,
    "freed": freed,
    "rows on meta": lambda t: [row.to("meta") for row in t],
    "numbers on meta": lambda t: [number.to("meta") for number in t.flatten()],
    "rows of floats": lambda t: list(t.float()),
    "row and number": lambda t: [t[0], 3],
    "text among them": lambda t: ["a", *t.tolist()],
    "none among them": lambda t: [None, *t.tolist()],
    "cube": lambda t: t[None],
    "objects": lambda t: np.array([object()] * 3),
    "scalar": lambda t: t[0, 0],
    "negative": lambda t: -1 - t,
}
ids = st.builds(
    lambda rows, length, seed: torch.from_numpy(np.random.default_rng(seed).integers(1, 99, (rows, length))),
    st.integers(1, 3),
    st.integers(2, 5),
    st.integers(0, 99),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=6,
)


async def tokenize(prompts):
    return [[ord(character) for character in prompt] for prompt in prompts]


def order(calibration=None, kv_scales=None):
    return asyncio.run(order_of(calibration, kv_scales, KvConfig(), tokenize))


def refuse(*arguments) -> str:
    try:
        order(*arguments)
    except InvalidCalibrationError as error:
        return str(error)
    raise AssertionError("it was taken")


@given(ids, st.sampled_from(list(KINDS)), st.sampled_from([None, *KINDS, "bool"]), st.integers(0, 99))
def test_batches_are_what_they_say(batch, kind, mask_kind, seed):
    given, expected = KINDS[kind](batch), batch.tolist()
    if mask_kind is not None:
        mask = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, batch.shape))
        mask[:, 0] = 1
        expected = [row[bits.bool()].tolist() for row, bits in zip(batch, mask, strict=True)]
        given = {"input_ids": given, "attention_mask": (KINDS | ODD)[mask_kind](mask)}
    assert [list(row) for row in order(given).token_ids] == expected


@given(ids, st.sampled_from(list(ODD)))
def test_what_is_no_batch_is_refused(batch, kind):
    said = refuse(ODD[kind](batch))
    assert kind != "bool" or "mask" in said, "a mask is called one"


@given(ids, st.sampled_from(sorted(ODD.keys() - {"bool", "negative"})))
def test_what_is_no_mask_is_refused(batch, kind):
    mask = ODD[kind](torch.ones_like(batch))
    try:
        order({"input_ids": batch, "attention_mask": mask})
    except InvalidCalibrationError:
        return
    assert isinstance(mask, list), "lists of anything say by their truth what is padding"


@given(anything)
def test_anything_is_taken_or_refused(batch):
    try:
        found = order(batch)
    except InvalidCalibrationError:
        return
    assert found is None or all(token >= 0 for row in found.token_ids for token in row)


@given(
    st.one_of(
        anything, st.dictionaries(st.one_of(anything.filter(lambda key: not isinstance(key, list | dict))), anything)
    )
)
def test_any_scales_are_taken_or_refused(scales):
    try:
        found = order(None, scales)
    except InvalidCalibrationError:
        return
    assert found is None or all(0 < scale < float("inf") for scale in found.scales.values())


@given(st.sampled_from(sorted(ODD.keys() - {"bool", "float", "complex", "scalar", "cube"})))
def test_tensors_that_are_no_scale_are_refused(kind):
    refuse(None, {"a.k_scale": ODD[kind](torch.ones(1, 1, dtype=torch.int64))})
