import pytest
import torch

from fp8refit.live.fingerprint import _CHUNK_WORDS, _checksum, fingerprint
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import Inventory
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


def test_tensors_that_no_refit_writes_do_not_count(model):
    before = fingerprint_of(model)
    model.register_buffer("counter", torch.zeros(3))
    assert fingerprint_of(model) == before


def test_an_engine_without_slots_has_one_too():
    assert len(fingerprint(Inventory(slots=(), live=live_tensors(torch.nn.Linear(2, 2))))) == 64


def test_words_that_change_places_change_it():
    words = torch.arange(1, 300, dtype=torch.int32)
    found = {int(_checksum(words))}
    for left, right in ((0, 1), (0, 298), (100, 200)):
        swapped = words.clone()
        swapped[[left, right]] = words[[right, left]]
        found.add(int(_checksum(swapped)))
    assert len(found) == 4


def test_chunks_are_no_matter_of_luck(monkeypatch):
    words = torch.randint(-(2**31), 2**31, (1000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    assert int(_checksum(words.view(torch.uint8)[:-3])) != int(_checksum(words))
    monkeypatch.setattr("fp8refit.live.fingerprint._CHUNK_WORDS", 100)
    blocks = words.view(10, 100)
    swapped = torch.cat([blocks[1:2], blocks[:1], blocks[2:]])
    assert int(_checksum(swapped)) != int(_checksum(words))
    assert _CHUNK_WORDS * 4 == 64 << 20
