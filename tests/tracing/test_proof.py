"""What a loader really loads is compared with what was seen of it, and what differs is refused by name."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from fp8refit.config import RefitConfig
from fp8refit.errors import UnsupportedEngineError
from fp8refit.kernels import quantize_blockwise
from fp8refit.kernels.reference import quantize_reference
from fp8refit.live.formats import PER_ROW, AmaxOver
from fp8refit.ranks.target import Target
from fp8refit.sources.source import MappingSource
from fp8refit.tracing import proof
from fp8refit.tracing.kinds import Place, kinds_of
from tests.tracing.custom import Custom, Linear, inventory_of, plainly, target_of, twin_of
from tests.tracing.models import FP8
from tests.tracing.tricks import (
    cast,
    replace_data,
    replace_parameter,
    swap_halves,
    unseen,
    write_in_thread,
    write_many,
    write_out,
    write_unseen,
)


def model_with(load=plainly, *, num_layers=3, **more) -> Custom:
    """Quantized projections and plain weights in layers, and an embedding, a head and a number outside of them."""
    modules = {f"layers.{layer}.proj": Linear(8, 12, dtype=FP8) for layer in range(num_layers)}
    modules |= {f"layers.{layer}.norm": Linear(8) for layer in range(num_layers)}
    modules |= {"embed": Linear(16, 8), "head": Linear(16, 8), "scale": Linear(1), **more}
    return Custom(modules, load)


def names_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in model.named_parameters() if not n.endswith("_scale_inv")}


def unproved(make, names=None) -> list[str]:
    """The tensors of a model that are refused, by whatever finds them first."""
    target = target_of(make, names or names_of(make()))
    layout = target.layout()
    assert layout.is_proved is (None if target.live.read().refusals else not layout.refusals)
    return [refusal.split(":")[0] for refusal in layout.refusals]


def test_scales_of_rows_may_cover_other_ranks_values_and_no_less_than_the_own():
    values = torch.randn(6, 64).to(torch.bfloat16)
    codes, scales = quantize_blockwise(values, format=PER_ROW)
    assert proof._are_quantized(codes, scales, values, PER_ROW)
    for factor, is_possible in ((1.5, True), (0.75, False)):
        other, _, _ = quantize_reference(values, PER_ROW, given=scales * factor)
        assert proof._are_quantized(other, scales * factor, values, PER_ROW) is is_possible
        assert not proof._are_quantized(codes, scales * factor, values, PER_ROW)
        assert not proof._are_quantized(other, scales * factor, values, replace(PER_ROW, amax_over=AmaxOver.OWN_SLICE))


def test_what_a_loader_copies_is_proved():
    assert unproved(model_with) == []


def test_every_layer_is_like_the_first_unless_the_loader_does_another_thing_with_it(monkeypatch):
    looked_at = []
    build = proof._Trial.__init__

    def note(trial, prove, names, device):
        looked_at.append({name for name in names if name.startswith("layers.")})
        build(trial, prove, names, device)

    monkeypatch.setattr(proof._Trial, "__init__", note)

    def load(model, name, tensor):
        plainly(model, name, -tensor if name == "layers.2.norm.weight" else tensor)

    assert unproved(lambda: model_with(load)) == []
    assert {name.split(".")[1] for names in looked_at for name in names} == {"0", "2"}


def at(names, do):
    """A loader that does something with some names and copies all others."""

    def load(model, name, tensor):
        if name in names:
            do(model, name, tensor)
        else:
            plainly(model, name, tensor)

    return load


def then(trick):
    """Copy a tensor, and then do something with the weight."""

    def load(model, name, tensor):
        plainly(model, name, tensor)
        trick(model, name, tensor)

    return load


def interleave(model, name, tensor):
    weight = model.get_parameter(name).data
    first, second = weight.clone().chunk(2)
    weight[::2].copy_(first)
    weight[1::2].copy_(second)


def tie_then_double(model, name, tensor):
    model.embed.weight.data.copy_(tensor)
    model.head.weight.data.copy_(model.embed.weight.data)
    model.embed.weight.data.mul_(2)


def beyond_half(model, name, tensor):
    model.get_parameter(name).data.copy_((tensor * 65536).half() / 65536)


def keep_low_bits(model, name, tensor):
    model.get_parameter(name).data.copy_((tensor.view(torch.int16) & -16).view(torch.bfloat16))


DOINGS = {
    "halves swapped": then(swap_halves),
    "rows interleaved": then(interleave),
    "data replaced": then(replace_data),
    "parameter replaced": then(replace_parameter),
    "written with out=": then(write_out),
    "written by foreach": then(write_many),
    "written in a thread": then(write_in_thread),
    "written unseen": then(write_unseen),
    "rounded to FP8": cast(FP8, torch.bfloat16),
    "rounded to integers": cast(torch.int32),
    "beyond the range of FP16": beyond_half,
    "bits of another dtype": keep_low_bits,
}


@pytest.mark.parametrize("how", DOINGS)
@pytest.mark.parametrize("name", ["layers.0.norm.weight", "embed.weight"])
def test_what_a_trace_cannot_follow_is_refused_by_name_or_done_alike(how, name):
    """Whatever is not refused, a refit leaves as the loader does."""

    def make():
        names = [name, *(name.replace("0", str(layer)) for layer in (1, 2) if "0" in name)]
        return model_with(at(names, DOINGS[how]))

    target = target_of(make, names_of(make()))
    refused = list(target.layout().refusals)
    if refused:
        assert any(refusal.startswith(name.removesuffix(".weight")) for refusal in refused)
        with pytest.raises(UnsupportedEngineError, match="nothing was written"):
            refit(target, make())
    else:
        assert how in ("beyond the range of FP16", "written in a thread")
        assert refit(target, make()) == []


def refit(target, model) -> list[str]:
    """Refit a target; returns the names of what differs from a model that loads the same."""
    torch.manual_seed(0)
    policy = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in names_of(model).items()}
    target.write(target.prepare(MappingSource(policy), RefitConfig()))
    model.load_weights((name, tensor.clone()) for name, tensor in policy.items())
    held = {entry.name: entry.tensor for entry in target.live.read().live}
    return [n for n, p in model.named_parameters() if p.dtype is torch.bfloat16 and not torch.equal(held[n], p)]


def test_two_names_of_which_one_is_made_of_the_other_are_proved_together():
    """As a loader that copies an embedding to the head, and then changes the embedding."""

    def load(model, name, tensor):
        if name == "embed.weight":
            tie_then_double(model, name, tensor)
        else:
            plainly(model, name, tensor)

    names = names_of(model_with())
    del names["head.weight"]
    assert unproved(lambda: model_with(load), names) == ["head.weight"]


class Experts(nn.Module):
    """Gate and up projections of experts, one above the other, and down projections."""

    def __init__(self, num_experts=3, rows=8, *, dtype=FP8):
        super().__init__()
        for name, shape in {"w13_weight": (num_experts, 2 * rows, 8), "w2_weight": (num_experts, 8, rows)}.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
            if dtype is FP8:
                halves = 2 if name == "w13_weight" else 1
                grid = (num_experts, halves * -(-shape[1] // halves // 4), -(-shape[2] // 4))
                setattr(self, f"{name}_scale_inv", nn.Parameter(torch.empty(grid), requires_grad=False))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def load_expert(model, name, tensor, exchanged=()):
    """Load one projection of an expert, or its scales; experts that are exchanged go to each other's places."""
    if ".experts." not in name:
        plainly(model, name, tensor)
        return
    *layer, expert, projection, leaf = name.split(".")
    expert = dict([exchanged, exchanged[::-1]] if exchanged else []).get(int(expert), int(expert))
    into = getattr(
        model.get_submodule(".".join(layer)), "w2_" + leaf if projection == "down_proj" else "w13_" + leaf
    ).data
    if projection != "down_proj":
        half = into.shape[1] // 2
        into = into[:, :half] if projection == "gate_proj" else into[:, half:]
    into[expert].copy_(tensor)


def experts_model(load=load_expert, *, num_layers=2, rows=8, **how) -> Custom:
    experts = {f"layers.{layer}.experts": Experts(rows=rows, **how) for layer in range(num_layers)}
    return Custom({**experts, "proj": Linear(8, 8, dtype=FP8)}, load)


def experts_names(num_layers=2, num_experts=3, rows=8) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (rows, 8), "up_proj": (rows, 8), "down_proj": (8, rows)}
    return {"proj.weight": (8, 8)} | {
        f"layers.{layer}.experts.{expert}.{projection}.weight": shape
        for layer in range(num_layers)
        for expert in range(num_experts)
        for projection, shape in shapes.items()
    }


@pytest.mark.parametrize("rows", [8, 6])
def test_experts_are_proved_with_their_blocks(rows):
    """With 6 rows, gate and up projections have blocks of their own."""
    assert unproved(lambda: experts_model(rows=rows), experts_names(rows=rows)) == []


@pytest.mark.parametrize("is_up_first", [False, True])
def test_what_an_engine_quantizes_at_boot_is_proved(is_up_first):
    """The twin of such an engine holds BF16, and a kernel may keep the halves the other way round."""
    live = experts_model()
    for layer in live.layers.children():
        layer.experts.is_up_first = is_up_first
    target = target_of(lambda: experts_model(dtype=torch.bfloat16), experts_names(), live=live)
    assert target.layout().is_proved


def test_each_expert_is_proved():
    """Exchanged where no trace sees it."""

    def load(model, name, tensor):
        load_expert(model, name, tensor)
        if name == "layers.1.experts.2.down_proj.weight":

            def exchange():
                for layer in model.layers.children():
                    into = layer.experts.w2_weight.data.view(torch.uint8)
                    into[1:].copy_(into[1:].flip(0).clone())

            unseen(exchange)

    assert unproved(lambda: experts_model(load), experts_names()) == ["layers.0.experts.w2_weight"]


def test_scales_that_go_elsewhere_than_their_blocks_are_refused():
    """A loader that takes scales of an expert from its neighbour, unseen by what names it takes: it is one of many."""

    def load(model, name, tensor):
        is_last = name.endswith("2.gate_proj.weight_scale_inv")
        load_expert(model, name, tensor.flip(0) if is_last else tensor)

    assert unproved(lambda: experts_model(load), experts_names()) == ["layers.0.experts.w13_weight"]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_proves_its_own_part(rank):
    def load(model, name, tensor, is_right=True):
        into = model.get_parameter(name).data
        dim = 1 if name == "down.weight" else 0
        size = into.shape[dim]
        into.copy_(tensor.narrow(dim, rank * size, size) if is_right else tensor.narrow(dim, 0, size))

    def make(load=load):
        return Custom({"up": Linear(8, 8, dtype=FP8), "down": Linear(8, 8, dtype=FP8)}, load)

    names = {"up.weight": (16, 8), "down.weight": (8, 16)}
    assert target_of(make, names, num_ranks=2).layout().is_proved


def test_a_trace_that_says_another_thing_is_refused():
    """Each copy in turn from another source, from the next element or row, or not at all."""
    names = names_of(model_with(num_layers=1))
    twin = twin_of(lambda: model_with(num_layers=1), names)
    others = dict(pairwise([*names, next(iter(names))]))
    num_found = 0
    for copy in twin.traced.copies:
        for wrong in wrongly(copy, others, names):
            rest = tuple(each for each in twin.traced.copies if each is not copy)
            traced = replace(twin.traced, copies=(*rest, *wrong))
            live = model_with(num_layers=1)
            inventory = inventory_of(live, replace(twin, traced=traced, proved={}))
            target = Target(lambda inventory=inventory: inventory, device=torch.device("cpu"), engine="", versions={})
            assert target.layout().refusals, f"{copy=} {wrong=}"
            num_found += 1
    assert num_found >= 10


def wrongly(copy, others, names):
    yield ()
    other = others[copy.source]
    if names[other] == names[copy.source]:
        yield (copy._replace(source=other),)
    if names[copy.source] != (1,):
        run = copy.runs[0]
        for shift in (1, 8) if run.size > 8 else (1,):  # 8 is a row of most
            left = run.size - shift
            yield (
                copy._replace(start=shift, runs=(run._replace(size=left),)),
                copy._replace(into=left, start=0, runs=(run._replace(size=shift),) if shift > 1 else ()),
            )


def test_without_room_on_the_device_and_for_all_at_once_it_is_proved_in_turn(monkeypatch):
    batches = []
    prove = proof._Proof._differing
    monkeypatch.setattr(proof, "_LARGE", 100)
    monkeypatch.setattr(proof, "_room_on", lambda device: 0)
    monkeypatch.setattr(
        proof._Proof, "_differing", lambda self, names, *rest: batches.append(names) or prove(self, names, *rest)
    )
    assert unproved(model_with) == []
    assert [len(names) for names in batches] == [3, 1, 1, 1]


def test_a_loader_that_fails_with_values_is_refused_and_named():
    def load(model, name, tensor):
        if not tensor.is_meta:
            raise ValueError("takes no values")
        plainly(model, name, tensor)

    layout = target_of(lambda: model_with(load), names_of(model_with())).layout()
    assert layout.is_proved is False
    assert layout.refusals[0].startswith(
        "Custom: the model's loader was tried: it fails with real values (ValueError: takes no"
    )


def test_what_cannot_be_repeated_is_refused_before_anything_is_written():
    target = target_of(lambda: model_with(at(["embed.weight"], keep_low_bits)), names_of(model_with()))
    (refusal,) = target.layout().refusals
    assert refusal.startswith("embed.weight: the model's loader was tried: what it computes cannot be repeated (")
    assert not target.is_dirty


def test_a_refit_proves_unless_it_is_told_not_to():
    make = lambda: model_with(at(["embed.weight"], DOINGS["halves swapped"]))  # noqa: E731
    target = target_of(make, names_of(make()))
    policy = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in names_of(make()).items()}
    source = MappingSource(policy)
    with pytest.raises(UnsupportedEngineError, match="embed"):
        target.prepare(source, RefitConfig())
    assert not target.is_dirty
    target.write(target.prepare(source, RefitConfig(prove_trace=False)))


def test_it_is_proved_once_even_if_the_engine_replaces_tensors(monkeypatch):
    target = target_of(model_with, names_of(model_with()))
    assert target.layout().is_proved
    monkeypatch.setattr(proof._Proof, "_differing", None)
    target.live.forget()
    assert target.layout().is_proved


def test_scales_that_are_made_with_values_are_proved_with_their_weights(monkeypatch):
    """They have memory in every twin, and their weights only in one of their layer."""

    def make():
        model = experts_model()
        for layer in model.layers.children():
            for name, scale in [*layer.experts._parameters.items()]:
                if name.endswith("_scale_inv"):
                    setattr(layer.experts, name, nn.Parameter(torch.ones(scale.shape), requires_grad=False))
        return model

    monkeypatch.setattr(proof, "_room_on", lambda device: 0)
    assert unproved(make, experts_names()) == []


def test_a_loader_that_needs_a_whole_checkpoint_gets_one():
    def load(model, name, tensor):
        model.seen = {*getattr(model, "seen", ()), name}
        plainly(model, name, tensor)
        if name == "scale.weight" and len(model.seen) < len(names_of(model)):
            raise KeyError("layers are missing")

    assert unproved(lambda: model_with(load)) == []


def test_layers_of_each_stack_are_proved():
    def load(model, name, tensor):
        plainly(model, name, tensor)
        if name.startswith("visual.blocks.0"):
            swap_halves(model, name, tensor)

    def make(load=load):
        layers = {f"{stack}.{n}.norm": Linear(8) for stack in ("visual.blocks", "model.layers") for n in range(2)}
        return Custom({**layers, "proj": Linear(8, 8, dtype=FP8)}, load)

    assert unproved(make, names_of(make())) == ["visual.blocks.0.norm.weight"]


ONLY_LAST = ["layers.2.norm.weight"]


@pytest.mark.parametrize("how", ["written with out=", "written by foreach", "data replaced", "halves swapped"])
def test_what_a_loader_does_in_one_layer_alone_is_found_there(how):
    found = unproved(lambda: model_with(at(ONLY_LAST, DOINGS[how])))
    assert [name.removesuffix(".weight") for name in found] == ["layers.2.norm"]


def test_a_cast_in_one_layer_alone_is_found_there():
    assert unproved(lambda: model_with(at(ONLY_LAST, DOINGS["rounded to FP8"]))) == ONLY_LAST


def test_layers_that_share_a_table_or_an_order_of_experts_are_alike():
    """As those of rotary embeddings; and of experts, of whose later layers only some tensors are traced."""
    table = torch.ones(4)

    def load(model, name, tensor):
        load_expert(model, name, tensor.to(torch.float16).t().contiguous().t())

    def make():
        model = experts_model(load, num_layers=6, num_experts=16)
        for layer in model.layers.children():
            layer.register_buffer("table", table, persistent=False)
        return model

    live, twin = make(), twin_of(make, experts_names(num_layers=6, num_experts=16))
    kinds = kinds_of(live, twin, inventory_of(live, twin).slots)
    assert [sorted({Place.of(name).number for name in names}) for names in kinds.values()] == [[0], [-1]]
