"""What checkpoints of a model hold, and under which names, as transformers says it."""

import pytest
import torch
import transformers
from fp8refit_transformers import naming
from fp8refit_transformers.layers import Saved, save_alike
from fp8refit_transformers.naming import namings_of

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.records import Copy
from tests import zoo_models, zoo_vision
from tests.zoo_models import names_in

TIED = "InternVLForConditionalGeneration"
IN_TOWERS = "Gemma3ForConditionalGeneration"
"""Its published checkpoints have `vision_model` inside of names."""


@pytest.mark.parametrize("architecture", [TIED, IN_TOWERS])
def test_the_first_naming_is_that_of_a_model_that_was_never_loaded(architecture, tmp_path):
    zoo_vision.build(architecture).save_pretrained(tmp_path)
    assert next(namings_of(zoo_vision.tiny_config(architecture))).tensors.keys() == names_in(tmp_path)


def test_a_second_name_is_told_of_a_tensor_as_a_checkpoint_calls_it():
    naming = next(namings_of(zoo_vision.tiny_config(TIED)))
    assert naming.tied == {"lm_head.weight": "language_model.model.embed_tokens.weight"}
    assert set(naming.tied.values()) <= naming.tensors.keys()


def test_published_names_are_told_after_those_that_a_new_model_is_saved_under():
    made, published = namings_of(zoo_vision.tiny_config(IN_TOWERS))
    inside = "vision_tower.vision_model.embeddings.position_embedding.weight"
    assert inside in published.tensors.keys() - made.tensors.keys()
    alias = inside.replace("vision_model.", "")
    assert alias in made.tensors
    assert published.aliases[alias] == published.aliases[f"model.{alias}"] == inside
    assert set(published.aliases.values()) <= published.tensors.keys()
    assert [made.tensors[name] for name in made.tensors] == list(published.tensors.values())


def test_experts_whose_published_stacks_are_transposed_are_named_one_by_one():
    state = zoo_vision.build("Qwen3VLMoeForConditionalGeneration").state_dict()
    made, single = namings_of(zoo_vision.tiny_config("Qwen3VLMoeForConditionalGeneration"))
    stack = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert made.tensors[stack].shape == tuple(state[stack].shape) == (4, 768, 256)
    found = {each.name: each for each in single.stacked}[stack]
    assert (found.shape, found.is_transposed) == ((4, 768, 256), None)
    prefix = stack.removesuffix("gate_up_proj")
    assert found.parts == {
        f"{prefix}{expert}.{part}.weight": (expert, row)
        for expert in range(4)
        for part, row in (("gate_proj", 0), ("up_proj", 384))
    }
    assert {single.tensors[part].shape for part in found.parts} == {(384, 256)}
    assert stack not in single.tensors


def test_there_is_one_naming_if_no_prefix_was_ever_taken_away():
    assert len(list(namings_of(zoo_vision.tiny_config("Qwen2VLForConditionalGeneration")))) == 1


MANY_LAYERS = [
    "DeepseekV3ForCausalLM",
    "GPTNeoXForCausalLM",
    "HrmTextForCausalLM",
    "JambaForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3MoeForCausalLM",
]


def deep_config(architecture, num_layers=6):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            zoo_models.EXTRA, architecture, zoo_models.EXTRA.get(architecture, {}) | {"num_hidden_layers": num_layers}
        )
        return zoo_models.tiny_config(architecture)


def deep(architecture, num_layers=6):
    with torch.device("meta"):
        return getattr(transformers, architecture)._from_config(deep_config(architecture, num_layers))


@pytest.mark.parametrize("architecture", MANY_LAYERS)
def test_two_layers_of_each_kind_tell_what_all_of_them_hold(architecture):
    model = deep(architecture)
    told, whole = naming._naming_of(model), naming._naming_of(model, is_whole=True)
    assert told == whole
    assert list(told.tensors) == list(whole.tensors)  # some loaders go by order


def converted(monkeypatch, architecture):
    """How many tensors each conversion was given."""
    given, save = [], naming._save

    def count(model, state):
        given.append(len(state))
        return save(model, state)

    monkeypatch.setattr(naming, "_save", count)
    naming._naming_of(deep(architecture))
    return given


def test_only_two_layers_of_each_kind_are_converted(monkeypatch):
    num_all, num_two = (len(deep("MixtralForCausalLM", layers).state_dict()) for layers in (6, 2))
    assert num_two < num_all
    assert converted(monkeypatch, "MixtralForCausalLM") == [num_two]


def test_all_layers_are_converted_where_two_do_not_tell(monkeypatch):
    few, whole = converted(monkeypatch, "HrmTextForCausalLM")  # its conversions join tensors
    assert few < whole == len(deep("HrmTextForCausalLM").state_dict())


def test_a_layer_that_is_named_otherwise_is_in_the_next_naming(monkeypatch):
    config, save = deep_config("Qwen2ForCausalLM", 5), naming._save

    def rename(model, state):
        return [each._replace(name=each.name.replace("layers.4.", "last.")) for each in save(model, state)]

    monkeypatch.setattr(naming, "_save", rename)
    told, whole = namings_of(config)
    assert any(name.startswith("model.layers.4.") for name in told.tensors)
    assert any(name.startswith("model.last.") for name in whole.tensors)
    assert told.tensors.keys() - whole.tensors.keys() == {
        name.replace("model.last.", "model.layers.4.") for name in whole.tensors.keys() - told.tensors.keys()
    }


def saved(name, source, *, start=0, shape=(2, 2)):
    places = Copy("", 0, source, start, ()) if source is not None else None
    return Saved(name, TensorMeta(shape=shape, dtype=torch.bfloat16), places)


def alike(of_layer, num_layers=4):
    """What is told of layers of one tensor each, which are saved as `of_layer` says."""
    state = {f"h.{layer}.w": torch.empty(2, 2, device="meta") for layer in range(num_layers)}
    return save_alike(state, lambda kept: [each for name in kept for each in of_layer(int(name.split(".")[1]), name)])


def test_a_tensor_may_be_saved_as_several_under_other_numbers():
    found = alike(lambda layer, name: [saved(f"m.{layer}.e.{e}.u.{layer}", name, start=e) for e in range(2)])
    assert {each.name: (each.places.source, each.places.start) for each in found} == {
        f"m.{layer}.e.{e}.u.{layer}": (f"h.{layer}.w", e) for layer in range(4) for e in range(2)
    }


@pytest.mark.parametrize(
    "of_layer",
    [
        lambda layer, name: [saved(f"h.{layer + 1}.w", name)],  # other numbers than the layer's own
        lambda layer, name: [saved("h.w", name)],
        lambda layer, name: [saved(f"h{layer}.w", name)],
        lambda layer, name: [saved(f"h.{layer}.w", name, shape=(2 + layer, 2))],
        lambda layer, name: [saved(f"h.{layer}.w", name, start=layer)],
        lambda layer, name: [saved(f"h.{layer}.w", name)] * (1 + layer),
        lambda layer, name: [saved(f"h.{layer}.w", None)],
        lambda layer, name: [saved(f"h.{layer}.w", name), saved(f"h.{layer}.w", name)],
    ],
)
def test_layers_that_are_not_saved_alike_tell_nothing(of_layer):
    assert alike(of_layer) is None


@pytest.mark.parametrize("is_sorted", [False, True])
def test_what_is_told_comes_where_it_would_have_been_saved(is_sorted):
    names = ["norm", *(f"h.{layer}.{part}" for layer in range(12) for part in ("w", "b"))]

    def key(name):
        return [int(part) if part.isdigit() else -ord(part[0]) for part in name.split(".")]

    def save(kept):
        return [saved(name, name) for name in (sorted(kept, key=key) if is_sorted else kept)]

    state = {name: torch.empty(2, 2, device="meta") for name in names}
    assert [each.name for each in save_alike(state, save, key=key)] == (sorted(names, key=key) if is_sorted else names)


def test_nothing_is_told_where_no_layer_can_be_left_out():
    assert alike(lambda layer, name: [saved(name, name)], num_layers=2) is None


@pytest.mark.parametrize(
    ("architecture", "beside"),
    [
        ("Qwen3NextForCausalLM", ("mtp*",)),
        ("Ernie4_5_MoeForCausalLM", ("*mtp*",)),
        ("Qwen3ForCausalLM", ()),
    ],
)
def test_what_published_checkpoints_hold_beside_a_model_is_declared(architecture, beside):
    config = deep_config(architecture, num_layers=2)
    assert next(namings_of(config)).beside == beside


def test_layers_that_draft_are_as_many_as_the_config_says_and_never_the_models_own():
    glm = deep_config("Glm4MoeForCausalLM", num_layers=2)
    glm.num_nextn_predict_layers = 1
    assert next(namings_of(glm)).beside == ("model.layers.2.*",)
    config = deep_config("DeepseekV3ForCausalLM", num_layers=62)  # layer 61 is a draft only if there are 61 others
    config.num_nextn_predict_layers = 2
    assert next(namings_of(config)).beside == ("model.layers.62.*", "model.layers.63.*")
    config.num_nextn_predict_layers = None
    assert next(namings_of(config)).beside == ()
