"""A draft beside its target, as one inventory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fp8refit.live.drafts import named_apart, with_draft
from fp8refit.live.parameters import live_tensors
from fp8refit.live.slots import Inventory, PartlyRead, Refusal, Slot, Stacked


def inventory_of(model, **fields):
    slots = tuple(
        Slot(name=name, full_shape=tuple(tensor.shape), weight=tensor.data) for name, tensor in model.named_parameters()
    )
    return Inventory(slots=slots, live=live_tensors(model), **fields)


@pytest.fixture
def models():
    target, draft = nn.ModuleDict(), nn.ModuleDict()
    target["embed"], target["layer"] = nn.Embedding(4, 2), nn.Linear(2, 2)
    draft["embed"], draft["head"] = target["embed"], nn.Linear(2, 2)
    return target, draft


def without(inventory, name):
    return replace(inventory, slots=tuple(slot for slot in inventory.slots if slot.name != name))


def test_what_both_hold_is_written_once_under_either_name(models):
    target, draft = (inventory_of(model) for model in models)
    both = with_draft(target, without(draft, "embed.weight"), shared={"mtp.embed.weight": "embed.weight"})
    names = [slot.name for slot in both.slots]
    assert names == ["embed.weight", "layer.weight", "layer.bias", "head.weight", "head.bias"]
    assert both.aliases == {"mtp.embed.weight": "embed.weight"}
    assert [each.name for each in both.live][-2:] == ["draft model: head.weight", "draft model: head.bias"]
    assert len(both.live) == 5


def test_no_name_of_the_target_means_something_else(models):
    target = inventory_of(models[0], unneeded=("mtp.*",))
    draft = inventory_of(models[1], aliases={"layer.weight": "head.weight"}, unneeded=("layer.bias", "rest"))
    both = with_draft(target, draft, shared={"embed.weight": "embed.weight"})
    assert both.aliases == {}
    assert both.unneeded == ("mtp.*", "rest")


def test_refusals_proofs_and_copies_of_both_count(models):
    def refusal(name):
        return Refusal(module=name, reason="is odd", remedy="Boot another")

    def of(model, name):
        return inventory_of(
            model,
            refusals=(refusal(name),),
            find_copies=lambda *_: [refusal(f"copy of {name}")],
            prove=lambda *_: (refusal(f"proof of {name}"),),
        )

    both = with_draft(of(models[0], "one"), of(models[1], "other"), shared={})
    assert [each.module for each in both.refusals] == ["one", "draft model: other"]
    assert [each.module for each in both.find_copies(True, False)] == ["copy of one", "copy of other"]
    assert [each.module for each in both.prove(None, torch.device("cpu"))] == ["proof of one", "proof of other"]
    assert with_draft(inventory_of(models[0]), inventory_of(models[1]), shared={}).prove is None


def test_a_checkpoint_of_its_own_has_names_of_its_own(models):
    stack = Stacked(name="experts", shape=(2, 2, 2), parts={"head.weight": (0, 0)})
    given = inventory_of(
        models[1],
        aliases={"other": "head.weight"},
        unneeded=("rest",),
        stacked=(stack,),
        buffers=frozenset(("table",)),
        written_as={"head.weight": ("head.{}",)},
        partly_read={"head.weight": PartlyRead(shape=(2, 2))},
    )
    found = named_apart(given, "draft.")
    assert [slot.name for slot in found.slots] == ["draft.embed.weight", "draft.head.weight", "draft.head.bias"]
    assert found.aliases == {"draft.other": "draft.head.weight"}
    assert (found.unneeded, found.buffers) == (("draft.rest",), {"draft.table"})
    assert (found.stacked[0].name, dict(found.stacked[0].parts)) == ("draft.experts", {"draft.head.weight": (0, 0)})
    assert found.partly_read.keys() == found.written_as.keys() == {"draft.head.weight"}
