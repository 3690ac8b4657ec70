"""How the matrices of SGLang's adapters are found in fake pools. Real ones: `tests/sglang/test_lora_stubbed_kernels.py`."""

from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang import lora as own
from fp8refit_sglang.lora import PooledAdapters, note_load
from torch import nn

from fp8refit.tracing.loras import Loras

RANK, MAX_RANK, INPUTS, ROWS = 2, 4, 8, 6
PREFIX = "base_model.model.model.layers.0.self_attn"
EMPTY = object()


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(own, "empty_slot", lambda: EMPTY)


class Adapter(nn.Module):
    """One layer of queries, keys and values, of which an adapter may lack keys; joined as SGLang joins them."""

    def __init__(self, uid, weights):
        super().__init__()
        layer = nn.Module()
        layer.weights = dict(weights)
        self.layers, self.uid, self.scaling = nn.ModuleList([layer]), uid, 1.5
        self.embedding_layers = {}
        note_load(Adapter._normalize_weights, self)

    def _normalize_weights(self):
        for layer in self.layers:
            for name in [name for name in layer.weights if "q_proj" in name]:
                keys, values = (name.replace("q_proj", part) for part in ("k_proj", "v_proj"))
                found = [layer.weights.pop(each, None) for each in (name, keys, values)]
                found[1] = torch.zeros_like(found[2]) if found[1] is None else found[1]
                layer.weights[name.replace("q_proj", "qkv_proj")] = self.join(found)
            for name in [name for name in layer.weights if "fused" in name and "lora_A" in name]:
                layer.weights[name] = layer.weights[name].repeat(2, 1)

    def join(self, found):
        return torch.cat(found, 0)


class Pool:
    """Slots of which a rank fills the second half of each part's rows."""

    def __init__(self, num_slots=2):
        self.A_buffer = {"qkv_proj": [torch.zeros(num_slots, 3 * MAX_RANK, INPUTS, dtype=torch.bfloat16)]}
        self.B_buffer = {"qkv_proj": [torch.zeros(num_slots, 3 * ROWS // 2, MAX_RANK, dtype=torch.bfloat16)]}
        self.uid_to_buffer_id, self.buffer_id_to_uid = {}, [EMPTY] * num_slots
        self.pin_memory_available = True
        self.eviction_policy = SimpleNamespace(remove=lambda uid: None)

    def load_lora_weight_to_buffer(self, uid, index, adapter, modules, embedding, head):
        for name, matrix in adapter.layers[0].weights.items():
            assert not self.pin_memory_available
            if "lora_A" in name:
                into = self.A_buffer["qkv_proj"][0][index, : len(matrix)]
            else:
                parts = matrix.split(ROWS)
                matrix = torch.concat([part[ROWS // 2 :] for part in parts])
                into = self.B_buffer["qkv_proj"][0][index, :, :RANK]
            into.copy_(matrix.to(torch.bfloat16))


class Manager:
    embed_tokens_module = lm_head_module = None
    lora_modules = ()

    def __init__(self, **adapters):
        self.loras = adapters
        self.lora_refs = {uid: SimpleNamespace(lora_id=uid, lora_name=f"name of {uid}") for uid in adapters}
        self.memory_pool = Pool()

    def fetch_new_loras(self, uids):
        for uid in uids:
            pool = self.memory_pool
            index = pool.buffer_id_to_uid.index(EMPTY)
            pool.buffer_id_to_uid[index], pool.uid_to_buffer_id[uid] = uid, index


def pooled(manager, draft_algorithm="", **arguments):
    itself = SimpleNamespace(server_args=SimpleNamespace(**arguments))
    return PooledAdapters(SimpleNamespace(lora_manager=manager, itself=itself, draft_algorithm=draft_algorithm))


def matrices(*parts):
    return {
        f"{PREFIX}.{part}.lora_{side}.weight": torch.randn(shape)
        for part in parts
        for side, shape in (("A", (RANK, INPUTS)), ("B", (ROWS, RANK)))
    }


@pytest.mark.parametrize("parts", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")], ids=len)
def test_slots_are_parts_of_what_sglang_has_joined(parts):
    files = matrices(*parts)
    manager = Manager(other=Adapter("other", matrices("q_proj", "v_proj")), one=Adapter("one", files))
    memory = pooled(manager)
    memory.activate()
    found = Loras.of(memory)
    adapter = found.adapters["name of one"]
    assert not adapter.refusal
    short = {name.removeprefix("base_model.model."): matrix for name, matrix in files.items()}
    assert adapter.shapes == {name: tuple(matrix.shape) for name, matrix in short.items()}
    assert (adapter.factor, adapter.dtype) == (1.5, "bfloat16") and set(adapter.scales.values()) == {1.0}
    own_slots = [slot for slot in found.slots if slot.name.startswith("lora.name of one.")]
    assert {(slot.name, slot.origin, tuple(slot.weight.shape)) for slot in own_slots} == {
        (f"lora.name of one.{name}", (0, 0), (RANK, INPUTS))
        if ".lora_A." in name
        else (f"lora.name of one.{name}", (ROWS // 2, 0), (ROWS // 2, RANK))
        for name in short
    }
    for number, slot in enumerate(own_slots):
        slot.weight.fill_(number + 1)
    found.write_copies(memory, {slot.name for slot in own_slots})
    joined, pool = manager.loras["one"].layers[0].weights, manager.memory_pool
    held = pool.A_buffer["qkv_proj"][0][pool.uid_to_buffer_id["one"], : 3 * RANK]
    assert torch.equal(joined[f"{PREFIX}.qkv_proj.lora_A.weight"], held.float())


def test_one_matrix_may_be_there_several_times():
    manager = Manager(one=Adapter("one", {f"{PREFIX}.fused.lora_A.weight": torch.randn(RANK, INPUTS)}))
    memory = pooled(manager)
    memory.activate()
    found = Loras.of(memory)
    assert [slot.name for slot in found.slots] == [f"lora.name of one.{PREFIX[17:]}.fused.lora_A.weight"] * 2
    for slot in found.slots:
        slot.weight.fill_(3)
    found.write_copies(memory, {slot.name for slot in found.slots})
    assert (manager.loras["one"].layers[0].weights[f"{PREFIX}.fused.lora_A.weight"] == 3).all()


@pytest.mark.parametrize("how", ["computed", "columns"])
def test_what_is_joined_otherwise_is_refused(how):
    class Odd(Adapter):
        def join(self, found):
            return torch.cat(found, 0) * 2 if how == "computed" else torch.cat([each.T for each in found], 1)

    memory = pooled(Manager(one=Odd("one", matrices("q_proj", "v_proj"))))
    memory.activate()
    found = Loras.of(memory)
    assert "in a way that is not known" in found.adapters["name of one"].refusal and found.slots == []


def test_an_adapter_of_the_embedding_is_refused():
    adapter = Adapter("one", matrices("q_proj", "v_proj"))
    adapter.embedding_layers = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(RANK, INPUTS)}
    memory = pooled(Manager(one=adapter))
    memory.activate()
    found = Loras.of(memory)
    assert "is held otherwise" in found.adapters["name of one"].refusal and found.slots == []


def test_an_adapter_that_sglang_may_load_again_is_refused():
    memory = pooled(Manager(one=Adapter("one", matrices("q_proj", "v_proj"))), max_loaded_loras=4)
    memory.activate()
    assert "boot without max_loaded_loras" in Loras.of(memory).adapters["name of one"].refusal


def test_slots_are_taken_and_given_back():
    adapters = {uid: Adapter(uid, matrices("q_proj", "v_proj")) for uid in ("one", "two", "three")}
    memory = pooled(manager := Manager(**adapters))
    memory.activate()
    assert memory.seated() == [adapters["one"], adapters["two"]]
    assert "has no slot now" in Loras.of(memory).adapters["name of three"].refusal
    manager.memory_pool.uid_to_buffer_id[None] = 5
    memory.deactivate()
    assert memory.seated() == [None, None] and manager.memory_pool.uid_to_buffer_id == {None: 5}


def test_an_engine_without_adapters_has_none():
    memory = pooled(None)
    memory.activate()
    memory.deactivate()
    assert Loras.of(memory).slots == [] and memory.seated() == []


def test_one_that_was_not_noted_is_unknown():
    adapter = Adapter("one", matrices("q_proj", "v_proj"))
    del adapter._fp8refit_note
    assert pooled(Manager(one=adapter)).loaded() == []


def test_a_refit_never_writes_into_what_a_trainer_has_loaded_as_an_adapter():
    """`load_lora_adapter_from_tensors` shares the memory of CPU tensors."""
    name = f"{PREFIX}.o_proj.lora_A.weight"
    trained, read = torch.randn(RANK, INPUTS).share_memory_(), torch.randn(RANK, INPUTS)
    given = Adapter("one", {name: trained}).layers[0].weights[name]
    assert given is not trained and torch.equal(given, trained)
    assert Adapter("one", {name: read}).layers[0].weights[name] is read


def test_an_adapter_that_does_not_fit_leaves_slots_to_others():
    class Picky(Manager):
        def fetch_new_loras(self, uids):
            assert "bad" not in uids
            super().fetch_new_loras(uids)

    parts = {uid: Adapter(uid, matrices("q_proj", "v_proj")) for uid in ("bad", "good")}
    memory = pooled(Picky(**parts))
    memory.activate()
    found = Loras.of(memory)
    assert not found.adapters["name of good"].refusal
    assert "has no slot now" in found.adapters["name of bad"].refusal


def test_the_adapter_that_drafts_keeps_its_slot():
    manager = Manager(one=Adapter("one", matrices("q_proj", "v_proj")))
    memory = pooled(manager, draft_algorithm="UNO")
    memory.activate()
    memory.deactivate()
    assert memory.seated()[0] is manager.loras["one"]


def test_an_adapter_in_a_pipeline_is_refused():
    memory = pooled(Manager(one=Adapter("one", matrices("q_proj", "v_proj"))), pp_size=2)
    memory.activate()
    assert "spread over the stages of a pipeline" in Loras.of(memory).adapters["name of one"].refusal
