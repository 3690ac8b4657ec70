"""What a tensor stands on."""

import pytest
import torch
from torch import nn

from fp8refit.live.layout_guard import LayoutGuard
from fp8refit.live.storage import why_unreadable
from tests.bad_tensors import HARMLESS, MISFITS, WITHOUT_BYTES, Own

MATRIX = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
READABLE = {**HARMLESS, "row again and again": lambda t: t[:1].expand(8, -1), "no rows": lambda t: t[:0]}
UNREADABLE = WITHOUT_BYTES | {
    name: MISFITS[name] for name in ("sparse", "nested", "jagged", "other sign", "list", "none")
}


@pytest.mark.parametrize("make", READABLE.values(), ids=READABLE)
def test_tensors_with_bytes(make):
    assert why_unreadable(make(MATRIX)) is None


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_tensors_without(make):
    assert why_unreadable(make(MATRIX))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("fake", "is a FakeTensor without memory of its own"),
        ("freed", "reads more than the 0 bytes of its storage"),
        ("cut short", "reads more than the 95 bytes of its storage"),
        ("view of what was freed", "reads more than the 0 bytes of its storage"),
        ("wrapper", "is a Wrapper without memory of its own"),
        ("never stored", "has no memory"),
        ("nested", "is a nested tensor; send each"),
        ("other sign", r"send tensor\.resolve_neg\(\)"),
    ],
)
def test_what_is_said(kind, said):
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(why_unreadable(UNREADABLE[kind](MATRIX)))


def test_a_tensor_inside_a_transform_has_none():
    said = []
    torch.func.vmap(lambda row: (said.append(why_unreadable(row)), row)[1])(MATRIX)
    assert said[0].startswith("has no memory, like tensors inside a torch.func transform")


def test_a_view_may_end_with_its_storage_and_not_a_byte_later():
    flat = torch.zeros(12)
    first, last = (flat.as_strided((3, 2), (4, 1), start) for start in (1, 2))
    assert why_unreadable(first) is None and why_unreadable(last) is None
    flat.untyped_storage().resize_(47)
    assert why_unreadable(first) is None and why_unreadable(last)


# What is recognised without being looked at one by one.


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_nothing_without_bytes_is_recognised(make):
    tensors = [MATRIX.clone(), MATRIX.clone()]
    guard = LayoutGuard(["a", "b"], tensors)
    assert guard.holds(["a", "b"], [tensors[0], MATRIX.clone()])
    assert not guard.holds(["a", "b"], [tensors[0], make(MATRIX)])
    assert guard.holds(["a", "b"], tensors)


def test_memory_that_went_since_is_missed():
    tensors = [MATRIX.clone(), MATRIX.clone()]
    guard = LayoutGuard(["a", "b"], tensors)
    assert guard.holds(["a", "b"], tensors)
    tensors[1].untyped_storage().resize_(MATRIX.nbytes - 2)
    assert not guard.holds(["a", "b"], tensors)
    assert not guard.holds(["a", "b"], tensors), "and stays missed"


def test_parameters_and_subclasses_are_recognised():
    tensors = [nn.Parameter(MATRIX.clone()), MATRIX.clone().as_subclass(Own)]
    assert LayoutGuard(["a", "b"], tensors).holds(["a", "b"], tensors)
