"""Live bytes that two checkpoint tensors would be written to."""

import pytest
import torch
from torch import Tensor

from fp8refit import UnsupportedEngineError
from fp8refit.config import RefitConfig
from fp8refit.live.formats import BlockFormat
from fp8refit.live.overlaps import shared_bytes
from fp8refit.live.slots import Slot
from fp8refit.sources.source import as_source
from tests.fakes import FakeModel, live_bytes, make_policy, make_target


def slot(name: str, weight: Tensor, scale: Tensor | None = None) -> Slot:
    block_format = None if scale is None else BlockFormat()
    return Slot(name=name, full_shape=tuple(weight.shape), weight=weight, scale=scale, format=block_format)


BASE = torch.zeros(256, 256)
APART = {
    "rows": (BASE[:128], BASE[128:]),
    "columns": (BASE[:, :128], BASE[:, 128:]),
    "every other row": (BASE[::2], BASE[1::2]),
    "every other column, transposed": (BASE[:, ::2], BASE.t()[1::2]),
    "nothing": (BASE[:0], BASE),
    "other memory": (BASE, torch.zeros(256, 256)),
}
SHARING = {
    "all": (BASE, BASE),
    "a row": (BASE[:129], BASE[128:]),
    "a column": (BASE[:, :129], BASE[:, 128:]),
    "transposed": (BASE, BASE.t()),
    "another dtype": (BASE[:1], BASE[0, 8:16].view(torch.uint8)),
    "one element": (BASE[::2, ::2], BASE[4:5, 4:5]),
}


@pytest.mark.parametrize("case", APART)
def test_tensors_beside_each_other_share_nothing(case):
    first, second = APART[case]
    assert shared_bytes([slot("a", first), slot("b", second)]) == []
    assert shared_bytes([slot("a", torch.zeros(2), first), slot("b", second)]) == []


@pytest.mark.parametrize("case", SHARING)
def test_tensors_that_share_a_byte_are_named_once(case):
    first, second = SHARING[case]
    (refusal,) = shared_bytes([slot("a", first), slot("b", second)])
    assert str(refusal).startswith(
        "a: its weight shares memory with the weight of b, and both would be written there. Tie"
    )
    (refusal,) = shared_bytes([slot("a", torch.zeros(2), first), slot("b", torch.zeros(2), second)])
    assert str(refusal).startswith("a: its scale shares memory with the scale of b")
    (refusal,) = shared_bytes([slot("b", second), slot("a", torch.zeros(2), first)])
    assert str(refusal).startswith("b: its weight shares memory with the scale of a")


def test_a_slot_may_share_with_itself_and_many_slots_are_looked_at_together():
    memory = torch.zeros(1 << 16)
    slots = [slot(str(index), memory[8 * index : 8 * index + 8]) for index in range(1 << 13)]
    assert shared_bytes([slot("a", BASE, BASE)]) == shared_bytes(slots) == []
    found = shared_bytes([*slots, slot("x", memory[12:20])])
    assert [refusal.module for refusal in found] == ["1", "2"]


@pytest.mark.parametrize("is_late", [False, True])
def test_an_engine_whose_slots_share_bytes_is_not_written(is_late):
    model = FakeModel()
    target, policy = make_target(model), make_policy(model, seed=1)
    if is_late:
        target.prepare(as_source(policy), RefitConfig())
    layer = model.layers[0]
    layer.down = torch.nn.Parameter(layer.o.data, requires_grad=False)
    before = live_bytes(model)
    with pytest.raises(UnsupportedEngineError, match=r"nothing was written") as raised:
        target.prepare(as_source(policy), RefitConfig())
    (reason,) = raised.value.reasons
    assert "o_proj.weight: its weight shares memory with the weight of model.layers.0.mlp.down_proj.weight" in reason
    assert live_bytes(model) == before and not target.is_dirty
