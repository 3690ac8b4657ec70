import pytest
import torch

from fp8refit.live.fingerprint import _COLUMNS, checksum, fingerprint
from fp8refit.live.formats import NVFP4
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import Inventory, Slot
from tests.fakes import FakeModel


@pytest.fixture
def model():
    return FakeModel()


def fingerprint_of(model) -> str:
    return fingerprint(model.read_inventory())


def test_every_byte_of_every_weight_counts(model):
    before = fingerprint_of(model)
    seen = {before}
    inventory = model.read_inventory()
    tensors = [tensor for slot in inventory.slots for tensor in (slot.weight, slot.scale) if tensor is not None]
    for tensor in tensors:
        last_row = tensor[-1] if tensor.ndim > 1 else tensor
        last_row.view(torch.uint8)[-1] += 1
        seen.add(fingerprint_of(model))
        last_row.view(torch.uint8)[-1] -= 1
    assert fingerprint_of(model) == before
    assert len(seen) == len(tensors) + 1


def test_a_scale_of_the_whole_weight_counts():
    """Twice a policy has the same codes and scales of blocks."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.uint8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.ones(4, 1).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(torch.tensor(1.0))
    held = {
        "weight": layer.weight.data,
        "scale": layer.weight_scale.data,
        "global_scale": layer.weight_global_scale.data,
    }
    slots = (Slot(name="w", full_shape=(4, 16), format=NVFP4, **held),)
    before = fingerprint(Inventory(slots=slots, live=live_tensors(layer)))
    layer.weight_global_scale.data.mul_(2)
    assert fingerprint(Inventory(slots=slots, live=live_tensors(layer))) != before


def test_tensors_that_no_refit_writes_do_not_count(model):
    before = fingerprint_of(model)
    model.register_buffer("counter", torch.zeros(3))
    assert fingerprint_of(model) == before


def test_an_engine_without_slots_has_one_too():
    assert len(fingerprint(Inventory(slots=(), live=live_tensors(torch.nn.Linear(2, 2))))) == 64


SIZES = (1, 7, 299, 4 * _COLUMNS, 3 * 4 * _COLUMNS + 13)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_that_change_or_change_places_change_it(size):
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, expected = {int(checksum(raw))}, 1
    for left in {0, size // 2, size - 1, max(0, size - 14)}:
        changed = raw.clone()
        changed[left] += 1
        found.add(int(checksum(changed)))
        expected += 1
    for left, right in ((0, 1), (0, size - 1), (4, 8), (0, 4 * _COLUMNS), (5, 4 * _COLUMNS + 16)):
        if right < size and raw[left] != raw[right]:
            changed = raw.clone()
            changed[[left, right]] = raw[[right, left]]
            found.add(int(checksum(changed)))
            expected += 1
    assert len(found) == expected


def test_rows_that_change_places_change_it():
    rows = torch.randn(6, 2 * _COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert int(checksum(rows[[1, 0, 2, 3, 4, 5]])) != int(checksum(rows)) == int(checksum(rows.clone()))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_where_bytes_lie_does_not_change_it(offset):
    raw = torch.randint(256, (5 * 4 * _COLUMNS + 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    view = raw[offset:]
    assert int(checksum(view)) == int(checksum(view.clone()))
    matrix = torch.arange(70_000.0).view(7, 10_000)
    assert int(checksum(matrix.t())) == int(checksum(matrix.t().contiguous())) != int(checksum(matrix))


def test_no_values_are_its_business():
    """NaN is a value like others, and the two zeros are two."""
    values = torch.tensor([torch.nan, 0.0, 1.0])
    assert int(checksum(values)) == int(checksum(values.clone())) != int(checksum(torch.tensor([torch.nan, -0.0, 1.0])))
    assert int(checksum(torch.empty(0))) == 0
