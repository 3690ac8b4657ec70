"""Streams of weights with products: what is merged while it is quantized, what is made first, and that nobody can tell."""

from dataclasses import dataclass

import pytest
import torch

import fp8refit.fill.direct
import fp8refit.fill.program
from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError, NonFiniteError
from fp8refit.kernels.products import LowRank
from fp8refit.kernels.triton_table import TritonTable
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.row_runs import Recipe, cut
from tests.fakes import FakeModel, assert_holds, make_policy, make_target, refit_target

EMBED = "model.embed_tokens.weight"
Q_PROJ, K_PROJ, V_PROJ, O_PROJ = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo")
UP_PROJ, DOWN_PROJ = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down"))
PROJECTIONS = [Q_PROJ, K_PROJ, V_PROJ, O_PROJ, UP_PROJ, DOWN_PROJ]


@dataclass(kw_only=True, slots=True, eq=False)
class Sum(Recipe):
    """Of a weight and a product, which its reader may add or not."""

    adapter: LowRank
    is_only_made: bool

    @property
    def product(self):
        return None if self.is_only_made else self.adapter


class Adapted:
    """A policy and low-rank products. Notes what it was asked to make."""

    is_repeatable = True

    def __init__(self, policy, adapters, *, only_made=(), names=None):
        self.policy, self.adapters, self.only_made = policy, adapters, only_made
        self.names = names or list(policy)
        self.made = []
        self.most_bytes = 0
        """Of what was made at once."""

    def scan(self):
        return {name: TensorMeta.of(tensor) for name, tensor in self.policy.items()}, ()

    def merged(self):
        return {name: self.value(name, tensor) for name, tensor in self.policy.items()}

    def value(self, name, rows, first=0):
        adapter = self.adapters.get(name)
        if adapter is None:
            return rows
        return torch.addmm(rows, adapter.up[first : first + len(rows)], adapter.down, alpha=adapter.scale)

    def __iter__(self):
        return iter(self.merged().items())

    def recipes(self, max_bytes):
        for name in self.names:
            (piece,) = cut(name, self.policy[name], 1 << 40)
            if name in self.adapters:
                options = {"adapter": self.adapters[name], "is_only_made": name in self.only_made}
                yield Sum(name=name, first_row=0, tensor=piece.tensor, full_shape=piece.full_shape, **options)
            else:
                yield piece

    def make(self, recipes, outs):
        for recipe, out in zip(recipes, outs, strict=True):
            self.made.append(recipe.name)
            self.most_bytes = max(self.most_bytes, out.nbytes)
            out.copy_(self.value(recipe.name, recipe.tensor, recipe.first_row))


def values(*shape, seed, dtype=torch.bfloat16):
    """Their products have exact sums: every order of summation gives the same."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8).round().to(dtype) / 8


def adapters_of(policy, names, *, rank=16, seed=0, scale=0.5):
    return {
        name: LowRank(
            values(policy[name].shape[0], rank, seed=seed), values(rank, policy[name].shape[1], seed=seed + 1), scale
        )
        for name in names
    }


def policy_of(model, seed=1, dtype=torch.bfloat16):
    return {
        name: values(*tensor.shape, seed=seed + len(name), dtype=dtype)
        for name, tensor in make_policy(model, seed, dtype).items()
    }


@pytest.fixture
def model():
    return FakeModel()


@pytest.fixture(params=["reference", "Triton"])
def target(request, model, device, monkeypatch):
    if request.param == "Triton":
        if device.type == "cuda":
            pytest.skip("the model is on the CPU")
        monkeypatch.setattr(fp8refit.fill.program, "compile_table", TritonTable)
        monkeypatch.setattr(fp8refit.fill.program, "join_tables", TritonTable.joined)
    return make_target(model)


@pytest.fixture(params=[2, 96])
def at_once(request, monkeypatch):
    """How many are looked at together."""
    monkeypatch.setattr("fp8refit.fill.stream._MOST_TOGETHER", request.param)


def refit(target, model, source, *, made):
    """Everything holds the merged policy, and so much of it was made first."""
    refit_target(target, source)
    assert_holds(model, source.merged())
    assert sorted(source.made) == sorted(made)


@pytest.mark.usefixtures("at_once")
def test_steps_of_a_training_run(target, model):
    """Adapters move on, change their rank, scale or place, are switched off and on, and weights move too."""
    policy = policy_of(model)
    adapters = adapters_of(policy, PROJECTIONS)
    refit(target, model, Adapted(policy, adapters), made=[])
    for each in adapters.values():
        each.up += 1
    refit(target, model, Adapted(policy, adapters), made=[])
    refit(target, model, Adapted(policy, adapters_of(policy, PROJECTIONS, seed=5, scale=-2.0)), made=[])
    refit(target, model, Adapted(policy, {}), made=[])
    refit(target, model, Adapted(policy, adapters_of(policy, [K_PROJ], seed=6)), made=[])
    refit(target, model, Adapted(policy, adapters_of(policy, [V_PROJ], seed=6)), made=[])
    refit(target, model, Adapted(policy, adapters_of(policy, PROJECTIONS, rank=8)), made=[])
    refit(target, model, Adapted(policy, adapters_of(policy, PROJECTIONS, rank=8, seed=9)), made=[])
    refit(target, model, Adapted(policy_of(model, seed=2), adapters), made=[])
    refit(target, model, Adapted(policy_of(model, seed=2), adapters, names=[*reversed(policy)]), made=[])


@pytest.mark.usefixtures("at_once")
def test_what_cannot_be_merged_on_the_way_is_made_first(target, model):
    """What is not quantized, what only its source can compute, and adapters that lie in an unusual way."""
    policy = policy_of(model)
    adapters = adapters_of(policy, [EMBED, *PROJECTIONS])
    adapters[V_PROJ].down = adapters[V_PROJ].down.mT.contiguous().mT
    adapters[O_PROJ].up = adapters[O_PROJ].up.mT.contiguous().mT
    made = [EMBED, Q_PROJ, V_PROJ, O_PROJ]
    for _ in range(3):
        refit(target, model, Adapted(policy, adapters, only_made=[Q_PROJ]), made=made)
    refit(target, model, Adapted(policy, adapters_of(policy, [EMBED, *PROJECTIONS])), made=[EMBED])


@pytest.mark.usefixtures("at_once")
def test_products_of_weights_that_this_rank_holds_nothing_of(target, model):
    policy = policy_of(model)
    far = "model.layers.9.mlp.up_proj.weight"
    sent = policy | {far: values(256, 192, seed=3)}
    for adapters in [adapters_of(sent, [far])] * 3 + [adapters_of(sent, [far, Q_PROJ], seed=seed) for seed in range(3)]:
        source = Adapted(sent, adapters)
        target.write(target.prepare(source, RefitConfig(), foreign=frozenset([far])))
        target.commit()
        merged = source.merged()
        assert_holds(model, {name: merged[name] for name in policy})


@pytest.mark.parametrize("drain", [False, True])
def test_an_error_of_the_device_is_raised_as_it_is(drain, target, model, monkeypatch):
    """Nothing more is written after it, although other streams are read to their end then."""
    monkeypatch.setattr("fp8refit.fill.stream._MOST_TOGETHER", 2)
    monkeypatch.setattr("fp8refit.fill.staging.Staging.bucket_bytes", 70_000)
    policy = policy_of(model)
    source = Adapted(policy, adapters_of(policy, PROJECTIONS), only_made=PROJECTIONS)
    prepared = target.prepare(source, RefitConfig())
    filled, fill = [], fp8refit.fill.direct.DirectFill.fill

    def failing(self, tensors, *, are_together):
        filled.append([each.name for each in tensors])
        if tensors[0].first_row is not None:
            raise torch.OutOfMemoryError("no memory is left")
        fill(self, tensors, are_together=are_together)

    monkeypatch.setattr(fp8refit.fill.direct.DirectFill, "fill", failing)
    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        target.write(prepared, drain=drain)
    assert filled[-1][0] in PROJECTIONS
    num_filled = len(filled)
    assert num_filled < 10


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("bucket_bytes", [1, 70_000])
def test_what_is_made_is_no_larger_than_a_bucket(bucket_bytes, target, model, monkeypatch):
    monkeypatch.setattr("fp8refit.fill.staging.Staging.bucket_bytes", bucket_bytes)
    policy = policy_of(model)
    source = Adapted(policy, adapters_of(policy, PROJECTIONS), only_made=PROJECTIONS)
    for _ in range(2):
        source.made.clear()
        refit_target(target, source)
        assert_holds(model, source.merged())
        assert len(source.made) > len(PROJECTIONS)
        assert source.most_bytes <= max(bucket_bytes, 128 * 512 * 2), "a row of blocks at least"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype, target, model):
    policy = policy_of(model, dtype=dtype)
    adapters = {name: LowRank(each.up.to(dtype), each.down.to(dtype), each.scale)
                for name, each in adapters_of(policy, PROJECTIONS).items()}  # fmt: skip
    for _ in range(2):
        refit(target, model, Adapted(policy, adapters), made=[])


@pytest.mark.parametrize("validate", ["fused", "strict"])
def test_nan_in_an_adapter_is_named(validate, target, model):
    policy = policy_of(model)
    adapters = adapters_of(policy, PROJECTIONS)
    adapters[DOWN_PROJ].down[3, 200] = torch.nan
    for _ in range(2):
        with pytest.raises(NonFiniteError) as caught:
            refit_target(target, Adapted(policy, adapters), validate=validate)
        assert list(caught.value.names) == [DOWN_PROJ]
    adapters[DOWN_PROJ].down[3, 200] = 0
    source = Adapted(policy, adapters)
    refit_target(target, source, validate=validate)
    assert_holds(model, source.merged())


def test_a_weight_that_comes_twice_or_not_at_all_is_refused(target, model):
    policy = policy_of(model)
    source = Adapted(policy, adapters_of(policy, PROJECTIONS))
    refit(target, model, source, made=[])
    for names, why in (
        ([*policy, Q_PROJ], "sent twice"),
        ([name for name in policy if name != Q_PROJ], "did not arrive"),
    ):
        with pytest.raises(InvalidSourceError, match=f"{Q_PROJ}: .*{why}"):
            refit_target(target, Adapted(policy, source.adapters, names=names))
    refit(target, model, Adapted(policy, source.adapters), made=[])


def test_what_is_held_is_compared_with_the_merged_policy(target, model):
    policy = policy_of(model)
    adapters = adapters_of(policy, PROJECTIONS)
    refit(target, model, Adapted(policy, adapters), made=[])
    adapters[UP_PROJ].up[100] += 1
    for expected in ([UP_PROJ], [UP_PROJ]):
        prepared = target.prepare(Adapted(policy, adapters), RefitConfig(), compares=True)
        assert list(target.write(prepared).differing) == expected


def test_adapters_that_stay_where_they_are_are_recognized_at_once(target, model, monkeypatch):
    """By one call to torch, but not if one lies otherwise."""
    policy = policy_of(model)
    adapters = adapters_of(policy, PROJECTIONS)
    recognized, fill_group = [], fp8refit.fill.direct.DirectFill.fill_group
    monkeypatch.setattr(
        fp8refit.fill.direct.DirectFill,
        "fill_group",
        lambda *group: recognized.append(fill_group(*group)) or recognized[-1],
    )
    for expected in (False, False, True, True):
        refit(target, model, Adapted(policy, adapters), made=[])
        for each in adapters.values():
            each.scale += 0.25
        assert recognized.pop() is expected
    memory = values(adapters[Q_PROJ].up.numel() + 1, seed=3)
    adapters[Q_PROJ].up = memory[1:].view(adapters[Q_PROJ].up.shape)
    refit(target, model, Adapted(policy, adapters), made=[])
    assert recognized.pop() is False
