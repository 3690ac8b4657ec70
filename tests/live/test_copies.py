"""Which tensors beside weights may be copies of them."""

import pytest
import torch
from torch import nn

from fp8refit.live.copies import Copies, values_of
from fp8refit.live.slots import Inventory, Refresh, Slot


class Attention(nn.Module):
    def __init__(self, *, size: int = 4) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(size).normal_())
        self.register_buffer("loaded", torch.zeros(size))
        self.register_buffer("table", torch.linspace(0, 1, 8).cos(), persistent=False)
        self.register_buffer("joined", torch.zeros(2 * size), persistent=False)
        self.register_buffer("constant", torch.full((size,), 2.0))
        self.mask = torch.ones(3, 3, dtype=torch.bool).tril()


def copies_of(model: nn.Module, *, refreshes=(), kept=lambda _: (), twin: nn.Module | None = None) -> Copies:
    slots = tuple(
        Slot(name=f"{prefix}.{name}", full_shape=tuple(tensor.shape), weight=tensor)
        for prefix, module in model.named_modules()
        if isinstance(module, Attention)
        for name, tensor in (("norm", module.norm.data), ("loaded", module.loaded))
    )
    inventory = Inventory(slots=slots, refreshes=tuple(refreshes))
    return Copies(model, inventory, built=values_of(twin or make_model()), kept=kept)


def make_model() -> nn.Module:
    return nn.ModuleDict({"attn": Attention()})


def refused(copies: Copies, *, are_restored: bool = True, at_a_glance: bool = False) -> list[str]:
    found = copies.refusals(are_restored, at_a_glance)
    return [f"{each.module}.{each.reason.split('`')[1]}" for each in found]


def test_nothing_is_refused_that_was_built_without_weights():
    model = make_model()
    model["attn"].loaded.copy_(torch.arange(4))
    assert refused(copies_of(model)) == []


COPIES = {
    "copy": lambda layer: setattr(layer, "joined_norms", layer.norm.detach().repeat(2)),
    "impl": lambda layer: setattr(layer, "impl", [{"sinks": layer.norm.detach().double()}]),
    "buffer": lambda layer: layer.joined.copy_(layer.norm.detach().repeat(2)),
    "data of a buffer": lambda layer: setattr(layer.joined, "data", layer.norm.detach().repeat(2)),
    "restored buffer": lambda layer: layer.constant.copy_(layer.norm.detach()),
    "table": lambda layer: layer.table.mul_(2),
    "late buffer": lambda layer: layer.register_buffer("late", layer.norm.detach().half()),
    "packed": lambda layer: setattr(layer, "handle", torch.tensor([layer.norm.data_ptr()])),
    "numpy": lambda layer: setattr(layer, "array", layer.norm.detach().numpy().copy()),
    "sparse": lambda layer: setattr(layer, "sparse", layer.norm.detach().to_sparse()),
    "module": lambda layer: layer.__dict__.update(helper=nn.Linear(2, 2, bias=False)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_copy_is_refused_whenever_it_is_made(kind, is_late):
    model = make_model()
    copies = copies_of(model)
    if is_late:
        assert refused(copies) == []
    COPIES[kind](model["attn"])
    (name,) = refused(copies)
    assert name.startswith("attn.")
    assert refused(copies) == [name]


def test_a_glance_refuses_what_is_seen_of_a_copy_and_what_was_refused_before():
    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention()])})
    copies = copies_of(model, twin=nn.ModuleDict({"layers": nn.ModuleList([Attention(), Attention()])}))
    assert refused(copies) == []
    COPIES["copy"](model["layers"][1])
    assert refused(copies, at_a_glance=True) == []
    assert refused(copies) == ["layers.1.joined_norms"]
    assert refused(copies, at_a_glance=True) == ["layers.1.joined_norms"]
    del model["layers"][1].joined_norms
    assert refused(copies) == []
    COPIES["copy"](model["layers"][0])
    assert refused(copies, at_a_glance=True) == ["layers.0.joined_norms"]


def test_the_refusal_names_module_and_attribute_and_says_what_to_do():
    model = make_model()
    model["attn"].copy = {"norm": model["attn"].norm.detach().double()}
    (refusal,) = copies_of(model).refusals(True)
    assert str(refusal) == (
        "attn: keeps `copy['norm']` (float64 [4]), which may be a copy of weights, and a refit would not update it. "
        "Boot without what makes it, or ask for support"
    )


def test_views_are_current():
    model = make_model()
    layer = model["attn"]
    layer.views = [layer.norm.detach()[1:], layer.norm.view(2, 2), layer.loaded[:2], layer.norm.detach().numpy()]
    assert refused(copies_of(model)) == []


def test_what_a_refresh_writes_is_current():
    model = make_model()
    layer = model["attn"]
    layer.copy = layer.norm.detach().double()
    assert refused(copies_of(model, refreshes=[Refresh(name="copy", run=lambda: None, written=(layer.copy,))])) == []


def test_kept_attributes_are_left_out():
    model = make_model()
    model["attn"].kv_cache = [torch.randn(3)]
    assert refused(copies_of(model, kept=lambda _: ("kv_cache",))) == []


def test_a_table_may_grow_and_round_otherwise():
    model = make_model()
    table = torch.linspace(0, 1, 8).cos()
    model["attn"].table = torch.cat([table + 1e-3, torch.zeros(3)])
    assert refused(copies_of(model)) == []
    model["attn"].table = table + 0.1
    assert refused(copies_of(model)) == ["attn.table"]


def test_norms_near_one_are_not_taken_for_a_vector_of_ones():
    twin, model = make_model(), make_model()
    twin["attn"].ones = torch.ones(4)
    model["attn"].ones = torch.ones(4) + 1e-3
    assert refused(copies_of(model, twin=twin)) == ["attn.ones"]


def test_noise_of_a_dummy_boot_is_passed_only_where_a_refit_restores_the_value():
    model = make_model()
    layer = model["attn"]
    layer.constant.uniform_()
    refresh = Refresh(name="constant", run=lambda: None, written=(layer.constant,), restores=True)
    copies = copies_of(model, refreshes=[refresh])
    assert refused(copies, are_restored=False) == []
    assert refused(copies, are_restored=True) == ["attn.constant"]
    layer.constant.fill_(2.0)
    assert refused(copies) == []
    layer.constant[0] = 3.0
    assert refused(copies) == ["attn.constant"]


def test_complex_and_infinite_tables_are_compared():
    twin, model = make_model(), make_model()
    table = torch.polar(torch.ones(3), torch.arange(3.0))
    mask = torch.full((3, 3), float("-inf")).triu(1)
    for each in (twin, model):
        each["attn"].freqs, each["attn"].causal = table.clone(), mask.clone()
    assert refused(copies_of(model, twin=twin)) == []
    model["attn"].freqs[1] *= 2
    model["attn"].causal[0, 0] = 1
    assert sorted(refused(copies_of(model, twin=twin))) == ["attn.causal", "attn.freqs"]
