"""Loaders that nobody wrote: whatever views and orders one goes through, a refit leaves what it would have loaded."""

from math import prod

import hypothesis.strategies as st
import torch
from hypothesis import assume, example, given
from torch import Tensor, nn

from fp8refit.config import RefitConfig
from fp8refit.kernels import quantize_blockwise
from fp8refit.live.slots import TensorMeta
from fp8refit.ranks.target import Target
from fp8refit.sources.source import MappingSource
from fp8refit.tracing.reading import read_inventory
from fp8refit.tracing.reads import partly_read, refusals_of
from fp8refit.tracing.similar_layers import trace_similar
from fp8refit.tracing.trace import trace_loader
from fp8refit.tracing.twin import Naming, trace_twin
from tests.tracing.custom import BLOCK, Linear, SmallBlocks
from tests.tracing.models import FP8, model_of

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def chains(draw, *more: str):
    """The shape of a checkpoint tensor, and what a loader does with it before it is copied: names and numbers."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    tensor, steps = torch.empty(shape, device="meta"), []
    for _ in range(draw(st.integers(0, 5))):
        step = (
            draw(st.sampled_from(sorted(STEPS.keys() - MORE) + list(more))),
            draw(st.integers(0, 7)),
            draw(st.integers(0, 7)),
        )
        tensor = apply(tensor, [step])
        steps.append(step)
    return shape, steps


def narrowed(tensor: Tensor, a: int, b: int) -> Tensor:
    dim = a % tensor.ndim
    start = b % tensor.shape[dim]
    return tensor.narrow(dim, start, max(1, (tensor.shape[dim] - start) // 2))


def split(tensor: Tensor, a: int, b: int) -> Tensor:
    """A dimension as two."""
    dim = a % tensor.ndim
    size = tensor.shape[dim]
    inner = next((n for n in (2, 4, 3) if size % n == 0 and n != size), 1)
    return tensor.reshape(*tensor.shape[:dim], size // inner, inner, *tensor.shape[dim + 1 :])


def swapped(tensor: Tensor, a: int, b: int) -> Tensor:
    return tensor.transpose(a % tensor.ndim, b % tensor.ndim)


def joined(tensor: Tensor, a: int, b: int) -> Tensor:
    dim = a % tensor.ndim
    return tensor if dim + 1 == tensor.ndim else tensor.flatten(dim, dim + 1)


def chosen(tensor: Tensor, a: int, b: int) -> Tensor:
    dim = a % tensor.ndim
    return tensor if tensor.ndim == 1 else tensor.select(dim, b % tensor.shape[dim])


def turned(tensor: Tensor, a: int, b: int) -> Tensor:
    """What comes after an element of a dimension, then what comes before it."""
    dim = a % tensor.ndim
    size = tensor.shape[dim]
    start = b % size
    parts = (tensor.narrow(dim, start, size - start), tensor.narrow(dim, 0, start))
    return torch.cat(parts, dim) if start else tensor


def chosen_rows(tensor: Tensor, a: int, b: int) -> Tensor:
    """Every second of a dimension, the last first."""
    dim = a % tensor.ndim
    return tensor.index_select(dim, torch.arange(tensor.shape[dim]).flip(0)[::2])


STEPS = {
    "narrow": narrowed,
    "split": split,
    "swap": swapped,
    "join": joined,
    "select": chosen,
    "dense": lambda tensor, a, b: tensor.contiguous(),
    "cast": lambda tensor, a, b: tensor.to(torch.float32).clone(),
    "chunk": lambda tensor, a, b: tensor.chunk(2, a % tensor.ndim)[0],
    "turn": turned,
    "add nothing": lambda tensor, a, b: tensor + 0,
    "choose": chosen_rows,
}
MORE = ("add nothing", "choose")
"""Those that are no copies."""


def apply(tensor: Tensor, steps) -> Tensor:
    for name, a, b in steps:
        tensor = STEPS[name](tensor, a, b)
    return tensor


def refitted(model: nn.Module, shape, load, policy: Tensor) -> list[str]:
    """Refit `model` by what `load` does with a tensor of `shape`; gives the refusals."""
    naming = Naming(tensors={"source": TensorMeta(shape=shape, dtype=torch.bfloat16)})
    twin = trace_twin(model, naming, lambda tensors: [load(tensor) for _, tensor in tensors], num_ranks=2)
    inventory = read_inventory(model, SmallBlocks(), twin)
    if not inventory.refusals:
        target = Target(lambda: inventory, device=torch.device("cpu"), engine="fake", versions={})
        prepared = target.prepare(MappingSource({"source": policy}), RefitConfig())
        target.write(prepared)
    return [str(refusal) for refusal in inventory.refusals]


def policy_of(shape) -> Tensor:
    return (torch.arange(prod(shape), dtype=torch.float32) + 1).view(shape).to(torch.bfloat16)


def model_to_fill(shape) -> nn.Module:
    """A plain weight, and a quantized one."""
    model = model_of(plain=Linear(*shape, dtype=torch.float32), fp8=Linear(4, 4, dtype=FP8))
    model.plain.weight.fill_(-1.0)
    return model


def parts_of(tensor: Tensor, model: nn.Module, num_parts: int, dim: int):
    """Of a tensor and of the plain weight."""
    return zip(tensor.chunk(num_parts, dim), model.plain.weight.chunk(num_parts, dim), strict=True)


@given(chains(), st.integers(1, 3), st.data())
def test_a_plain_weight_is_what_its_loader_would_have_made_it(chain, num_parts, data):
    shape, steps = chain
    policy = policy_of(shape)
    loaded = apply(policy, steps).to(torch.float32)
    model = model_to_fill(loaded.shape)
    dim = data.draw(st.integers(0, loaded.ndim - 1))

    def load(tensor):
        for part, into in parts_of(apply(tensor, steps), model, num_parts, dim):
            into.copy_(part)
        model.fp8.weight.copy_(tensor.reshape(-1)[:1].expand(16).reshape(4, 4))

    refusals = refitted(model, shape, load, policy)
    assert [refusal for refusal in refusals if refusal.startswith("plain")] == []
    if not refusals:
        assert torch.equal(model.plain.weight, loaded)


SUMS = {
    "add": (lambda tensor: tensor + 1.0, lambda tensor: tensor.add_(1.0)),
    "double": (lambda tensor: tensor * 2, lambda tensor: tensor.mul_(2)),
    "negate": (lambda tensor: -tensor, lambda tensor: tensor.neg_()),
    "root": (lambda tensor: tensor.abs().sqrt(), lambda tensor: tensor.abs_().sqrt_()),
}
"""Arithmetic, apart and in place."""


def computed(tensor: Tensor, sums) -> Tensor:
    for name, is_in_place in sums:
        tensor = SUMS[name][is_in_place](tensor)
    return tensor


@given(
    st.lists(st.tuples(st.sampled_from(sorted(SUMS)), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(["source", "parameter", "another", "number"]),
)
@example([("add", True)], "source")
@example([("add", True)], "another")
@example([("add", True)], "number")
def test_what_a_loader_computes_is_computed_again(sums, where):
    def computing() -> nn.Module:
        model = model_to_fill((4,))
        model.plain.register_buffer("other", torch.full((4,), -1.0))
        model.plain.register_parameter("one", nn.Parameter(torch.full((1,), -1.0), requires_grad=False))
        return model

    def load(model: nn.Module, tensor: Tensor) -> None:
        plain = model.plain
        model.fp8.weight.copy_(tensor[:1].expand(16).reshape(4, 4))
        plain.one.fill_(tensor[:1].item())
        if where == "source":
            plain.weight.copy_(computed(tensor, sums))
            return
        plain.weight.copy_(tensor)
        if where == "parameter":
            plain.weight.copy_(computed(plain.weight.clone(), sums))
        elif where == "another":
            plain.other.copy_(plain.weight)
            computed(plain.other, [(sums[0][0], True)][: sums[0][0] != "root"])  # two in place come twice

    policy = policy_of((4,))
    model, expected = computing(), computing()
    refusals = refitted(model, (4,), lambda tensor: load(model, tensor), policy)
    assert refusals == []
    load(expected, policy.clone())
    for name in ("weight", "other", "one"):
        assert torch.equal(getattr(model.plain, name), getattr(expected.plain, name)), name
    if where == "number":

        def scale(tensor: Tensor) -> None:
            model.fp8.weight.copy_(tensor[:1].expand(16).reshape(4, 4))
            model.plain.one.fill_(tensor[:1].item())
            model.plain.weight.copy_(tensor * tensor[:1].item())

        assert refitted(model, (4,), scale, policy)


@given(chains(), st.integers(2, 4), st.sampled_from(["left out", "twice"]), st.data())
def test_a_part_that_is_left_out_or_comes_twice_is_refused(chain, num_parts, mistake, data):
    shape, steps = chain
    policy = policy_of(shape)
    loaded = apply(policy, steps).to(torch.float32)
    dim = data.draw(st.integers(0, loaded.ndim - 1))
    assume(loaded.shape[dim] > 1)
    model = model_to_fill(loaded.shape)

    def load(tensor):
        first, *rest = parts_of(apply(tensor, steps), model, num_parts, dim)
        for part, into in rest:
            into.copy_(part)
        if mistake == "twice":
            first[1].copy_(first[0])
            first[1].narrow(dim, 0, 1).copy_(first[0].narrow(dim, first[0].shape[dim] - 1, 1))

    assume(mistake == "left out" or -(-loaded.shape[dim] // num_parts) > 1)
    refusals = refitted(model, shape, load, policy)
    assert len([refusal for refusal in refusals if refusal.startswith("plain: `weight`: ")]) == 1


@given(chains())
@example(chain=((1, 1, 8), [("swap", 0, 2), ("join", 0, 0)]))
@example(chain=((8, 4), [("turn", 0, 3)]))
def test_a_quantized_weight_is_what_its_loader_would_have_made_it_quantized(chain):
    shape, steps = chain
    policy = policy_of(shape)
    loaded = apply(policy, steps)
    assume(loaded.ndim == 2)
    model = model_of(fp8=Linear(*loaded.shape, dtype=FP8))
    refusals = refitted(model, shape, lambda tensor: model.fp8.weight.copy_(apply(tensor, steps)), policy)
    assert refusals == []
    codes, scale = quantize_blockwise(loaded.to(torch.bfloat16), block_size=BLOCK)
    assert torch.equal(model.fp8.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(model.fp8.weight_scale_inv, scale)


def turned_by(count: int):
    return lambda experts: [*experts[count:], *experts[:count]]


ORDERS = {
    "as they come": list,
    "the last first": lambda experts: experts[::-1],
    "turned by one": turned_by(1),
    "turned by half": lambda experts: turned_by(len(experts) // 2)(experts),
    "one of two ranks": lambda experts: [*[-1] * (len(experts) // 2), *experts[: -(-len(experts) // 2)]],
    "in turn with another rank": lambda experts: [expert // 2 if expert % 2 else -1 for expert in experts],
}


@given(
    chains(*MORE), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4), st.integers(1, 3), st.data()
)
@example(chain=((4, 4), []), parts=[(0, 0), (0, 1)], num_ranks=2, data=None)
def test_what_no_rank_reads_is_refused_and_nothing_else(chain, parts, num_ranks, data):
    shape, steps = chain
    sources = {"source": TensorMeta(shape=shape, dtype=torch.bfloat16)}
    places, seen = torch.arange(prod(shape)).view(shape), torch.zeros(prod(shape), dtype=torch.bool)

    def part_of(tensor: Tensor, dim: int, index: int) -> Tensor:
        moved = apply(tensor, steps)
        dim %= moved.ndim
        size = -(-moved.shape[dim] // 2)
        return moved.narrow(dim, index % 2 * (moved.shape[dim] - size), size)

    by_rank = [[] for _ in range(num_ranks)]
    for part in parts:
        by_rank[data.draw(st.integers(0, num_ranks - 1)) if data is not None else part[1] % num_ranks].append(part)
        seen[part_of(places, *part).reshape(-1).long()] = True  # a step may have made them float32, which has them all
    ranks = []
    for mine in by_rank:
        into = {f"w{index}": torch.empty_like(part_of(places, *part), device="meta") for index, part in enumerate(mine)}

        def load(tensors, mine=mine, into=into):
            for _, tensor in tensors:
                for index, part in enumerate(mine):
                    into[f"w{index}"].copy_(part_of(tensor, *part))

        ranks.append(partly_read(trace_loader(load, into, sources), sources))
    refusals = refusals_of(ranks)
    num_bare = int((~seen).sum())
    expected = [f"{num_bare} of its {prod(shape)} elements are read by no rank"] if num_bare else []
    told = [refusal.reason for refusal in refusals]
    # Too many boxes to look at are taken for a whole.
    assert told == expected or (not told and any(read.boxes == () for rank in ranks for read in rank.values()))


HOWS = ("copy", "twice as large", "not at all")


def with_two_exchanged(experts: list[int]) -> list[int]:
    middle = len(experts) // 2
    return [*experts[:middle], experts[middle + 1], experts[middle], *experts[middle + 2 :]]


@given(
    st.integers(8, 40),
    st.lists(st.sampled_from(sorted(ORDERS)), min_size=2, max_size=5),
    st.sets(st.integers(0, 4)),
    st.lists(st.sampled_from(HOWS), min_size=5, max_size=5),
    st.booleans(),
)
@example(num_experts=8, orders=["as they come"] * 2, exchanges=set(), hows=["twice as large"] * 5, apart=True)
@example(
    num_experts=13,
    orders=["in turn with another rank"] * 2,
    exchanges=set(),
    hows=[HOWS[2], *HOWS[:1] * 4],
    apart=False,
)
@example(num_experts=40, orders=["as they come"] * 3, exchanges={2}, hows=["copy"] * 5, apart=False)
@example(
    num_experts=8,
    orders=["in turn with another rank", "as they come", "in turn with another rank"],
    exchanges=set(),
    hows=["copy", "copy", "twice as large", "copy", "copy"],
    apart=False,
)
def test_layers_of_experts_are_traced_as_if_each_were_traced_whole(num_experts, orders, exchanges, hows, apart):
    leaves = "wv" if apart else "ww"
    """The parameters that hold `a` and `b`."""
    names = [f"layers.{layer}.{leaf}" for layer in range(len(orders)) for leaf in leaves]
    weights = {name: torch.empty(num_experts, 2, 4, device="meta") for name in names}
    places = [ORDERS[order](list(range(num_experts))) for order in orders]
    places = [with_two_exchanged(held) if layer in exchanges else held for layer, held in enumerate(places)]

    def load(tensors):
        for name, tensor in tensors:
            _, layer, _, expert, leaf = name.split(".")
            place, how = places[int(layer)][int(expert)], hows[int(layer)]
            if place >= 0 and (how != "not at all" or leaf == "a"):
                into = weights[f"layers.{layer}.{leaves[leaf == 'b']}"][place, int(leaf == "b")]
                into.copy_(tensor * 2 if how == "twice as large" and leaf == "b" else tensor)

    meta = TensorMeta(shape=(4,), dtype=torch.bfloat16)
    names = [(layer, expert, leaf) for layer in range(len(orders)) for expert in range(num_experts) for leaf in "ab"]
    sources = {f"layers.{layer}.experts.{expert}.{leaf}": meta for layer, expert, leaf in names}
    found, expected = trace_similar(load, weights, sources), trace_loader(load, weights, sources)
    assert set(found.copies) == set(expected.copies)
    assert sorted(map(written, found.computed)) == sorted(map(written, expected.computed))


def written(computed) -> tuple[str, int]:
    return computed.parameter, computed.into.into
