"""Experts that have moved since a loader put them into the rows of a layer's stacks."""

import pytest
import torch
from torch import nn

from fp8refit.config import RefitConfig
from fp8refit.live.slots import TensorMeta
from fp8refit.ranks.target import Target
from fp8refit.sources.source import MappingSource
from fp8refit.tracing.inventory import inventory_of
from fp8refit.tracing.twin import Naming, trace_twin
from tests.tracing.twins import FakeKernelRules, loading

PLACES = (0, 1, 2, 0)
"""Of three experts, as a loader puts them: the first is there twice."""
NAME = "experts.{}.up.weight"


class Rules(FakeKernelRules):
    to_quantize = None
    absorbed = ("W_UK", "W_UV")

    def refreshes(self, model):
        return ()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(len(PLACES), 2, 3, dtype=torch.bfloat16), requires_grad=False)


def make_model() -> nn.Module:
    return nn.ModuleDict({"mlp": Experts()})


def one_by_one(model):
    def load(name, tensor):
        for row, expert in enumerate(PLACES):
            if name == "mlp." + NAME.format(expert):
                model["mlp"].w13_weight.data[row].copy_(tensor)

    return load


def doubled(model):
    """Computes what it loads."""
    load = one_by_one(model)
    return lambda name, tensor: load(name, tensor * 2)


def of_a_stack(model):
    def load(name, tensor):
        for row, expert in enumerate(PLACES):
            model["mlp"].w13_weight.data[row].copy_(tensor[expert])

    return load


SINGLE = {"mlp." + NAME.format(expert): (2, 3) for expert in range(3)}
STACK = {"mlp.experts.up": (3, 2, 3)}


def read(model, load=one_by_one, sources=SINGLE, experts=PLACES):
    naming = Naming(tensors={n: TensorMeta(shape=shape, dtype=torch.bfloat16) for n, shape in sources.items()})
    twin = trace_twin(meta := make_model().to("meta"), naming, loading(load(meta)))
    return inventory_of(model, Rules(), twin, experts={model["mlp"]: experts})


def policy() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 1.0 + place) for place, (name, shape) in enumerate(SINGLE.items())}


@pytest.mark.parametrize("experts", [PLACES, (2, 2, 0, 1), (1, 0, 1, 2)])
def test_each_row_gets_the_expert_that_it_holds_now(experts):
    model = make_model()
    target = Target(lambda: read(model, experts=experts), device=torch.device("cpu"), engine="fake", versions={})
    target.write(target.prepare(MappingSource(policy()), RefitConfig()))
    assert model["mlp"].w13_weight[:, 0, 0].tolist() == [1.0 + expert for expert in experts]


def test_a_rank_has_slots_for_the_experts_that_it_holds_now_alone():
    inventory = read(make_model(), experts=(1, 1, 2, 1))
    assert inventory.names == {"mlp." + NAME.format(expert) for expert in (1, 2)} | set(inventory.unneeded)
    assert not inventory.names & {"mlp." + NAME.format(0)}


@pytest.mark.parametrize(("load", "sources"), [(doubled, SINGLE), (of_a_stack, STACK)])
def test_experts_that_are_not_loaded_one_by_one_cannot_be_followed(load, sources):
    refusals = read(make_model(), load, sources).refusals
    assert any("is not loaded expert by expert, and the engine moves experts" in str(refusal) for refusal in refusals)


def test_an_expert_that_no_checkpoint_has_cannot_be_followed():
    refusals = read(make_model(), experts=(0, 1, 2, 3)).refusals
    assert any("is not loaded expert by expert" in str(refusal) for refusal in refusals)
