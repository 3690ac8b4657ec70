"""Slots of live models by what the loaders of their twins do."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fp8refit.live.formats import PER_ROW, BlockFormat, ScaleFormat
from fp8refit.live.slots import Stacked, TensorMeta
from fp8refit.tracing.reading import read_inventory
from fp8refit.tracing.reads import partly_read, refusals_of
from fp8refit.tracing.twin import Naming, refreshes_of_constants, trace_as_named, trace_twin
from tests.tracing.models import FP8, SPLITS, BlockLinear, check_ranks, checkpoint_of, model_of
from tests.tracing.twins import KERNEL, FakeKernelRules, copying, identity_twin, loading, naming_of, twin_of_rank

BF16 = torch.bfloat16


def read(model, twin=None):
    return read_inventory(model, FakeKernelRules(), twin if twin is not None else identity_twin(model))


def only_refusal(model, twin=None) -> str:
    (refusal,) = read(model, twin).refusals
    return str(refusal)


@pytest.mark.parametrize(("num_ranks", "num_kv_heads", "vocabulary"), SPLITS)
def test_each_rank_holds_what_its_slots_say(num_ranks, num_kv_heads, vocabulary):
    checkpoint = checkpoint_of(num_kv_heads, vocabulary)
    ranks = iter(range(num_ranks))

    def read_rank(model):
        return read(model, twin_of_rank(model, checkpoint, next(ranks), num_ranks))

    check_ranks(read_rank, checkpoint, num_ranks)


def test_a_parameter_that_no_tensor_fills_is_refused_and_one_that_is_filled_in_part():
    model = model_of(a=BlockLinear(), b=BlockLinear(), c=BlockLinear())
    named = dict(model.named_parameters())

    def load(tensors):
        for name, tensor in tensors:
            if name != "a.weight":
                named[name][: 200 if name == "b.weight" else None].copy_(tensor[: 200 if name == "b.weight" else None])

    twin = trace_twin(model, naming_of(model), load)
    assert [str(refusal).split(". ")[0] for refusal in read(model, twin).refusals] == [
        "a.weight: is left out by the model's loader",
        "a: `weight`: 65536 of its 65536 elements are not loaded from any checkpoint tensor",
        "b: `weight`: 14336 of its 65536 elements are not loaded from any checkpoint tensor",
    ]


def test_a_tensor_of_which_a_part_is_read_is_refused():
    model = model_of(a=BlockLinear(), b=BlockLinear())
    metas = {name: TensorMeta(shape=(512, 256), dtype=BF16) for name in ("a.weight", "b.weight")}
    load = copying(model, dict.fromkeys(metas, lambda tensor: tensor[:256]))
    refusals = read(model, trace_twin(model, Naming(tensors=metas), load)).refusals
    assert [refusal.module for refusal in refusals] == ["a.weight", "b.weight"]
    assert all("65536 of its 131072 elements are read by no rank" in refusal.reason for refusal in refusals)


@pytest.mark.parametrize("changes", [{}, {"head.bias": lambda tensor: tensor + 1}], ids=["copied", "computed"])
def test_what_the_loader_fills_and_the_live_model_lacks_is_refused(changes):
    """vLLM registers the bias of some models' heads while it loads a checkpoint, so not in a dummy boot."""
    built = model_of(proj=BlockLinear(), head=nn.LayerNorm(256, dtype=BF16))
    live = model_of(proj=BlockLinear(), head=nn.LayerNorm(256, dtype=BF16, bias=False))
    said = only_refusal(live, trace_twin(built, naming_of(built), copying(built, changes)))
    assert said.startswith("head.bias: is filled by the model's loader, but the live model does not have it")


EVERY_OTHER = {"columns": lambda tensor, first: tensor[:, first::2], "rows": lambda tensor, first: tensor[first::2]}


def interleaved(part, num_read):
    """What is read of a tensor in turns of its rows or columns, by a loader that reads one or both of the halves."""
    size = (2560, 5120)
    shape = EVERY_OTHER[part](torch.empty(size, device="meta"), 0).shape
    model = model_of(b=nn.Module())
    for half in range(2):
        model.b.register_parameter(f"half_{half}", nn.Parameter(torch.empty(shape, dtype=BF16, device="meta")))
    metas = {"b.weight": TensorMeta(shape=size, dtype=BF16)}

    def load(tensors):
        for _, tensor in tensors:
            for half in range(num_read):
                getattr(model.b, f"half_{half}").data.copy_(EVERY_OTHER[part](tensor, half))

    return partly_read(trace_twin(model, Naming(tensors=metas), load).traced, metas)


@pytest.mark.parametrize("part", EVERY_OTHER)
def test_a_tensor_of_which_every_other_row_or_column_is_read_is_refused(part):
    assert interleaved(part, 2) == {}
    (refusal,) = refusals_of([interleaved(part, 1)])
    assert refusal.reason == "6553600 of its 13107200 elements are read by no rank"


@pytest.mark.parametrize(("num_read", "num_bare"), [(2, 0), (1, 128 * 5760 * 2880)])
def test_experts_read_row_by_row_are_judged_by_the_number_of_elements(num_read, num_bare):
    """In as many boxes as there are rows of them all."""
    model = model_of(b=nn.Module())
    model.b.register_parameter("part", nn.Parameter(torch.empty(128, 2880, 2880, dtype=BF16, device="meta")))
    metas = {"b.weight": TensorMeta(shape=(128, 5760, 2880), dtype=BF16)}

    def load(tensors):
        for _, tensor in tensors:
            for expert in range(128):
                for half in range(num_read):
                    model.b.part.data[expert].copy_(tensor[expert, half::2])

    start_s = time.perf_counter()
    refusals = refusals_of([partly_read(trace_twin(model, Naming(tensors=metas), load).traced, metas)])
    assert [refusal.reason.startswith(f"{num_bare} of its") for refusal in refusals] == [True] * bool(num_bare)
    assert time.perf_counter() - start_s < 10


LEAVING_OUT = {
    "rows of a sum": (lambda tensor: (1 + tensor)[:5], 3 * 6),
    "columns of a sum": (lambda tensor: (tensor.exp() * 2)[:, ::2], 8 * 3),
    "a part of a joint tensor": (lambda tensor: torch.cat([tensor[4:], -tensor[:4]], 1)[:, 1:], 4),
    "a part of a sum, later spread": (lambda tensor: (tensor + 1)[:1, :2].expand(4, 2) - 1, 8 * 6 - 2),
    "a part of what was spread": (lambda tensor: (tensor[:, None] + tensor[:1])[:4, 0], 4 * 6),
    "overlapping parts of a sum": (lambda tensor: (tensor + 1).flatten().unfold(0, 3, 1)[:4], 8 * 6 - 6),
    "chosen rows": (lambda tensor: (tensor + 1).index_select(0, torch.tensor([3, 0, 3])), 6 * 6),
    "chosen rows, a part of them": (lambda tensor: tensor.index_select(0, torch.tensor([3, 0, 5]))[:2] + 1, 6 * 6),
    "rows that the tensor chooses": (lambda tensor: tensor.index_select(0, tensor[:2, 0].long()) + 1, 0),
    "rows that the tensor indexes": (lambda tensor: (tensor[tensor[:2, 0].long()] + 1)[:1], 0),
    "two halves of a sum": (lambda tensor: torch.cat([(sum := tensor + 1)[4:], sum[:4]]), 0),
    "half of a sum twice": (lambda tensor: torch.cat([(sum := tensor + 1)[4:], sum[4:]]), 4 * 6),
    "a number of a sum": (lambda tensor: (tensor + tensor[2, 2])[:2], 6 * 6 - 1),
    "nothing of a sum": (lambda tensor: torch.cat([(tensor + 1)[:0], tensor[:3] - 1]), 5 * 6),
    "indexed rows": (lambda tensor: (tensor + 1)[torch.tensor([3, 0, 3])], 6 * 6),
    "all rows, indexed": (lambda tensor: (tensor + 1)[torch.arange(8).flip(0)], 0),
    "a number that is chosen": (lambda tensor: (tensor[0, 0] + 1).index_select(0, torch.tensor([0])), 8 * 6 - 1),
    "a part of flipped rows": (lambda tensor: (tensor + 1).flip(0)[:5], 3 * 6),
    "a part of a stack": (lambda tensor: torch.stack([tensor[:4] + 1, tensor[4:] - 1])[:, :3], 2 * 6),
    "a part of repeated rows": (lambda tensor: (tensor + 1).repeat(2, 1)[2:6], 4 * 6),
    "only a shape": (lambda tensor: torch.cat([tensor[:4] + 1, tensor[4:].new_zeros(1, 6)]), 4 * 6),
    "an unknown operation that nothing is taken of": (
        lambda tensor: torch.cat([tensor[:4].softmax(1), tensor[4:].softmax(1)])[:4],
        4 * 6,
    ),
    "rows in another order": (lambda tensor: tensor.index_select(0, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])) + 1, 0),
    "a part of turned rows": (lambda tensor: (tensor.roll(2, 0) + 1)[:6], 2 * 6),
    "both of two that share a sum": (lambda tensor: torch.cat([tensor + 1, -(tensor + 1)])[8:], 0),
    "a mean": (lambda tensor: (tensor - tensor.mean())[:1], 0),
    "every element": (lambda tensor: -tensor.exp(), 0),
}


@pytest.mark.parametrize("how", LEAVING_OUT)
def test_what_a_computation_leaves_out_is_not_read(how):
    compute, num_bare = LEAVING_OUT[how]
    metas = {"b.weight": TensorMeta(shape=(8, 6), dtype=BF16)}
    model = model_of(b=nn.Module())
    shape = compute(torch.empty(8, 6, device="meta")).shape
    model.b.register_parameter("weight", nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
    traced = trace_twin(model, Naming(tensors=metas), copying(model, {"b.weight": compute})).traced
    assert traced.computed and not traced.copies
    refusals = refusals_of([partly_read(traced, metas)])
    reasons = [f"{num_bare} of its 48 elements are read by no rank"] if num_bare else []
    assert [refusal.reason for refusal in refusals] == reasons


def in_turns(tensor, rank):
    """A rank's half of the experts, and of these the rows of the first projection before those of the second."""
    mine = tensor[rank * tensor.shape[0] // 2 :][: tensor.shape[0] // 2]
    return torch.cat([mine[:, ::2], mine[:, 1::2]], 1)


def a_half(tensor, rank):
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    return rows[rank * len(rows) // 2 : (rank + 1) * len(rows) // 2]


def in_pieces(tensor, rank):
    return torch.cat([each - 1 for each in a_half(tensor, rank).chunk(16)])


@pytest.mark.parametrize(
    ("take", "shape"),
    [
        (a_half, (40000, 16)),
        (a_half, (40000, 1, 4)),
        (a_half, (31, 50, 8)),
        (a_half, (7,)),
        (in_pieces, (64, 512, 512)),
        (in_turns, (8, 4200, 2)),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_that_take_a_part_of_a_sum_each_read_it_all_together(take, shape, num_ranks):
    metas = {"b.weight": TensorMeta(shape=shape, dtype=BF16)}
    ranks, start_s = [], time.perf_counter()
    for rank in range(num_ranks):
        model = model_of(b=nn.Module())
        mine = torch.empty(take(torch.empty(shape, device="meta"), rank).shape, device="meta")
        model.b.register_parameter("weight", nn.Parameter(mine, requires_grad=False))
        load = copying(model, {"b.weight": lambda tensor, rank=rank: take(tensor.float() + 1, rank)})
        twin = trace_twin(model, Naming(tensors=metas), load, num_ranks=num_ranks)
        ranks.append(partly_read(twin.traced, metas))
    assert len(refusals_of(ranks)) == 2 - num_ranks
    assert time.perf_counter() - start_s < 10


def test_a_tensor_that_is_viewed_as_elements_of_another_size_is_refused():
    model = model_of(proj=BlockLinear(), other=nn.Linear(256, 256, bias=False, dtype=BF16))
    load = copying(model, {"other.weight": lambda tensor: tensor.view(torch.int16).view(torch.uint8)[:, ::2]})
    refusals = read(model, trace_twin(model, naming_of(model), load)).refusals
    assert refusals[0].module == "other.weight"
    assert "is not taken by the model's loader (TypeError: views torch.int16 as torch.uint8)" in refusals[0].reason


def test_two_tensors_of_one_sum_read_it_together():
    model = model_of(b=nn.Module())
    for half in range(2):
        model.b.register_parameter(f"half_{half}", nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False))
    metas = {"b.weight": TensorMeta(shape=(8, 6), dtype=BF16)}

    def load(tensors):
        for _, tensor in tensors:
            made = tensor + 1
            model.b.half_0.data.copy_(made[::2])
            model.b.half_1.data.copy_(made[1::2])

    assert partly_read(trace_twin(model, Naming(tensors=metas), load).traced, metas) == {}


def test_a_read_that_no_boxes_describe_counts_as_none():
    """Down the diagonal."""
    model = model_of(b=nn.Module())
    model.b.register_parameter("weight", nn.Parameter(torch.empty(2048, dtype=BF16, device="meta")))
    metas = {"b.weight": TensorMeta(shape=(2048, 2048), dtype=BF16)}
    load = copying(model, {"b.weight": torch.diagonal})
    partly = partly_read(trace_twin(model, Naming(tensors=metas), load).traced, metas)
    (refusal,) = refusals_of([partly])
    assert refusal.module == "b.weight" and "read in a pattern that fp8refit cannot describe" in refusal.reason


def test_names_that_the_loader_does_not_take_are_refused_together_and_have_no_slot():
    model = model_of(proj=BlockLinear())
    naming = naming_of(model)
    names = ("proj.bias", "other.weight", "model.rotary_emb.inv_freq")
    extra = {**naming.tensors, **dict.fromkeys(names, TensorMeta(shape=(256,), dtype=BF16))}
    inventory = read(model, trace_twin(model, Naming(tensors=extra), copying(model)))
    assert [refusal.module for refusal in inventory.refusals] == ["proj.bias", "other.weight"]
    assert all("256 of its 256 elements are read by no rank" in refusal.reason for refusal in inventory.refusals)
    assert all("is not taken by the model's loader (KeyError" in refusal.reason for refusal in inventory.refusals)
    assert inventory.names == {"proj.weight"}


def test_parameters_that_are_not_those_of_the_twin_are_refused():
    twin = identity_twin(model_of(proj=BlockLinear(), norm=nn.LayerNorm(8)))
    changed = model_of(proj=BlockLinear(), norm=nn.LayerNorm(16))
    assert "holds `weight` as float32 [16], and was built with float32 [8]" in only_refusal(changed, twin)
    grown = model_of(proj=BlockLinear(), norm=nn.LayerNorm(8), late=nn.LayerNorm(8))
    assert "holds `weight`, which is not there when the model is built" in only_refusal(grown, twin)


def test_heads_that_take_turns_are_slots_of_blocks_of_their_own():
    model = model_of(qkv=BlockLinear(rows=768))
    in_turns = {"qkv.weight": lambda tensor: tensor.view(2, 3, 128, 256).transpose(0, 1).reshape(768, 256)}
    load = copying(model, in_turns)
    inventory = read(model, trace_twin(model, naming_of(model), load))
    assert inventory.refusals == inventory.refreshes == ()
    places = {(slot.weight.data_ptr() - model.qkv.weight.data_ptr()) // 256: slot.origin[0] for slot in inventory.slots}
    assert places == {0: 0, 128: 384, 256: 128, 384: 512, 512: 256, 640: 640}
    assert all(slot.scale.shape == (1, 2) for slot in inventory.slots)


@pytest.mark.parametrize("how", ["heads of 64", "transposed", "cat"])
def test_what_does_not_lie_on_blocks_is_put_in_order_and_quantized_after_a_fill(how):
    from fp8refit import quantize_blockwise

    model = model_of(proj=BlockLinear(rows=384))
    full_shape = (256, 384) if how == "transposed" else (384, 256)

    def ordered(tensor):
        if how == "transposed":
            return tensor.t()
        heads = tensor.view(2, 3, 64, 256)
        return (
            torch.cat([heads[:, i].reshape(128, 256) for i in range(3)])
            if how == "cat"
            else (heads.transpose(0, 1).reshape(384, 256))
        )

    naming = Naming(tensors={"proj.weight": TensorMeta(shape=full_shape, dtype=BF16)})
    inventory = read(model, trace_twin(model, naming, copying(model, {"proj.weight": ordered})))
    assert inventory.refusals == ()
    (slot,) = inventory.slots
    assert (slot.full_shape, slot.weight.dtype, slot.is_rearranged) == (full_shape, BF16, True)
    policy = torch.randn(full_shape).to(BF16)
    slot.weight.copy_(policy)
    for refresh in inventory.refreshes:
        refresh.run()
    codes, scale = quantize_blockwise(ordered(policy))
    assert torch.equal(model.proj.weight.data.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(model.proj.weight_scale_inv, scale)


def test_a_buffer_that_is_computed_from_another_weight_follows_it():
    """As norms of Gemma keep `1 + weight`."""
    model = model_of(norm=nn.LayerNorm(8, bias=False), proj=BlockLinear())
    model.norm.register_buffer("plus_one", torch.ones(8))

    def load(tensors):
        copying(model)(tensors)
        model.norm.plus_one.copy_(model.norm.weight.data).add_(1.0)

    inventory = read(model, trace_twin(model, naming_of(model), load))
    assert inventory.refusals == ()
    assert {slot.name for slot in inventory.slots} == {"norm.weight", "proj.weight"}
    model.norm.weight.data.copy_(torch.arange(8.0))
    for refresh in inventory.refreshes:
        refresh.run()
    assert torch.equal(model.norm.plus_one, 1 + torch.arange(8.0))


def test_a_buffer_of_which_nobody_knows_what_the_loader_writes_is_refused():
    model = model_of(norm=nn.LayerNorm(8, bias=False), proj=BlockLinear())
    model.norm.register_buffer("halves", torch.ones(8))

    def load(tensors):
        copying(model)(tensors)
        model.norm.halves.fill_(0.5)

    refusal = only_refusal(model, trace_twin(model, naming_of(model), load))
    assert refusal.startswith("norm: `halves`: is changed by aten.fill_.Scalar when it is loaded")


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_buffer_that_is_computed_from_what_the_engine_keeps_otherwise_is_refused(is_quantized):
    model = model_of(norm=nn.LayerNorm(8, bias=False), proj=BlockLinear())
    model.norm.register_buffer("other", torch.ones(8))
    naming = naming_of(model)
    model.norm.late = nn.Parameter(torch.ones(8))
    other = model.proj.weight[0, :8] if is_quantized else model.norm.late

    def load(tensors):
        copying(model)(tensors)
        model.norm.other.copy_(other.data)

    twin = trace_twin(model, naming, load)
    del model.norm.late
    assert "`other` is computed from weights that the engine keeps in another form" in only_refusal(model, twin)


def test_constants_that_no_checkpoint_holds_are_those_that_the_model_was_built_with():
    model = model_of(proj=BlockLinear())
    model.register_buffer("normalizer", torch.tensor(16.0))
    model.register_buffer("rope", torch.ones(4), persistent=False)
    twin = identity_twin(model)
    live = model_of(proj=BlockLinear())
    live.register_buffer("normalizer", torch.tensor(0.001))
    live.register_buffer("rope", torch.zeros(4), persistent=False)
    (refresh,) = refreshes_of_constants(live, twin, lambda _: ())
    refresh.run()
    assert live.normalizer == 16.0
    assert [tensor is live.normalizer for tensor in refresh.written] == [True]
    assert not live.rope.any()


def load_all_but(model, left_out):
    load = copying(model)
    return lambda tensors: load((name, tensor) for name, tensor in tensors if name != left_out)


def test_a_parameter_that_nothing_fills_keeps_the_one_number_that_it_was_built_with():
    model = model_of(proj=BlockLinear(), norm=nn.LayerNorm(256))
    naming = naming_of(model)
    tensors = {name: meta for name, meta in naming.tensors.items() if name != "norm.weight"}
    twin = trace_twin(model, replace(naming, tensors=tensors), copying(model))
    live = model_of(proj=BlockLinear(), norm=nn.LayerNorm(256))
    live.norm.weight.data.normal_()
    inventory = read(live, twin)
    assert inventory.refusals == ()
    (refresh,) = inventory.refreshes
    refresh.run()
    assert (live.norm.weight == 1).all()
    assert [tensor.data_ptr() for tensor in refresh.written] == [live.norm.weight.data_ptr()]
    assert {slot.name for slot in inventory.slots} == tensors.keys()


def test_one_number_does_not_excuse_a_tensor_that_is_not_read():
    model = model_of(proj=BlockLinear(), norm=nn.LayerNorm(256))
    twin = trace_twin(model, naming_of(model), load_all_but(model, "norm.weight"))
    assert "norm.weight: 256 of its 256 elements are read by no rank" in only_refusal(model, twin)


@pytest.mark.parametrize("values", ["several numbers", "block FP8"])
def test_other_parameters_that_nothing_fills_are_refused(values):
    model = model_of(
        proj=BlockLinear(), other=BlockLinear() if values == "block FP8" else nn.LayerNorm(256, bias=False)
    )
    if values == "block FP8":
        model.other.weight.data.zero_()
    else:
        model.other.weight.data[3] = 2
    tensors = {name: meta for name, meta in naming_of(model).tensors.items() if name != "other.weight"}
    twin = trace_twin(model, Naming(tensors=tensors), copying(model))
    assert "are not loaded from any checkpoint tensor" in only_refusal(model, twin)


def test_a_parameter_that_is_filled_under_another_name_is_no_constant():
    model = model_of(proj=BlockLinear(), first=nn.LayerNorm(256, bias=False), second=nn.LayerNorm(256, bias=False))
    tensors = {name: meta for name, meta in naming_of(model).tensors.items() if name != "first.weight"}
    twin = trace_twin(model, Naming(tensors=tensors), copying(model))
    model.first.weight = model.second.weight
    inventory = read(model, twin)
    assert inventory.refreshes == ()


def test_a_checkpoint_has_the_first_names_that_the_loader_takes_and_else_the_first():
    model = model_of(proj=BlockLinear())
    model.load_weights = copying(model)
    meta = TensorMeta(shape=(256, 256), dtype=BF16)
    wrong, right = (Naming(tensors={name: meta}) for name in ("tower.proj.weight", "proj.weight"))
    for namings, taken in (([wrong, right], right), ([right, wrong], right), ([wrong, wrong], wrong)):
        twin = trace_as_named(model, namings, num_ranks=1)
        assert twin.naming.tensors == taken.tensors
    assert trace_as_named(model, [], num_ranks=1) is None


def test_parameters_side_by_side_in_one_storage_are_refused():
    """Were they taken for one, what is loaded into the second would count as the first's, too."""
    model = model_of(a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 8, bias=False), proj=BlockLinear())
    packed = torch.zeros(2, 8, 8)
    model.a.weight.data, model.b.weight.data = packed
    naming = naming_of(model)
    del naming.tensors["a.weight"]
    refusals = read(model, trace_twin(model, naming, copying(model))).refusals
    assert [refusal.module for refusal in refusals] == ["a", "b"]
    assert "lies in one storage with `b.weight`" in refusals[0].reason


def test_a_quantized_weight_that_is_padded_is_refused():
    model = model_of(proj=BlockLinear(rows=384))

    def load(tensors):
        for _, tensor in tensors:
            model.proj.weight[:256].copy_(tensor)
            model.proj.weight[256:].fill_(0)

    naming = Naming(tensors={"proj.weight": TensorMeta(shape=(256, 256), dtype=BF16)})
    refusal = only_refusal(model, trace_twin(model, naming, load))
    assert refusal.startswith("proj: `weight` is padded when it is loaded, and the scales of the padding are unknown")


def test_why_a_loader_does_not_take_a_name_is_told_before_what_is_not_filled():
    model = model_of(proj=BlockLinear(), other=BlockLinear())

    def load(tensors):
        for name, tensor in tensors:
            if name == "other.weight":
                raise KeyError("other")
            model.proj.weight.copy_(tensor)

    inventory = read(model, trace_twin(model, naming_of(model), load))
    assert [refusal.module for refusal in inventory.refusals] == ["other.weight", "other"]
    assert "is not taken by the model's loader (KeyError: 'other')" in inventory.refusals[0].reason


def test_arithmetic_on_a_quantized_weight_is_refused_by_name():
    model = model_of(proj=BlockLinear(), other=BlockLinear())
    load = copying(model, {"proj.weight": lambda tensor: tensor * 2})
    refusal = only_refusal(model, trace_twin(model, naming_of(model), load))
    assert refusal.startswith("proj: `weight` is computed (aten.mul.Tensor) before it is quantized")


def test_a_slot_says_what_the_rules_say_of_its_layer():
    powers = replace(KERNEL, name="Another", format=BlockFormat(scale_format=ScaleFormat.UE8M0))
    a, b = read(model_of(a=BlockLinear(), b=BlockLinear(kernel=powers))).slots
    assert (a.kernel, a.format, a.module) == (KERNEL.name, KERNEL.format, "a")
    assert (b.kernel, b.format) == ("Another", powers.format)


def test_a_tied_weight_is_a_second_name_and_a_bias_beside_it_a_slot():
    embed, head = nn.Embedding(64, 128), nn.Linear(128, 64)
    head.weight = embed.weight
    model = model_of(embed=embed, head=head, proj=BlockLinear())
    naming = replace(naming_of(model), tied={"head.weight": "embed.weight"})
    inventory = read(model, trace_twin(model, naming, copying(model)))
    assert inventory.aliases == {"head.weight": "embed.weight"}
    assert [slot.name for slot in inventory.slots] == ["embed.weight", "head.bias", "proj.weight"]


def two_weights():
    linear = partial(nn.Linear, 8, 8, bias=False, dtype=BF16)
    return model_of(a=linear(), b=linear(), proj=BlockLinear())


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (lambda tensor: tensor, False),
        (lambda tensor: tensor.t(), True),
        (lambda tensor: tensor + 1, True),
        (lambda tensor: tensor[torch.arange(8)], True),
    ],
    ids=["alike", "transposed", "computed", "indexed"],
)
def test_two_tensors_in_one_storage_are_filled_alike_or_refused(change, is_refused):
    built, live = two_weights(), two_weights()
    live.b.weight = live.a.weight
    twin = trace_twin(built, naming_of(built), copying(built, {"b.weight": change}))
    if is_refused:
        said = "b: `weight` shares its memory with `a.weight`, but the model's loader may fill each in its own way"
        assert only_refusal(live, twin).startswith(said)
    else:
        assert read(live, twin).aliases == {"b.weight": "a.weight"}


@pytest.mark.parametrize("change", [lambda tensor: tensor, lambda tensor: tensor + 1], ids=["copied", "computed"])
def test_two_tensors_in_one_storage_are_refused_if_each_is_a_half_of_a_third(change):
    built, live = two_weights(), two_weights()
    live.b.weight = live.a.weight
    naming = naming_of(built)
    tensors = {"proj.weight": naming.tensors["proj.weight"], "both.weight": TensorMeta(shape=(16, 8), dtype=BF16)}

    def load(tensors):
        for name, tensor in tensors:
            if name == "both.weight":
                built.a.weight.data.copy_(change(tensor[:8]))
                built.b.weight.data.copy_(change(tensor[8:]))
            else:
                built.proj.weight.data.copy_(tensor)

    twin = trace_twin(built, Naming(tensors=tensors), load)
    assert "b: `weight` shares its memory with `a.weight`" in only_refusal(live, twin)


def test_a_transposed_view_of_a_weight_is_no_second_name_of_it():
    built, live = two_weights(), two_weights()
    live.b.weight.data = live.a.weight.data.t()
    assert read(live, identity_twin(built)).aliases == {}


def test_a_layer_that_another_holds_too_has_one_name():
    layer, attention = BlockLinear(), nn.Module()
    attention.o_proj = layer
    inventory = read(model_of(o_proj=layer, attn=attention))
    assert [slot.name for slot in inventory.slots] == ["o_proj.weight"]
    assert inventory.aliases == {}


def test_what_is_kept_has_no_slot_and_is_watched():
    attention = nn.Module()
    attention.k_scale = nn.Parameter(torch.tensor(0.5))
    attention.kept = ("k_scale",)
    attention.sinks = nn.Parameter(torch.zeros(4))  # comes after what is kept
    model = model_of(attn=attention, proj=BlockLinear())
    model.register_buffer("rotary", torch.ones(4))
    inventory = read(model)
    assert {slot.name for slot in inventory.slots} == {"attn.sinks", "proj.weight"}
    assert {entry.name for entry in inventory.live} >= {"attn.k_scale", "rotary"}
    assert inventory.refusals == ()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BlockLinear(kernel=replace(KERNEL, format=None)), "its kernel Plain repacks weights"),
        (BlockLinear(base_layer=nn.Module()), "holds `weight`, `weight_scale_inv` around a layer, for LoRA"),
        (BlockLinear(why_refused=("is odd", "Take another")), "is odd. Take another"),
    ],
)
def test_what_cannot_be_refitted_is_refused_by_name(module, reason):
    refusal = only_refusal(model_of(thing=module))
    assert refusal.startswith("thing: ")
    assert reason in refusal


def test_the_rules_may_refuse_a_module_without_parameters_and_the_model_itself():
    attention = nn.Module()
    attention.why_refused = ("is odd", "Take another")
    assert only_refusal(model_of(attention=attention, proj=BlockLinear())) == "attention: is odd. Take another"
    model = model_of(proj=BlockLinear())
    model.why_refused = ("is odd", "Take another")
    assert only_refusal(model) == "Module: is odd. Take another"


@pytest.mark.parametrize("dtype", [FP8, BF16, torch.uint8])
def test_another_quantization_is_refused(dtype):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(128, 128, dtype=dtype), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.ones(1))
    refusal = only_refusal(model_of(layer=layer))
    assert "not block FP8" in refusal
    assert FakeKernelRules.other_quantization in refusal


def test_a_model_without_quantized_weights_is_refitted_as_it_is_and_its_log_says_so(caplog):
    inventory = read(model_of(proj=nn.Linear(8, 8)))
    assert inventory.refusals == ()
    assert {(slot.name, slot.format) for slot in inventory.slots} == {("proj.weight", None), ("proj.bias", None)}
    (record,) = caplog.records
    assert record.getMessage() == (
        "Module holds no quantized weight, and is refitted as it is. If that is not wanted: Quantize it"
    )


def test_a_quantized_model_is_not_told_to_quantize(caplog):
    read(model_of(proj=BlockLinear(), head=nn.Linear(8, 8)))
    assert caplog.records == []


def test_a_weight_that_a_subclass_of_tensor_stands_for_is_refused():
    """As torchao's are: they say that they are BF16."""
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(8, 8), torch.ones(8, 8)))
    assert only_refusal(model_of(odd=layer)).startswith("odd: holds weight (float32) under NoneType")


def test_a_model_whose_quantized_layers_are_refused_is_not_told_to_quantize():
    packed = nn.Linear(8, 8)
    packed.weight = nn.Parameter(torch.empty(0))
    (refusal,) = read(model_of(proj=BlockLinear(), packed=packed)).refusals
    assert str(refusal).startswith("packed: its kernel removed `weight`")


def test_a_layer_wrapped_for_lora_keeps_its_name():
    wrapper = nn.Module()
    wrapper.base_layer = BlockLinear()
    inventory = read(model_of(proj=wrapper), identity_twin(model_of(proj=BlockLinear())))
    assert inventory.refusals == ()
    (slot,) = inventory.slots
    assert (slot.name, slot.module) == ("proj.weight", "proj.base_layer")


def test_experts_wrapped_for_lora_are_refused_by_name():
    experts, wrapper = nn.Module(), nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 256, 128, dtype=FP8), requires_grad=False)
    wrapper.base_layer = experts
    refusal = only_refusal(model_of(proj=BlockLinear(), experts=wrapper), identity_twin(model_of(proj=BlockLinear())))
    assert refusal.startswith("experts.base_layer: is a layer of experts inside a LoRA wrapper")


def test_a_buffer_that_is_a_view_of_a_parameter_has_no_slots_of_its_own():
    """As Mamba mixers keep their convolution's weight without a dimension."""
    mixer = nn.Module()
    mixer.conv1d = nn.Conv1d(8, 8, 4, groups=8, bias=False)
    mixer.register_buffer("conv_weights", mixer.conv1d.weight.data.squeeze(1))
    model = model_of(mixer=mixer, proj=BlockLinear())
    inventory = read(model)
    assert inventory.refusals == ()
    assert [slot.name for slot in inventory.slots] == ["mixer.conv1d.weight", "proj.weight"]


def test_a_weight_that_the_engine_ties_after_loading_is_a_second_name():
    embed, head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
    twin = identity_twin(model_of(embed=embed, head=head, proj=BlockLinear()))
    head.weight = embed.weight
    inventory = read(model_of(embed=embed, head=head, proj=BlockLinear()), twin)
    assert inventory.refusals == ()
    assert inventory.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, "its `weight_scale_inv` is int32 [2, 2], not"),
        ({"weight_scale_inv": torch.ones(1, 2)}, "its `weight_scale_inv` is float32 [1, 2], not"),
        ({"weight_scale_inv": torch.ones(2, 1).expand(2, 2)}, "not row-major float32 [2, 2]"),
        ({"weight": torch.zeros(256, 256, dtype=FP8).t()}, "its `weight` is not a row-major float8_e4m3fn matrix"),
        ({"weight": torch.zeros(0, dtype=FP8)}, "its kernel removed `weight`"),
    ],
)
def test_storage_in_another_layout_is_refused(changed, reason):
    layer = BlockLinear()
    twin = identity_twin(model_of(proj=BlockLinear()))
    for name, tensor in changed.items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    assert reason in only_refusal(model_of(proj=layer), twin)


@pytest.mark.parametrize("rows", [128, 256])
def test_codes_with_one_scale_per_row_may_be_held_as_columns(rows):
    """As engines hold them, in the memory of rows; the matrix may be square."""

    def layer(weight):
        made = nn.Module()
        made.kernel = replace(KERNEL, format=PER_ROW)
        for name, tensor in {"weight": weight, "weight_scale": torch.ones(rows, 1)}.items():
            setattr(made, name, nn.Parameter(tensor, requires_grad=False))
        return model_of(proj=made)

    codes = torch.zeros(rows, 256, dtype=FP8)
    booted, naming = layer(codes), Naming(tensors={"proj.weight": TensorMeta.of(codes)})
    inventory = read(layer(codes.t()), trace_twin(booted, naming, copying(booted)))
    assert inventory.refusals == ()
    (slot,) = inventory.slots
    assert (slot.name, slot.format, tuple(slot.scale.shape)) == ("proj.weight", PER_ROW, (rows, 1))
    assert tuple(slot.weight.shape) == slot.full_shape == (rows, 256)
    assert slot.weight.is_contiguous() and slot.weight.data_ptr() == codes.data_ptr()


def test_experts_in_mxfp4_are_refused_by_name():
    experts = nn.Module()
    for name, shape in {"w13_weight": (2, 256, 64), "w13_weight_scale": (2, 256, 4), "w2_weight": (2, 128, 64)}.items():
        setattr(experts, name, nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False))
    refusal = only_refusal(model_of(proj=BlockLinear(), experts=experts))
    assert refusal.startswith("experts: holds w13_weight (uint8), w13_weight_scale (uint8), w2_weight (uint8)")


@pytest.mark.parametrize("is_up_first", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_matrices_of_a_stack_are_slots_wherever_the_rank_has_them(is_up_first, is_transposed):
    layer = nn.Module()
    layer.is_up_first = is_up_first
    for name, shape in {"w13_weight": (2, 256, 128), "w2_weight": (2, 128, 128)}.items():
        setattr(layer, name, nn.Parameter(torch.zeros(shape, dtype=FP8), requires_grad=False))
        grid = torch.arange(shape[0] * shape[1] // 128, dtype=torch.float32).view(2, -1, 1)
        setattr(layer, f"{name}_scale_inv", nn.Parameter(grid, requires_grad=False))
    model = model_of(experts=layer)
    metas = {
        "gate_up": TensorMeta(shape=(4, 128, 256) if is_transposed else (4, 256, 128), dtype=BF16),
        "down": TensorMeta(shape=(4, 128, 128), dtype=BF16),
    }

    def load(tensors):
        for name, tensor in tensors:
            for place, expert in enumerate((3, 1)):
                if name == "gate_up":
                    matrix = tensor[expert].t() if is_transposed else tensor[expert]
                    for half, part in enumerate(matrix.chunk(2)):
                        layer.w13_weight[place, 128 * half : 128 * (half + 1)].copy_(part)
                else:
                    layer.w2_weight[place].copy_(tensor[expert])

    inventory = read(model, trace_twin(model, Naming(tensors=metas), load, num_ranks=2))
    assert inventory.refusals == ()
    parts = {f"gate_up[{expert}]": (expert, 0) for expert in (3, 1)}
    assert inventory.stacked[0] == Stacked(
        name="gate_up", shape=(4, 256, 128), parts=parts, is_transposed=is_transposed
    )
    for slot in inventory.slots:
        is_down, expert = slot.name.startswith("down"), int(slot.name[-2])
        place = {3: 0, 1: 1}[expert]
        half = 0 if is_down else (slot.origin[0] // 128) ^ is_up_first
        held = layer.w2_weight if is_down else layer.w13_weight
        scale = layer.w2_weight_scale_inv if is_down else layer.w13_weight_scale_inv
        assert slot.weight.data_ptr() == held[place, 128 * half :].data_ptr()
        assert slot.scale.data_ptr() == scale[place, half:].data_ptr()
    assert len(inventory.slots) == 6


@pytest.mark.parametrize("is_up_first", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("in_one_copy", [False, True])
def test_a_stack_that_is_not_quantized_is_written_in_place(is_up_first, is_transposed, in_one_copy):
    layer = nn.Module()
    layer.is_up_first = is_up_first
    layer.w13_weight = nn.Parameter(torch.zeros(4, 16, 8, dtype=BF16), requires_grad=False)
    model, shape = model_of(experts=layer), (4, 8, 16) if is_transposed else (4, 16, 8)

    def load(tensors):
        for _, tensor in tensors:
            for expert in range(4):
                matrix = tensor[expert].t() if is_transposed else tensor[expert]
                rows = layer.w13_weight[expert]
                for here, part in zip(
                    [rows] if in_one_copy else rows.chunk(2), matrix.chunk(2 - in_one_copy), strict=True
                ):
                    here.copy_(part)

    naming = Naming(tensors={"gate_up": TensorMeta(shape=shape, dtype=BF16)})
    inventory = read(model, trace_twin(model, naming, load))
    assert inventory.refusals == () and inventory.refreshes == ()
    policy = torch.randn(shape).to(BF16)
    for slot in inventory.slots:
        assert slot.weight.untyped_storage().data_ptr() == layer.w13_weight.untyped_storage().data_ptr()
        sent = policy[int(slot.name[-2])].t() if is_transposed else policy
        for (start, length), dim in zip(
            zip(slot.origin, slot.weight.shape, strict=True), range(sent.ndim), strict=True
        ):
            sent = sent.narrow(dim, start, length)
        slot.weight.copy_(sent)
    whole = policy.mT if is_transposed else policy
    assert torch.equal(layer.w13_weight, whole.roll(8, 1) if is_up_first else whole)


def test_halves_that_a_kernel_swaps_and_no_copy_fills_in_order_are_refused():
    layer = nn.Module()
    layer.is_up_first = True
    layer.w13_weight = nn.Parameter(torch.zeros(1, 16, 8, dtype=BF16), requires_grad=False)
    naming = Naming(tensors={"gate_up": TensorMeta(shape=(1, 16, 8), dtype=BF16)})
    load = loading(lambda _, tensor: layer.w13_weight.copy_(tensor[:, torch.arange(16).view(8, 2).t().reshape(-1)]))
    model = model_of(experts=layer)
    (refusal,) = read(model, trace_twin(model, naming, load)).refusals
    assert "is not copied in order, and its kernel keeps its halves swapped. Choose a kernel" in str(refusal)


def test_a_name_of_transformers_own_and_one_without_a_prefix_are_second_names():
    model = model_of(proj=BlockLinear())
    naming = Naming(
        tensors={"model.proj.weight": TensorMeta(shape=(256, 256), dtype=BF16)},
        aliases={"backbone.proj.weight": "model.proj.weight"},
        others={"proj.weight": "model.proj.weight"},
        tied={"head.weight": "model.proj.weight"},
    )

    load = loading(lambda name, tensor: model.get_parameter(name.removeprefix("model.")).copy_(tensor))
    inventory = read(model, trace_twin(model, naming, load))
    assert inventory.aliases == dict.fromkeys(
        ("head.weight", "backbone.proj.weight", "proj.weight"), "model.proj.weight"
    )


@pytest.mark.parametrize("takes", [None, "down", "up"])
def test_a_loader_that_skips_names_without_a_prefix_is_asked_for_one_of_each_kind(takes):
    names = [f"layers.{layer}.{kind}.weight" for layer in range(4) for kind in ("up", "down")]
    model = model_of(
        layers=model_of(**{str(layer): model_of(up=BlockLinear(), down=BlockLinear()) for layer in range(4)})
    )
    naming = Naming(
        tensors={f"model.{name}": TensorMeta(shape=(256, 256), dtype=BF16) for name in names},
        others={name: f"model.{name}" for name in names},
    )
    asked = []

    def load(tensors):
        for name, tensor in tensors:
            if name.startswith("model.") or (takes and takes in name):
                dict(model.named_parameters())[name.removeprefix("model.")].copy_(tensor)
            elif takes is None:
                asked.append(name)

    inventory = read(model, trace_twin(model, naming, load))
    assert inventory.refusals == ()
    assert inventory.aliases == {name: f"model.{name}" for name in names if takes and takes in name}
    assert len(asked) == (0 if takes else 2)


LOADERS = {
    "skips": lambda named: skipping(named, raises=False),
    "raises": lambda named: skipping(named, raises=True),
    "takes": lambda named: skipping(named, raises=False, takes="draft.layers.0.weight"),
    "computes": lambda named: skipping(named, raises=False, takes="draft.layers.0.weight", scale=2.0),
}


def skipping(named, *, raises, takes="", scale=1.0):
    """A loader that skips what it has no place for, raises for it, or takes some of it."""

    def load(tensors):
        for name, tensor in tensors:
            if name in named:
                named[name].copy_(tensor)
            elif name == takes:
                named["layers.0.weight"].copy_(tensor if scale == 1.0 else tensor * scale)
            elif raises:
                raise KeyError(name)

    return load


@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_declared_beside_a_model_is_unneeded_if_its_loader_skips_it(kind):
    model = model_of(layers=nn.ModuleList([BlockLinear(), BlockLinear()]))
    named = dict(model.named_parameters())
    naming = replace(naming_of(model), beside=("draft.*", "layers.2.*"))
    inventory = read(model, trace_twin(model, naming, LOADERS[kind](named)))
    assert not inventory.refusals
    skipped = {"skips": ("draft.*", "layers.2.*"), "raises": ()}.get(kind, ("layers.2.*",))
    assert inventory.unneeded == skipped
