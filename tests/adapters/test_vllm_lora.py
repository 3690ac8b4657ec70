"""How the matrices of vLLM's adapters are found in fake managers. Real ones: `tests/vllm/test_lora.py`."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.compat import peft_modules
from fp8refit_vllm.lora import _Note, activate, deactivate, read_loras, watch_loads
from safetensors.torch import save_file

RANK, MAX_RANK, INPUTS, ROWS = 2, 4, 8, 6


class Layer:
    """A layer of one matrix on one of two ranks, which holds half of the rows in two pieces, as a fused layer does."""

    def __init__(self, *, transposes=False, computes=False):
        self.lora_a_stacked = (torch.zeros(2, 1, MAX_RANK, INPUTS),)
        self.lora_b_stacked = (
            torch.zeros(2, 1, ROWS // 2 if not transposes else MAX_RANK, MAX_RANK if not transposes else ROWS),
        )
        self._transposes, self._computes = transposes, computes

    def set_lora(self, index, lora_a, lora_b):
        self.lora_a_stacked[0][index] = 0
        self.lora_b_stacked[0][index] = 0
        self.lora_a_stacked[0][index, 0, :RANK].copy_(lora_a * 2 if self._computes else lora_a)
        if self._transposes:
            self.lora_b_stacked[0][index, 0, :RANK].copy_(lora_b.T)
        else:
            own = torch.cat([lora_b[1:2], lora_b[3:5]])
            self.lora_b_stacked[0][index, 0, :, :RANK].copy_(own)


class Manager:
    """Two slots, and any number of adapters."""

    def __init__(self, *loras, **layers):
        self.modules = {name: layer or Layer() for name, layer in layers.items()}
        self.packed_modules = {}
        self.lora_index_to_id = [None, None]
        self._loras, self._last_mapping = dict(enumerate(loras, 1)), "mapping"

    def list_adapters(self):
        return dict(self._loras)

    def _get_lora_layer_weights(self, lora, name):
        return lora.loras.get(name)

    def activate_adapter(self, number):
        index = self.lora_index_to_id.index(None)
        self.lora_index_to_id[index] = number
        for name, weights in self._loras[number].loras.items():
            self.modules[name].set_lora(index, weights.lora_a, weights.lora_b)

    def deactivate_adapter(self, number):
        self.lora_index_to_id[self.lora_index_to_id.index(number)] = None


def lora(name="one", *modules, is_noted=True):
    def weights():
        return SimpleNamespace(lora_a=torch.randn(RANK, INPUTS), lora_b=torch.randn(ROWS, RANK), scaling=1.5)

    found = SimpleNamespace(loras={module: weights() for module in modules})
    if is_noted:
        found._fp8refit_note = _Note(name=name, modules={"here": "there"}, scales=dict.fromkeys(modules, 1.5))
    return found


def worker_of(manager):
    return SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager)))


def test_slots_are_the_copies_that_set_lora_makes():
    one = lora("one", "here")
    worker = worker_of(manager := Manager(lora("other", "here"), one, here=None))
    activate(worker)
    before = manager.modules["here"].lora_b_stacked[0].clone()
    found = read_loras(worker)
    own = [slot for slot in found.slots if slot.name.startswith("lora.one.")]
    assert torch.equal(manager.modules["here"].lora_b_stacked[0], before)
    assert [(slot.name, slot.full_shape, slot.origin, tuple(slot.weight.shape)) for slot in own] == [
        ("lora.one.there.lora_A.weight", (RANK, INPUTS), (0, 0), (RANK, INPUTS)),
        ("lora.one.there.lora_B.weight", (ROWS, RANK), (1, 0), (1, RANK)),
        ("lora.one.there.lora_B.weight", (ROWS, RANK), (3, 0), (2, RANK)),
    ]
    assert found.adapters["one"].scales == {"there.lora_B.weight": 1.5}
    for slot in own:
        slot.weight.fill_(7)
    found.write_copies({slot.name for slot in own})
    deactivate(worker)
    activate(worker)
    expected = torch.tensor([[7.0, 7.0, 0.0, 0.0]] * 3)
    assert torch.equal(manager.modules["here"].lora_b_stacked[0][1, 0], expected)
    assert manager._last_mapping is None
    assert (one.loras["here"].lora_b == 7).all(dim=1).tolist() == [False, True, False, True, True, False]


@pytest.mark.parametrize("layer", [Layer(transposes=True), Layer(computes=True)], ids=["transposed", "computed"])
def test_an_adapter_that_is_held_otherwise_is_refused(layer):
    worker = worker_of(Manager(lora("one", "here"), lora("two", "plain"), here=layer, plain=None))
    activate(worker)
    found = read_loras(worker)
    assert "is held otherwise" in found.adapters["one"].refusal and "there.lora_" in found.adapters["one"].refusal
    assert {slot.name.split(".")[1] for slot in found.slots} == {"two"} and not found.adapters["two"].refusal


def test_an_adapter_of_modules_under_other_names_than_it_was_loaded_with_is_refused():
    one = lora("one", "here")
    one._fp8refit_note.scales.clear()
    activate(worker := worker_of(Manager(one, here=None)))
    found = read_loras(worker)
    assert "there.lora_B.weight" in found.adapters["one"].refusal and found.slots == []


@pytest.mark.parametrize("name", ["module.a", "base_layer"])
def test_an_adapter_that_is_named_as_a_wrapper_is_refused(name):
    worker = worker_of(Manager(lora(name, "here"), here=None))
    activate(worker)
    assert "load it under another" in read_loras(worker).adapters[name].refusal


def test_one_without_a_slot_is_refused_and_one_that_was_not_noted_is_unknown():
    loras = lora("one", "here"), lora("two", "here", is_noted=False), lora("three", "here")
    worker = worker_of(Manager(*loras, here=None))
    activate(worker)
    found = read_loras(worker)
    assert found.adapters.keys() == {"one", "three"}
    assert "add it again" in found.adapters["three"].refusal


def test_whatever_has_a_slot_is_watched():
    worker = worker_of(manager := Manager(lora("one", "here"), lora("two", "here"), here=None))
    activate(worker)
    live = read_loras(worker).live
    assert [each.has_moved for each in live] == [False, False]
    manager.lora_index_to_id[1] = None
    assert [each.has_moved for each in live] == [False, True]
    manager.lora_index_to_id[1] = 2
    manager._loras[2] = lora("two", "here")
    assert [each.has_moved for each in live] == [False, True]


def test_an_engine_without_adapters_has_none():
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    watch_loads(worker)
    activate(worker)
    deactivate(worker)
    assert read_loras(worker).slots == []


class Loader:
    """vLLM's loader of adapters, for a model that has other names of modules than its checkpoint."""

    def __init__(self, mapper):
        self._adapter_manager = SimpleNamespace(model=SimpleNamespace(hf_to_vllm_mapper=mapper))

    def _load_adapter(self, request):
        return lora("unnoted", "language_model.model.q_proj", is_noted=False)


@pytest.fixture
def names(monkeypatch):
    def parse(name, mapper=None):
        if "vision" in name:
            raise ValueError("not loaded")
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        return (mapper(module) if mapper else module), True

    utils = SimpleNamespace(get_adapter_absolute_path=str, parse_fine_tuned_lora_name=parse)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.utils", utils)


def to_language_model(name):
    return f"language_{name}"


@pytest.mark.parametrize("narrowed", [None, "get_rename_mapper", "get_unstacked_mapper"])
def test_names_of_modules_are_those_of_the_files(narrowed, names, tmp_path):
    prefixed = "model.model.q_proj"
    stored = {
        f"base_model.model.{name}.lora_A.weight": torch.zeros(1) for name in (prefixed, "model.vision", "model.other")
    }
    save_file(stored, tmp_path / "adapter_model.safetensors")
    mapper = to_language_model if narrowed is None else SimpleNamespace(**{narrowed: lambda: to_language_model})
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=Loader(mapper)))
    watch_loads(worker)
    watch_loads(worker)
    loaded = worker.model_runner.lora_manager._load_adapter(SimpleNamespace(lora_name="a", lora_path=tmp_path))
    assert loaded._fp8refit_note.name == "a"
    assert loaded._fp8refit_note.modules == {"language_model.model.q_proj": prefixed}
    assert loaded._fp8refit_note.scales == {"language_model.model.q_proj": 1.5}


def test_names_are_vllms_if_they_do_not_differ_or_there_is_no_file(names, tmp_path):
    request = SimpleNamespace(lora_path=tmp_path)
    assert peft_modules(Loader(None), request, lora()) == peft_modules(Loader(to_language_model), request, lora()) == {}
