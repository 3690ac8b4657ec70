"""The names under which loaders take weights together with their block scales."""

import pytest
import torch
from torch import nn

from fp8refit.live.formats import BlockFormat
from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.twin import Naming, trace_twin
from tests.tracing.models import BlockLinear, model_of
from tests.tracing.twins import copying, naming_of

STORED = BlockFormat()


class Experts(nn.Module):
    """Gate and up projections of four experts, one above the other."""

    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        blocks = 2 * -(-rows // 2 // 128)
        codes = torch.zeros(4, rows, 256, dtype=torch.float8_e4m3fn)
        self.w13_weight = nn.Parameter(codes, requires_grad=False)
        self.w13_weight_scale_inv = nn.Parameter(torch.zeros(4, blocks, 2), requires_grad=False)


def loading_stacks(model, *, scale_name="{}_scale_inv", swaps_scales=False, transposes=False):
    """A loader of `layers.N.stack` and its scales, half by half and expert by expert, as engines have it."""
    named = dict(model.named_parameters())

    def load(tensors):
        for name, tensor in tensors:
            layer = name.split(".")[1]
            is_scale = name.endswith("_scale_inv")
            if is_scale and name != scale_name.format(name.removesuffix("_scale_inv")):
                raise KeyError(name)
            into = named[f"layers.{layer}.w13_weight{'_scale_inv' if is_scale else ''}"].data
            stack = tensor.transpose(1, 2) if transposes else tensor
            halves = stack.chunk(2, dim=1)
            if is_scale and swaps_scales:
                halves = halves[::-1]
            for index, half in enumerate(halves):
                for expert, matrix in enumerate(half.unbind()):
                    size = into.shape[1] // 2
                    into[expert].narrow(0, index * size, size).copy_(matrix)

    return load


def twin_of_stacks(load_with=loading_stacks, rows=256, aliases=(), **how):
    model = nn.Module()
    model.layers = nn.ModuleList([Experts(rows), Experts(rows)])
    shape = (4, 256, rows) if how.get("transposes") else (4, rows, 256)
    metas = {f"layers.{layer}.stack": TensorMeta(shape=shape, dtype=torch.bfloat16) for layer in range(2)}
    spelled = {f"layers.{layer}.{alias}": f"layers.{layer}.stack" for alias in aliases for layer in range(2)}
    naming = Naming(tensors=metas, aliases=spelled)
    return trace_twin(model, naming, load_with(model, **how), stored=STORED)


def test_weights_whose_own_names_do_are_not_listed():
    model = model_of(a=BlockLinear(), b=BlockLinear(rows=384))
    assert trace_twin(model, naming_of(model), copying(model), stored=STORED).written_as == {}


@pytest.mark.parametrize("how", [{}, {"transposes": True}])
def test_stacks_are_always_listed(how):
    assert twin_of_stacks(**how).written_as == {f"layers.{n}.stack": (f"layers.{n}.stack",) for n in range(2)}


def test_another_spelling_is_taken_where_the_loader_knows_its_scales_alone():
    def loading(model):
        load = loading_stacks(model)
        return lambda tensors: load(
            item for item in tensors if item[0].endswith(("stack", "other", "experts", "experts_scale_inv"))
        )

    found = twin_of_stacks(loading, aliases=("other", "experts")).written_as
    assert found == {f"layers.{n}.stack": (f"layers.{n}.experts",) for n in range(2)}


def test_scales_that_the_loader_rejects_have_no_name():
    assert set(twin_of_stacks(scale_name="{}.scale", aliases=("experts",)).written_as.values()) == {()}


def loading_experts(model, *, swaps=False):
    """A loader of whole stacks without scales, and of single experts with theirs."""
    stacks = loading_stacks(model)

    def load(tensors):
        for name, tensor in tensors:
            if ".gate_proj." not in name and ".up_proj." not in name:
                stacks(iter([(name, tensor)]))
                continue
            _, layer, _, expert, part, kind = name.split(".")
            into = getattr(model.layers[int(layer)], f"w13_{kind}").data[int(expert)]
            size = into.shape[0] // 2
            into.narrow(0, size * ((part == "up_proj") != swaps), size).copy_(tensor)

    return lambda tensors: load(
        item for item in tensors if not item[0].endswith(("stack_scale_inv", "gate_up_proj_scale_inv"))
    )


def test_experts_are_written_one_by_one_if_the_loader_takes_their_scales_so_alone():
    parts = [tuple(f"layers.{n}.experts.{{}}.{part}_proj.weight" for part in ("gate", "up")) for n in range(2)]
    found = twin_of_stacks(loading_experts, aliases=("experts.gate_up_proj",)).written_as
    assert found == {f"layers.{n}.stack": parts[n] for n in range(2)}


def test_single_experts_that_the_loader_puts_elsewhere_than_those_of_a_stack_have_no_name():
    found = twin_of_stacks(loading_experts, aliases=("experts.gate_up_proj",), swaps=True).written_as
    assert set(found.values()) == {()}


def test_scales_that_are_not_transposed_with_their_blocks_have_no_name():
    def loading(model):
        def load(tensors):
            for name, tensor in tensors:
                layer = model.layers[int(name.split(".")[1])]
                if name.endswith("_scale_inv"):
                    layer.w13_weight_scale_inv.data.copy_(tensor)
                else:
                    layer.w13_weight.data.copy_(tensor.transpose(1, 2))

        return load

    assert set(twin_of_stacks(loading).written_as.values()) == {()}


def test_scales_that_go_to_other_blocks_have_no_name():
    assert set(twin_of_stacks(swaps_scales=True).written_as.values()) == {()}


def test_halves_that_end_inside_a_block_have_no_name():
    # A stack of 384 rows has three rows of blocks, and its halves have two each.
    assert set(twin_of_stacks(rows=384).written_as.values()) == {()}


def test_halves_of_single_experts_have_blocks_of_their_own():
    model = Experts(384)
    metas = {
        f"{expert}.{half}": TensorMeta(shape=(192, 256), dtype=torch.bfloat16) for expert in range(4) for half in (0, 1)
    }

    def load(tensors):
        for name, tensor in tensors:
            expert, half = map(int, name.removesuffix("_scale_inv").split("."))
            into = model.w13_weight_scale_inv if name.endswith("_scale_inv") else model.w13_weight
            size = into.shape[1] // 2
            into.data[expert].narrow(0, half * size, size).copy_(tensor)

    assert trace_twin(model, Naming(tensors=metas), load, stored=STORED).written_as == {}


def test_matrices_whose_scales_are_left_out_have_no_name():
    model = model_of(a=BlockLinear(), b=BlockLinear(rows=384))

    def load(tensors):
        copying(model)(item for item in tensors if item[0] != "b.weight_scale_inv")

    assert trace_twin(model, naming_of(model), load, stored=STORED).written_as == {"b.weight": ()}


def test_a_loader_that_wants_a_whole_checkpoint_gets_one():
    model = model_of(**{f"layer_{n}": BlockLinear() for n in range(3)}, norm=nn.LayerNorm(8))
    wanted = {name for name, _ in model.named_parameters() if "scale_inv" not in name}

    def load(tensors):
        held = dict(tensors)
        assert held.keys() >= wanted
        copying(model)(iter(held.items()))

    assert trace_twin(model, naming_of(model), load, stored=STORED).written_as == {}


def test_nothing_is_said_of_models_that_load_no_scales():
    model = model_of(a=BlockLinear())
    assert trace_twin(model, naming_of(model), copying(model)).written_as == {}
