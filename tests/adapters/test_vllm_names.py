"""Checkpoint names found by turning a model's own mapping around. `Mapper` applies its rules in vLLM's order."""

import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from fp8refit_vllm.layout import read_inventory
from fp8refit_vllm.names import VllmNames
from torch import nn

from tests.adapters.test_vllm_layout import BlockLinear


@dataclass
class Mapper:
    """What vLLM's WeightsMapper does with a name, without what loads."""

    orig_to_new_regex: dict = field(default_factory=dict)
    orig_to_new_substr: dict = field(default_factory=dict)
    orig_to_new_stacked: dict = field(default_factory=dict)
    orig_to_new_prefix: dict = field(default_factory=dict)
    orig_to_new_suffix: dict = field(default_factory=dict)

    def _map_name(self, name):
        for pattern, new in self.orig_to_new_regex.items():
            if pattern.search(name) and new is None:
                return None
            name = pattern.sub(new, name) if new is not None else name
        for rules, fits in (
            (self.orig_to_new_substr, str.__contains__),
            (self.orig_to_new_prefix, str.startswith),
            (self.orig_to_new_suffix, str.endswith),
        ):
            for old, new in rules.items():
                if fits(name, old) and new is None:
                    return None
                if fits(name, old):
                    name = new.join(name.rsplit(old, 1)) if fits is str.endswith else name.replace(old, new, 1)
        return name


GEMMA3 = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
STACKED = {".q_proj": (".qkv_proj", "q")}


def names_of(live: str, **mappers: Mapper) -> tuple[str, ...]:
    """Checkpoint names of `live`; `mappers` by the module that carries them, the model itself as `root`."""
    model = nn.Module()
    model.language_model = nn.Module()
    model.language_model.model = nn.Module()
    for prefix, mapper in mappers.items():
        module = model if prefix == "root" else model.get_submodule(prefix.replace("__", "."))
        module.hf_to_vllm_mapper = mapper
    return VllmNames(model)(live)


def test_a_model_without_a_mapping_calls_tensors_as_its_checkpoint_does():
    assert names_of("model.norm.weight") == ("model.norm.weight",)


@pytest.mark.parametrize(
    ("rules", "live", "names"),
    [
        (
            {"orig_to_new_prefix": GEMMA3},
            "language_model.model.layers.0.mlp.up_proj.weight",
            ("model.language_model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"),
        ),
        (
            {"orig_to_new_prefix": {"model.text.": "text.model.", "text.model": "text"}},
            "text.norm.weight",
            ("model.text.norm.weight", "text.model.norm.weight", "text.norm.weight"),
        ),
        ({"orig_to_new_prefix": {"": "model."}}, "model.norm.weight", ("norm.weight",)),
        ({"orig_to_new_prefix": {"model.": ""}}, "norm.weight", ("model.norm.weight", "norm.weight")),
        ({"orig_to_new_substr": {".attention.": ".self_attn."}}, "a.self_attn.b", ("a.attention.b", "a.self_attn.b")),
        ({"orig_to_new_suffix": {".gamma": ".weight"}}, "norm.weight", ("norm.gamma", "norm.weight")),
        (
            {"orig_to_new_prefix": {"old.": "new."}, "orig_to_new_substr": {".ff.": ".mlp."}},
            "new.0.mlp.up.weight",
            ("old.0.ff.up.weight", "new.0.ff.up.weight", "old.0.mlp.up.weight", "new.0.mlp.up.weight"),
        ),
        (
            {"orig_to_new_regex": {re.compile(r"^transformer\.(.+)"): r"model.\1"}},
            "model.h.0.weight",
            ("model.h.0.weight", "transformer.h.0.weight"),
        ),
        ({"orig_to_new_prefix": {"lm_head.": None}}, "norm.weight", ("norm.weight",)),
        ({"orig_to_new_prefix": {"mtp.": None}}, "mtp.weight", ()),
        ({"orig_to_new_regex": {re.compile(r"layers\.(\d+)\.w(\d)"): r"l\2.\1"}}, "l1.0", ("l1.0",)),
        ({"orig_to_new_regex": {re.compile(r"^w(\d+)$"): r"w\1\1"}}, "w1", ()),
        ({"orig_to_new_stacked": STACKED}, "layers.0.q_proj.weight", ("layers.0.q_proj.weight",)),
    ],
)
def test_every_name_that_the_mapping_leads_from_counts_and_no_other(rules, live, names):
    assert names_of(live, root=Mapper(**rules)) == names


def test_mappings_of_models_within_a_model_are_turned_around_first():
    inner, outer = Mapper(orig_to_new_prefix={"layers.": "blocks."}), Mapper(orig_to_new_prefix=GEMMA3)
    names = names_of("language_model.model.blocks.0.weight", root=outer, language_model__model=inner)
    assert names[0] == "model.language_model.layers.0.weight"


def test_a_mapping_that_a_wrapper_shows_again_is_turned_around_once():
    mapper = Mapper(orig_to_new_prefix={"layers.": "blocks."}, orig_to_new_stacked=STACKED)
    names = names_of(
        "language_model.model.blocks.0.weight", root=mapper, language_model=mapper, language_model__model=mapper
    )
    assert names == ("language_model.model.layers.0.weight", "language_model.model.blocks.0.weight")


def wrapped(mapper: Mapper, **modules: nn.Module) -> nn.Module:
    model = nn.Module()
    model.hf_to_vllm_mapper = mapper
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.language_model = nn.Module()
    model.language_model.model = nn.Module()
    for name, module in modules.items():
        model.language_model.model.add_module(name, module)
    return model


def test_a_wrapped_model_has_slots_by_checkpoint_names_and_takes_the_older_ones():
    model = wrapped(Mapper(orig_to_new_prefix=GEMMA3), qkv_proj=BlockLinear(sizes=(256, 128, 128)))
    model.language_model.model.embed_tokens = nn.Embedding(8, 64)
    model.language_model.lm_head = nn.Linear(64, 8, bias=False)
    model.language_model.lm_head.weight = model.language_model.model.embed_tokens.weight
    inventory = read_inventory(model)
    assert inventory.refusals == ()
    embed = "model.language_model.embed_tokens.weight"
    attention = [f"model.language_model.{part}_proj.weight" for part in "qkv"]
    assert sorted(slot.name for slot in inventory.slots) == sorted([embed, *attention])
    assert inventory.aliases["language_model.model.k_proj.weight"] == attention[1]
    assert inventory.aliases["lm_head.weight"] == inventory.aliases["language_model.model.embed_tokens.weight"] == embed


def test_the_head_of_a_tied_model_that_keeps_none_may_be_sent():
    model = wrapped(Mapper(), proj=BlockLinear())
    model.config = SimpleNamespace(text_config=SimpleNamespace(tie_word_embeddings=True))
    model.embed_tokens = nn.Embedding(8, 64)
    model.embed_tokens.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=8)
    model.embed_tokens.num_embeddings_per_partition = model.embed_tokens.org_vocab_size = 8
    assert read_inventory(model).aliases == {"lm_head.weight": "embed_tokens.weight"}
    model.config.text_config.tie_word_embeddings = False
    assert read_inventory(model).aliases == {}


def test_a_tensor_whose_name_the_mapping_does_not_give_away_is_refused_by_name():
    model = wrapped(
        Mapper(orig_to_new_regex={re.compile(r"^language_model\.(.*)proj"): r"\1mapped"}), proj=BlockLinear()
    )
    (refusal,) = read_inventory(model).refusals
    assert refusal.module == "language_model.model.proj"
    assert refusal.reason == "loads `weight` from names that its model's mapping does not give away"


def test_tensors_are_written_where_the_live_name_says():
    model = wrapped(Mapper(orig_to_new_prefix=GEMMA3), proj=BlockLinear())
    (slot,) = read_inventory(model).slots
    assert slot.weight.data_ptr() == model.language_model.model.proj.weight.data_ptr()
    assert slot.scale is not None
    assert torch.equal(slot.scale, model.language_model.model.proj.weight_scale_inv)
