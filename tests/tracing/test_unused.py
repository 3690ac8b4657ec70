"""What loaders leave out of vision towers, and what they may not leave out."""

import pytest

from fp8refit.tracing.reading import read_inventory
from fp8refit.tracing.reads import refusals_of
from fp8refit.tracing.twin import Naming, trace_twin
from fp8refit.tracing.unused import unused_names
from tests.tracing.models import BlockLinear, model_of
from tests.tracing.twins import FakeKernelRules, copying, naming_of

TOWER = "model.vision_tower.vision_model"
LAYERS = [f"{TOWER}.encoder.layers.{layer}.{part}" for layer in range(12) for part in ("mlp.weight", "norm.weight")]
NORM = [f"{TOWER}.post_layernorm.{part}" for part in ("weight", "bias")]
OTHERS = [f"{TOWER}.pre_layernorm.weight", "model.language_model.layers.11.mlp.weight", "lm_head.weight"]
NAMES = [*LAYERS, *NORM, *OTHERS]


def of_layers(first: int, end: int) -> list[str]:
    return LAYERS[2 * first : 2 * end]


def test_layers_after_the_last_that_is_built_and_the_norm_after_them_are_unused():
    left_out = [*of_layers(10, 12), *NORM]
    assert unused_names(NAMES, left_out) == tuple(left_out)


def test_the_last_norm_alone_may_be_unused():
    assert unused_names(NAMES, NORM) == tuple(NORM)


@pytest.mark.parametrize(
    "left_out",
    [of_layers(4, 5), LAYERS[-1:], NORM[:1], OTHERS, [*LAYERS, *NORM]],
    ids=["a layer inside", "half a layer", "half a norm", "another module", "a whole tower"],
)
def test_nothing_else_is(left_out):
    assert unused_names(NAMES, left_out) == ()


def read(num_layers: int, *, num_ranks: int = 1):
    """An engine that built the first of three layers of a tower, or none."""
    layers = {f"vision_{layer}": BlockLinear() for layer in range(3)}
    naming = naming_of(model_of(head=BlockLinear(), **layers))
    spelled = {name: name.replace("vision_", "vision_tower.layers.") for name in naming.tensors}
    metas = {spelled[name]: meta for name, meta in naming.tensors.items()}
    aliases = {f"model.{name}": name for name in metas}
    model = model_of(head=BlockLinear(), **dict(list(layers.items())[:num_layers]))
    named = {other: name for name, other in spelled.items()}

    def load(tensors):
        known = ((named[name], tensor) for name, tensor in tensors)
        copying(model)(item for item in known if item[0] in dict(model.named_parameters()))

    twin = trace_twin(model, Naming(tensors=metas, aliases=aliases), load, num_ranks=num_ranks)
    return read_inventory(model, FakeKernelRules(), twin)


def test_unused_tensors_may_be_sent_under_all_of_their_names():
    inventory = read(1)
    assert inventory.refusals == ()
    layers = {f"vision_tower.layers.{layer}.weight" for layer in (1, 2)}
    assert {*inventory.unneeded} == {*layers, *(f"model.{name}" for name in layers)}
    assert not inventory.names.isdisjoint(layers)


def test_a_tower_that_the_engine_did_not_build_is_refused():
    assert [refusal.module for refusal in read(0).refusals] == [f"vision_tower.layers.{n}.weight" for n in range(3)]


def test_a_rank_without_the_tower_leaves_the_judgement_to_the_others():
    ranks = [read(num_layers, num_ranks=2) for num_layers in (1, 0)]
    assert [len(rank.unneeded) for rank in ranks] == [4, 0]
    assert refusals_of([rank.partly_read for rank in ranks]) == []
    assert len(refusals_of([ranks[1].partly_read] * 2)) == 3
