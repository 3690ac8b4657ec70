"""What checkpoints of a model hold, and under which names, as transformers says it."""

import pytest
from fp8refit_transformers.naming import namings_of

from tests import zoo_vision
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


def test_there_is_one_naming_if_no_prefix_was_ever_taken_away():
    assert len(list(namings_of(zoo_vision.tiny_config("Qwen2VLForConditionalGeneration")))) == 1
