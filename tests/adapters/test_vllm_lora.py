"""How the matrices of vLLM's adapters are found in fake managers. Real ones: `tests/vllm/test_lora.py`."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.compat import keep_adapter, peft_modules
from fp8refit_vllm.lora import WorkerAdapters, _Note, watch_loads
from safetensors.torch import save_file

from fp8refit.tracing.loras import Loras

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
        request = SimpleNamespace(lora_name=name, lora_int_id=1, lora_path="files")
        scales = dict.fromkeys(modules, 1.5)
        found._fp8refit_note = _Note(name=name, request=request, modules={"here": "there"}, scales=scales)
    return found


def read_loras(worker):
    return Loras.of(WorkerAdapters(worker))


def activate(worker):
    WorkerAdapters(worker).activate()


def deactivate(worker):
    WorkerAdapters(worker).deactivate()


def worker_of(manager):
    loader = SimpleNamespace(_adapter_manager=manager, _fp8refit_kept={})
    return SimpleNamespace(model_runner=SimpleNamespace(lora_manager=loader))


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
    found.write_copies(WorkerAdapters(worker), {slot.name for slot in own})
    assert worker.model_runner.lora_manager._fp8refit_kept == {1: (("one", "files"), one)}
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


def test_an_adapter_that_cannot_be_read_is_refused_alone():
    class Odd(Layer):
        def set_lora(self, index, lora_a, lora_b):
            raise RuntimeError("no such luck")

    manager = Manager(lora("one", "odd"), lora("two", "plain"), odd=Odd(), plain=None)
    manager.lora_index_to_id = [1, 2]
    found = read_loras(worker_of(manager))
    assert "cannot be read (RuntimeError('no such luck'))" in found.adapters["one"].refusal
    assert {slot.name.split(".")[1] for slot in found.slots} == {"two"} and not found.adapters["two"].refusal


def test_an_adapter_without_a_matrix_on_a_rank_is_none_of_its_slots():
    manager = Manager(lora("one", "elsewhere"), here=None)
    manager.lora_index_to_id[0] = 1
    found = read_loras(worker_of(manager))
    assert found.slots == [] and not found.adapters["one"].refusal


def test_a_name_with_several_ids_is_refused():
    activate(worker := worker_of(Manager(lora("one", "here"), lora("one", "here"), here=None)))
    found = read_loras(worker)
    assert "several ids; remove all but one" in found.adapters["one"].refusal and found.slots == []


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


def test_whatever_has_a_slot_is_known():
    loras = lora("one", "here"), lora("two", "here", is_noted=False)
    worker = worker_of(manager := Manager(*loras, here=None))
    activate(worker)
    assert read_loras(worker).seated == list(loras)
    manager.lora_index_to_id[1] = None
    assert read_loras(worker).seated == [loras[0], None]


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

    def remove_adapter(self, number):
        return number


@pytest.fixture
def names(monkeypatch):
    def parse(name, mapper=None):
        if "vision" in name:
            raise ValueError("not loaded")
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        return (mapper(module) if mapper else module), True

    utils = SimpleNamespace(parse_fine_tuned_lora_name=parse)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.utils", utils)


def request(path, **fields):
    return SimpleNamespace(**{"lora_name": "a", "lora_int_id": 1, "lora_path": str(path)} | fields)


@pytest.fixture
def loader(names):
    return watched(Loader(None))


def watched(loader):
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=loader))
    watch_loads(worker)
    watch_loads(worker)
    return loader


def keep(loader, refitted):
    keep_adapter(SimpleNamespace(model_runner=SimpleNamespace(lora_manager=loader)), request("files"), refitted)


def test_what_was_refitted_is_not_loaded_again(loader):
    refitted = loader._load_adapter(request("files"))
    keep(loader, refitted)
    assert loader._load_adapter(request("files")) is loader._load_adapter(request("files")) is refitted
    assert loader._load_adapter(request("files", lora_int_id=2)) is not refitted


@pytest.mark.parametrize("fields", [{"lora_path": "others"}, {"load_inplace": True}, {"lora_name": "b"}], ids=str)
def test_files_that_are_asked_for_are_loaded(fields, loader, caplog):
    refitted = loader._load_adapter(request("files"))
    keep(loader, refitted)
    assert loader._load_adapter(request("files", **{"load_inplace": False} | fields)) is not refitted
    assert "what it was refitted to is dropped" in caplog.text
    assert loader._load_adapter(request("files")) is not refitted


def test_an_adapter_that_was_removed_is_loaded_again(loader):
    refitted = loader._load_adapter(request("files"))
    keep(loader, refitted)
    assert loader.remove_adapter(1) == 1
    assert loader._load_adapter(request("files")) is not refitted


def test_vllm_loads_what_cannot_be_noted(names, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_text("broken")
    loaded = watched(Loader(to_language_model))._load_adapter(request(tmp_path))
    assert not hasattr(loaded, "_fp8refit_note")


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
    loaded = watched(Loader(mapper))._load_adapter(request(tmp_path))
    assert loaded._fp8refit_note.name == "a"
    assert loaded._fp8refit_note.modules == {"language_model.model.q_proj": prefixed}
    assert loaded._fp8refit_note.scales == {"language_model.model.q_proj": 1.5}


def test_names_are_vllms_if_they_do_not_differ_or_there_is_no_file(names, tmp_path):
    asked = request(tmp_path)
    assert peft_modules(Loader(None), asked, lora()) == peft_modules(Loader(to_language_model), asked, lora()) == {}
