"""The drop-in's rule, on ranks of every layout: what begins a policy, what completes it, and what may never become one."""

import gc
import json
import logging
import re
import weakref
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8refit
from fp8refit.driver.completeness import Claims, Stream
from fp8refit.driver.drop_in import DropIn, DropInOptions, _digest
from fp8refit.errors import (
    UNEXPECTED,
    EngineBusyError,
    EngineDirtyError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    UnsupportedEngineError,
)
from fp8refit.fill.stream_writer import StreamWriter
from fp8refit.live.formats import PER_TENSOR
from fp8refit.live.slots import Refusal
from fp8refit.live.turn import DisplacedError
from tests import fakes
from tests.fake_kv import ATTENTION, K_SCALE
from tests.fake_ranks import (
    K_PROJ,
    NORM,
    O_PROJ,
    Q_PROJ,
    ClientEntryPoint,
    Cluster,
    Drivers,
    stack_experts,
    together,
)

logger = logging.getLogger("tests.drop_in")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


class Site:
    """The ranks of one engine, and what their trainer loads on each at once."""

    def __init__(self, layout="tensor", *, kv=(), change=lambda shard: None, **options):
        self.cluster = Cluster(layout, kv=kv)
        for shard in self.cluster.shards:
            change(shard)
        self.clients = Drivers(self.cluster).clients
        options = DropInOptions(drop_in=True, **options)
        pairs = zip(self.clients, self.cluster.ranks, strict=True)
        self.drop_ins = together([partial(DropIn, client, rank, options, logger) for client, rank in pairs])

    def each(self, call):
        """What `call` gives or raises on every rank, which all make it at once."""
        return together([partial(call, drop_in) for drop_in in self.drop_ins])

    def load(self, *buckets):
        """Bucket after bucket; the outcome of each, on every rank."""
        return [self.each(lambda drop_in, bucket=bucket: drop_in.load(bucket)) for bucket in buckets]

    def load_policy(self, policy, size=1):
        items = list(policy.items())
        return self.load(*(items[start : start + size] for start in range(0, len(items), size)))

    @property
    def versions(self):
        return [target.version for target in self.cluster.targets]

    @property
    def is_dirty(self):
        return [target.is_dirty for target in self.cluster.targets] == [True] * len(self.clients)

    def assert_holds(self, policy, version):
        self.cluster.assert_holds(policy, version=version)
        assert [client.blocked for client in self.clients] == [None] * len(self.clients)


@pytest.fixture(params=["alone", "tensor", "pipeline", "expert", "experts in parts", "experts apart"])
def site(request):
    return Site(request.param)


@pytest.mark.parametrize("size", [1, 3, 99])
def test_a_policy_is_whole_with_its_last_tensor_and_not_before(size, site):
    for version, seed in enumerate((3, 4, 3), start=1):
        policy = site.cluster.make_policy(seed)
        items = list(policy.items())
        for start in range(0, len(items), size):
            assert site.versions == [version - 1] * len(site.clients)
            came = site.load(items[start : start + size])[0]
            assert came == [set(dict(items[start : start + size]))] * len(site.clients)
        site.assert_holds(policy, version)


def test_tensors_are_taken_from_iterators_and_mappings_in_any_order(site):
    for version, make in enumerate((iter, dict, list, tuple), start=1):
        policy = site.cluster.make_policy(version)
        items = list(policy.items())
        items = items[:: -1 if version % 2 else 1]
        site.each(lambda drop_in, make=make, items=items: drop_in.load(make(items)))
        site.assert_holds(policy, version)


def test_what_an_iterator_lends_is_read_before_it_is_asked_for_the_next():
    site = Site()
    policy = site.cluster.make_policy(3)

    def lend():
        for name, tensor in policy.items():
            lent = tensor.clone()
            yield name, lent
            lent.fill_(torch.nan)

    site.each(lambda drop_in: drop_in.load(lend()))
    site.assert_holds(policy, 1)


def test_two_policies_in_one_bucket_are_two(site):
    first, second = site.cluster.make_policy(1), site.cluster.make_policy(2)
    site.load([*first.items(), *second.items()])
    site.assert_holds(second, 2)


def test_wrapped_names_and_stacked_experts_are_those_of_the_engine():
    for layout in ("experts in parts", "experts apart"):
        site = Site(layout)
        policy = site.cluster.make_policy(1)
        site.load_policy({f"module._orig_mod.{name}": tensor for name, tensor in stack_experts(policy).items()})
        site.assert_holds(policy, 1)


def test_block_fp8_is_whole_with_its_last_scale():
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    items = []
    for name, tensor in policy.items():
        if tensor.ndim == 2:
            codes, scale = fp8refit.quantize_blockwise(tensor)
            items += [(name, codes), (f"{name}_scale_inv", scale)]
        else:
            items.insert(0, (name, tensor))
    o_proj = next(index for index, (name, _) in enumerate(items) if name.endswith("o_proj.weight"))
    codes, scale = fp8refit.quantize_blockwise(policy[items[o_proj][0]], scale_format="ue8m0")
    items[o_proj : o_proj + 2] = [(items[o_proj][0], codes), (items[o_proj + 1][0], scale)]
    outcomes = site.load(*([item] for item in items[:-1]))
    assert site.versions == [0], outcomes
    site.load(items[-1:])
    site.assert_holds(policy, 1)


@pytest.mark.parametrize("fault", ["nan", "shape"])
def test_a_fault_leaves_all_ranks_dirty_and_the_next_policy_heals_them(fault, site):
    policy, whole = site.cluster.make_policy(1), site.cluster.make_policy(2)
    for place in range(len(policy)):
        name = list(policy)[place]
        bad = torch.full_like(policy[name], torch.nan) if fault == "nan" else policy[name][:1]
        outcomes = site.load_policy(policy | {name: bad})
        kind = NonFiniteError if fault == "nan" else InvalidSourceError
        assert all(isinstance(error, kind) and name in str(error) for error in outcomes[-1]), outcomes[-1]
        assert site.is_dirty
        assert all("failed part way" in client.blocked for client in site.clients)
        site.load_policy(whole)
        site.assert_holds(whole, place + 1)


def test_a_tensor_without_memory_is_named_on_every_rank(site):
    policy = site.cluster.make_policy(1)
    name = list(policy)[-1]
    outcomes = site.load_policy(policy | {name: policy[name].to("meta")})
    assert all(isinstance(error, InvalidSourceError) and name in str(error) for error in outcomes[-1]), outcomes[-1]
    assert site.is_dirty


@pytest.mark.parametrize("rank", [0, -1])
def test_what_one_rank_holds_otherwise_than_it_was_left_is_refused_on_all_until_a_policy_comes(rank, site):
    policy, whole = site.cluster.make_policy(1), site.cluster.make_policy(2)
    site.load_policy(policy)
    assert site.each(lambda drop_in: drop_in.accept()) == [None] * len(site.clients)
    assert site.each(lambda drop_in: drop_in.look("trainer.update")) == [None] * len(site.clients)
    written = next(site.cluster.shards[rank].parameters())
    written.data.view(torch.uint8).view(-1)[0] ^= 1  # nothing in torch notes it
    outcomes = site.each(lambda drop_in: drop_in.look("trainer.update"))
    assert all(isinstance(error, UnsupportedEngineError) and "trainer.update wrote" in str(error) for error in outcomes)
    assert site.is_dirty
    assert all("trainer.update wrote" in client.blocked for client in site.clients)
    site.load_policy(dict(reversed(whole.items())))
    site.assert_holds(whole, 2)
    assert site.each(lambda drop_in: drop_in.look("trainer.update")) == [None] * len(site.clients)


@pytest.mark.parametrize("is_open", [True, False])
def test_after_a_cut_any_tensor_begins_the_next_policy(is_open, site):
    broken, whole = site.cluster.make_policy(1), site.cluster.make_policy(2)
    items, backwards = list(broken.items()), list(reversed(whole.items()))
    site.load(items[: len(items) // 2])
    if not is_open:
        site.load([("nobody.has", torch.zeros(1))])
    assert site.is_dirty
    site.each(lambda drop_in: drop_in.cut())
    site.load(*([item] for item in backwards))
    site.assert_holds(whole, 1)
    site.each(lambda drop_in: drop_in.cut())
    site.assert_holds(whole, 1)


def test_between_two_buckets_and_after_deep_sleep_nobody_looks(site):
    policy = site.cluster.make_policy(1)
    assert site.each(lambda drop_in: drop_in.accept()) == [None] * len(site.clients)
    items = list(policy.items())
    site.load(items[:1])
    assert site.each(lambda drop_in: drop_in.look("trainer.update")) == [None] * len(site.clients)
    site.load(items[1:])
    site.assert_holds(policy, 1)
    for target, shard in zip(site.cluster.targets, site.cluster.shards, strict=True):
        target.forget_values()
        next(shard.parameters()).data.view(torch.uint8).fill_(0x55)
    assert site.each(lambda drop_in: drop_in.look("trainer.update")) == [None] * len(site.clients)


def test_a_stream_that_breaks_off_is_never_completed_by_another_policy(site, caplog):
    # Cut everywhere, and everywhere the rest of the one and the beginning of the other would be a whole policy.
    first, second = site.cluster.make_policy(1), site.cluster.make_policy(2)
    items = list(first.items())
    for version, place in enumerate(range(1, len(items)), start=1):
        site.load(*([item] for item in items[:place]))
        assert site.is_dirty
        caplog.clear()
        site.load_policy(second)
        assert f"{len(items) - place} tensors were missing" in caplog.text
        assert all(name in caplog.text for name in list(first)[place : place + 8])
        site.assert_holds(second, version)


def test_what_broke_off_within_a_call_is_not_completed_by_the_next_one(site):
    items = list(site.cluster.make_policy(1).items())

    def broken():
        yield items[0]
        raise ConnectionError("the trainer is gone")

    outcomes = site.each(lambda drop_in: drop_in.load(broken()))
    assert [type(outcome) for outcome in outcomes] == [ConnectionError] * len(site.clients)
    outcomes = site.load(*([item] for item in items[1:]))
    assert all(isinstance(error, EngineDirtyError) for error in outcomes[-1]), outcomes
    assert site.is_dirty
    policy = site.cluster.make_policy(2)
    site.load_policy(policy)
    site.assert_holds(policy, 1)


def test_an_interrupt_within_a_call_is_the_end_of_its_policy(site, monkeypatch):
    """What was taken and not written yet may be overwritten when the call is over."""
    policy = site.cluster.make_policy(1)
    items = [(name, tensor.clone()) for name, tensor in policy.items()]
    with monkeypatch.context() as patch:
        patch.setattr(DropIn, "_hand_over", interrupt)
        outcomes = site.load(items[:3])[0]
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt] * len(site.clients)
    for _, tensor in items[:3]:
        tensor.zero_()
    outcomes = site.load(items[3:])[0]
    assert all(isinstance(error, EngineDirtyError) for error in outcomes), outcomes
    site.load_policy(policy)
    site.assert_holds(policy, 1)


def test_an_interrupt_at_the_end_mark_is_the_end_of_the_update(monkeypatch):
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    (drop_in,) = site.drop_ins
    drop_in.begin()
    drop_in.load(list(policy.items()))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(drop_in, "_hand_over", interrupt)
        drop_in.end()
    assert site.is_dirty
    assert not drop_in.is_open
    site.load_policy(policy)
    site.assert_holds(policy, 1)


def interrupt(*_):
    raise KeyboardInterrupt


class Staging(StreamWriter):
    """Takes tensors as if they were on another device."""

    def __init__(self, arrivals, staging, direct, **options):
        super().__init__(arrivals, staging, None, **options)


@pytest.mark.parametrize("writer", [StreamWriter, Staging])
def test_a_bucket_that_is_sent_again_as_it_was_is_ignored(writer, site, monkeypatch):
    """Two pipeline stages may each send a tied embedding; a trainer may repeat a call."""
    monkeypatch.setattr("fp8refit.fill.stream.StreamWriter", writer)
    policy = site.cluster.make_policy(1)
    items = list(policy.items())
    outcomes = site.load(*([item] for item in (*items[:-1], items[1], *items[:2], items[-1], items[-1], items[2])))
    assert all(isinstance(came, set) for outcome in outcomes for came in outcome), outcomes
    site.assert_holds(policy, 1)
    whole = site.cluster.make_policy(2)
    site.load_policy(whole)
    site.assert_holds(whole, 2)


def test_a_bucket_that_is_sent_again_otherwise_breaks_its_policy_off(site):
    policy, other = site.cluster.make_policy(1), site.cluster.make_policy(2)
    items = list(policy.items())
    outcomes = site.load(*([item] for item in (*items[:-1], (items[1][0], other[items[1][0]]), items[-1], *items[1:])))
    assert all(isinstance(error, EngineDirtyError) for outcome in outcomes[len(items) - 1 :] for error in outcome)
    assert f"beginning with {items[0][0]}" in str(outcomes[-1][0])
    assert site.is_dirty
    site.load_policy(policy)
    site.assert_holds(policy, 1)
    assert not site.drop_ins[0].is_open


def test_any_tensor_may_begin_the_next_policy(site):
    """Pipeline stages are sources that come in any order."""
    for version, start in enumerate((0, 2, 1, 0, 3, 3), start=1):
        policy = site.cluster.make_policy(version)
        items = list(policy.items())
        site.load(*([item] for item in (*items[start:], *items[:start])))
        site.assert_holds(policy, version)


@pytest.mark.parametrize("num_same", [1, 3, 99])
@pytest.mark.parametrize("size", [1, 99])
def test_a_policy_may_begin_with_what_the_engine_holds(num_same, size, site):
    """An embedding that is not trained; or a step with a learning rate of zero."""
    first = site.cluster.make_policy(1)
    site.load_policy(first)
    for version, seed in enumerate((2, 2, 3), start=2):
        same = dict(list(first.items())[:num_same])
        policy = site.cluster.make_policy(seed) | same
        if site.load_policy(policy, size) and num_same < 99:
            site.assert_holds(policy, version)
    site.assert_holds(policy, site.versions[0])


def test_a_policy_that_begins_with_what_is_there_replaces_one_that_broke_off(site):
    """Its trainer died, and the next one sends the same embedding first."""
    site.load_policy(site.cluster.make_policy(0))
    for version in range(2, 5):
        broken, policy = (site.cluster.make_policy(seed) for seed in (10 + version, 20 + version))
        policy |= dict(list(broken.items())[:2])
        site.load_policy(dict(list(broken.items())[: version - 1]))
        assert site.is_dirty
        outcomes = site.load_policy(policy)
        assert all(isinstance(came, set) for outcome in outcomes for came in outcome), outcomes
        site.assert_holds(policy, version)


def test_what_came_again_at_the_end_is_expected_in_the_next_policy(site):
    policies = [site.cluster.make_policy(seed) for seed in (1, 2)]
    for version, policy in enumerate(policies, start=1):
        items = list(policy.items())
        site.load(*([item] for item in items[:-1]))
        assert site.versions == [version - 1] * len(site.clients)
        site.load(items[-1:], items[-1:])
        site.assert_holds(policy, version)


def test_a_refit_between_two_calls_counts(site):
    """What was as the engine held it need not be so any more."""
    first, second, third = (site.cluster.make_policy(seed) for seed in (1, 2, 3))
    site.load_policy(first)
    (name, tensor), *rest = first.items()
    site.load([(name, tensor)])
    site.each(lambda drop_in: fp8refit.Refitter(drop_in.owner).refit(second))
    site.load(*([(each, third[each])] for each, _ in rest))
    assert site.is_dirty
    assert all(f"whole with 1 more: {name}" in client.blocked for client in site.clients)
    site.load([(name, tensor)])
    site.assert_holds(third | {name: tensor}, 3)


@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_a_tensor_that_one_rank_holds_otherwise_begins_a_policy(layout):
    """Of which the other holds all that it reads."""
    site = Site(layout)
    policy = site.cluster.make_policy(1)
    site.load_policy(policy)
    for version, (name, tensor) in enumerate(policy.items(), start=2):
        changed = tensor.clone()
        changed.view(-1)[-1] += 1
        items = [(name, changed), *((each, policy[each]) for each in policy if each != name)]
        site.load(*([item] for item in items))
        site.assert_holds(policy | {name: changed}, version)
        policy = policy | {name: changed}


def test_what_a_refit_that_failed_may_have_written_counts_no_more():
    site = Site("alone")
    first, second = site.cluster.make_policy(1), site.cluster.make_policy(2)
    site.load_policy(first)
    (begin, _), (name, tensor), *_ = first.items()
    site.load([(name, tensor)])
    broken = second | {begin: torch.full_like(second[begin], torch.nan)}
    with pytest.raises(NonFiniteError):
        fp8refit.Refitter(site.clients[0]).refit(broken)
    site.load_policy({each: tensor for each, tensor in second.items() if each != name})
    assert site.is_dirty
    site.load([(name, second[name])])
    site.assert_holds(second, 2)


@pytest.mark.parametrize("is_marked", [False, True])
def test_an_unknown_name_is_raised_at_its_tensor(is_marked, site):
    policy = site.cluster.make_policy(1)
    for version, place in enumerate((0, 1, len(policy) - 1), start=1):
        if is_marked:
            site.each(DropIn.begin)
        items = list(policy.items())
        items.insert(place, ("language_model.model.norm.weight", torch.ones(4)))
        outcomes = site.load(*([item] for item in items[: place + 1]))
        assert all("unexpected, this engine has no such weight" in str(error) for error in outcomes[-1])
        assert all(isinstance(came, set) for outcome in outcomes[:-1] for came in outcome), outcomes
        if is_marked:
            site.each(DropIn.end)
            site.each(DropIn.begin)
        site.load_policy(policy)
        if is_marked:
            site.each(DropIn.end)
        site.assert_holds(policy, version)


def test_between_marks_a_tensor_may_come_again_only_as_it_was(site):
    policy, other = site.cluster.make_policy(1), site.cluster.make_policy(2)
    items = list(policy.items())
    site.each(DropIn.begin)
    site.load(*([item] for item in (*items, items[0], items[-1])))
    assert site.each(DropIn.end) == [None] * len(site.clients)
    site.assert_holds(policy, 1)
    site.each(DropIn.begin)
    name = items[1][0]
    outcomes = site.load(items, [(name, other[name])])
    assert all("sent twice, with different values" in str(error) for error in outcomes[-1]), outcomes
    assert all(isinstance(error, EngineDirtyError) for error in site.each(DropIn.end))
    assert site.is_dirty


def share(shard):
    """One scale for the rows of q and k, and one for all of o."""
    scales = dict.fromkeys((Q_PROJ, K_PROJ), torch.zeros(1, 1)) | {O_PROJ: torch.zeros(1, 1)}
    shard._slots = [
        replace(slot, scale=scales[slot.name], format=PER_TENSOR) if slot.name in scales else slot
        for slot in shard.slots()
    ]


@pytest.fixture
def shared():
    return Site("alone", change=share)


def assert_shares(site, policy, version):
    slots = {slot.name: slot for slot in site.cluster.shards[0].slots()}
    for group in ((Q_PROJ, K_PROJ), (O_PROJ,)):
        together = torch.cat([policy[name].flatten() for name in group]).reshape(1, -1)
        codes, scale = fp8refit.quantize_blockwise(together, format=PER_TENSOR)
        assert torch.equal(slots[group[0]].scale, scale)
        found = torch.cat([slots[name].weight.flatten() for name in group])
        assert torch.equal(found.view(torch.uint8), codes.flatten().view(torch.uint8))
    assert site.cluster.states == [(False, version)]


@pytest.mark.parametrize("size", [1, 3, 99])
def test_tensors_that_share_a_scale_are_taken_as_they_come(size, shared):
    policy, one, k = shared.cluster.make_policy(1), shared.cluster.make_policy(2), shared.cluster.make_policy(3)
    for version, each in enumerate(
        (policy, policy, policy | {K_PROJ: k[K_PROJ]}, one, policy | {Q_PROJ: one[Q_PROJ]}), 1
    ):
        shared.load_policy(each, size)
        assert_shares(shared, each, version)


def test_a_tensor_that_shares_a_scale_and_comes_again_belongs_to_another_policy(shared):
    policy = shared.cluster.make_policy(1)
    items = list(policy.items())
    assert items[0][0] == Q_PROJ
    shared.load(*([item] for item in items[:2]))
    outcomes = shared.load(*([item] for item in items))
    assert not any(isinstance(outcome, Exception) for (outcome,) in outcomes), outcomes
    assert_shares(shared, policy, 1)
    shared.each(DropIn.begin)
    shared.load(items)
    ((error,),) = shared.load(items[:1])
    assert f"{Q_PROJ}: sent twice, and its scale is shared" in str(error)
    shared.each(DropIn.end)
    assert shared.is_dirty


@pytest.mark.parametrize("kept", [(O_PROJ,), (Q_PROJ, K_PROJ)])
def test_what_is_kept_and_comes_after_the_rest_leaves_no_engine_dirty(kept):
    """What alone has its scale is compared. Of others, nobody can say whether the engine has them so."""
    site = Site("alone", change=share, keep=kept)
    policy = site.cluster.make_policy(1)
    rest = [(name, tensor) for name, tensor in policy.items() if name not in kept]
    for version in (1, 2, 3):
        site.load([*rest, *((name, policy[name]) for name in kept if version == 1)])
        ((outcome,),) = site.load([(kept[0], policy[kept[0]])])
        assert site.cluster.states == [(False, version)]
        assert len(kept) == 1 or "came after the policy was whole, and shares a scale with others" in str(outcome)


def test_requests_are_told_what_a_policy_still_misses(site):
    policy = site.cluster.make_policy(1)
    *most, last = policy.items()
    site.load(*([item] for item in most))
    name = last[0]
    assert all(f"whole with 1 more: {name}" in client.blocked for client in site.clients)
    site.load([last])
    site.assert_holds(policy, 1)


def test_names_inside_of_lora_layers_are_those_of_weights(site):
    policy = site.cluster.make_policy(1)
    site.load_policy({name.replace("_proj.", "_proj.base_layer."): tensor for name, tensor in policy.items()})
    site.assert_holds(policy, 1)
    outcomes = site.load([("model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(1))])[0]
    assert all("fp8refit.training.peft.merged" in str(error) for error in outcomes)


def test_a_missing_buffer_is_called_one():
    stream = Stream(Claims(needed=frozenset("ab"), buffers=frozenset("b")))
    stream.note("a", None)
    assert stream.said_missing(3) == "b (a buffer, which named_parameters() leaves out)"


def test_a_rank_whose_stream_breaks_is_told_of_by_all_at_their_end():
    site = Site("tensor")
    items, policy = list(site.cluster.make_policy(1).items()), site.cluster.make_policy(2)

    def broken():
        yield from items[:2]
        raise ConnectionError("the trainer is gone")

    def run(drop_in, weights):
        with pytest.raises((ConnectionError, RankFailedError)) as caught:
            drop_in.load(weights)
        drop_in.load(list(policy.items()))
        return caught.type

    weights = [broken(), items]
    kinds = together([partial(run, *pair) for pair in zip(site.drop_ins, weights, strict=True)])
    assert kinds == [ConnectionError, RankFailedError]
    site.assert_holds(policy, 1)


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "expert"])
def test_ranks_that_are_given_two_policies_notice_it(layout):
    site = Site(layout)
    policies = [site.cluster.make_policy(seed) for seed in (1, 2)]
    calls = [
        partial(drop_in.load, list(policy.items())) for drop_in, policy in zip(site.drop_ins, policies, strict=True)
    ]
    outcomes = together(calls)
    assert all(isinstance(error, InvalidSourceError) and "values" in str(error) for error in outcomes), outcomes
    assert site.is_dirty
    site.load_policy(policies[0], size=99)
    site.assert_holds(policies[0], 1)


class Copied(TorchDispatchMode):
    """The largest memory that is made meanwhile."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in {
            each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)
        }:
            self.num_bytes = max(self.num_bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (100_000,), (512, 300), (3, 1000), (8, 64, 96)])
def test_some_values_of_each_tensor_are_noted_and_never_a_copy_of_it(shape):
    drop_in = Site("tensor").drop_ins[0]
    tensor = torch.randn(shape).bfloat16()
    laid_otherwise = tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    with Copied() as copied:
        drop_in._witness(tensor)
        drop_in._witness(laid_otherwise)
    one, other = drop_in._samples
    assert torch.equal(one, other)
    assert min(tensor.numel(), 16) <= one.numel() == copied.num_bytes // 4 <= 500
    assert set(one.tolist()) <= set(tensor.float().flatten().tolist())


def test_what_is_noted_is_the_same_wherever_tensors_are():
    samples = [torch.arange(float(size)) for size in (3, 0, 5)]
    assert _digest(samples) == _digest([each.clone() for each in samples]) != _digest(samples[::-1])


def test_unexpected_names_begin_nothing(site):
    policy = site.cluster.make_policy(1)
    site.load_policy(policy)
    outcomes = site.load([("model.layers.99.q_proj.weight", torch.zeros(4, 4))])[0]
    assert all(isinstance(error, InvalidSourceError) and "layers.99" in str(error) for error in outcomes)
    site.assert_holds(policy, 1)


def test_skipped_names_begin_and_complete_nothing(site):
    policy = site.cluster.make_policy(1)
    skipped = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
    site.load([skipped])
    assert site.versions == [0] * len(site.clients)
    assert not site.drop_ins[0].is_open
    site.load_policy(policy)
    site.load([skipped])
    assert not site.drop_ins[0].is_open
    site.assert_holds(policy, 1)


def test_what_is_frozen_need_not_come():
    site = Site("tensor", keep=(NORM,))
    policy = site.cluster.make_policy(1)
    site.load_policy(policy)  # it may
    site.load_policy({name: tensor for name, tensor in site.cluster.make_policy(1).items() if name != NORM})
    site.assert_holds(policy, 2)
    site.load([(NORM, policy[NORM])])
    site.assert_holds(policy, 2)
    outcomes = site.load([(NORM, policy[NORM] + 1)])[0]
    assert all("is not as the engine has it" in str(error) for error in outcomes), outcomes
    assert site.is_dirty


def test_marks_are_the_beginning_and_the_end(site):
    policy = site.cluster.make_policy(1)
    items = list(policy.items())
    for version in (1, 2):
        site.each(DropIn.begin)
        site.load(*([item] for item in items))
        assert site.versions == [version - 1] * len(site.clients)
        assert site.each(DropIn.end) == [None] * len(site.clients)
        site.assert_holds(policy, version)
    site.load(items[:1])
    site.each(DropIn.begin)  # instead of what broke off
    site.load(items[1:])
    errors = site.each(DropIn.end)
    assert all(isinstance(error, InvalidSourceError) and f"{items[0][0]}: missing" in str(error) for error in errors)
    assert site.is_dirty
    site.load_policy(policy)
    site.assert_holds(policy, 3)


def test_an_end_without_a_beginning_is_an_error(site):
    policy = site.cluster.make_policy(1)
    for _ in range(2):
        assert all("begin it first" in str(error) for error in site.each(DropIn.end))
        site.each(DropIn.begin)
        site.load_policy(policy)
        assert site.each(DropIn.end) == [None] * len(site.clients)
    assert all("a second time" in str(error) for error in site.each(DropIn.end))
    site.assert_holds(policy, 2)


def test_what_failed_between_marks_stays_failed_until_the_next_beginning():
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    site.each(DropIn.begin)
    (outcome,) = site.load(iter([("a", torch.zeros(1)), 5]))[0]
    assert isinstance(outcome, InvalidSourceError)
    (outcome,) = site.load(list(policy.items()))[0]
    (ended,) = site.each(DropIn.end)
    assert isinstance(ended, Exception)
    assert site.is_dirty
    site.each(DropIn.begin)
    site.load_policy(policy)
    site.each(DropIn.end)
    site.assert_holds(policy, 1)


def test_a_refit_ends_an_update_that_failed_and_that_nobody_ended():
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    (drop_in,) = site.drop_ins
    drop_in.begin()
    with pytest.raises(InvalidSourceError):
        drop_in.load(iter([("a", torch.zeros(1)), 5]))
    with pytest.raises(EngineDirtyError, match="end it"):
        drop_in.load(list(policy.items()))
    fp8refit.Refitter(site.clients[0]).refit(policy)
    site.load_policy(policy)
    site.assert_holds(policy, 2)


@pytest.mark.parametrize("place", range(4))
def test_what_does_not_fit_among_received_tensors_is_raised_after_the_last_of_them(place, site):
    policy = site.cluster.make_policy(1)
    items = list(policy.items())
    broken = items.copy()
    name, tensor = items[place * (len(items) - 1) // 3]
    broken[place * (len(items) - 1) // 3] = name, torch.full_like(tensor, torch.nan)
    num_received = []

    def receive(drop_in, items):
        drop_in.begin()
        with drop_in.receiving():
            for item in items:
                drop_in.load([item])
                num_received.append(item)
        drop_in.end()

    outcomes = site.each(lambda drop_in: receive(drop_in, broken))
    assert all(isinstance(outcome, NonFiniteError | RankFailedError) for outcome in outcomes)
    assert len(num_received) == len(broken) * len(site.clients)
    assert site.is_dirty
    site.each(lambda drop_in: receive(drop_in, items))
    site.assert_holds(policy, 1)


def test_an_error_that_is_raised_late_holds_on_to_no_tensor_meanwhile():
    """Else verl's receiver could not close the shared memory that a bucket came in."""
    site = Site("alone")
    items = list(site.cluster.make_policy(1).items())
    name, tensor = items[1]
    bucket = [*items[:1], (name, torch.full_like(tensor, torch.nan)), *items[2:]]
    tensors = [weakref.ref(tensor) for _, tensor in bucket[1:2]]
    (drop_in,) = site.drop_ins
    with pytest.raises(NonFiniteError), drop_in.receiving():
        drop_in.load(bucket)
        del bucket
        gc.collect()
        assert [tensor() for tensor in tensors] == [None]


def test_refusals_are_told_by_every_rank_at_once(monkeypatch):
    cluster = Cluster("tensor")
    cluster.shards[-1].refusals = (Refusal(module="x", reason="is packed", remedy="Boot otherwise"),)
    pairs = zip(Drivers(cluster).clients, cluster.ranks, strict=True)
    outcomes = together([partial(DropIn, client, rank, DropInOptions(), logger) for client, rank in pairs])
    assert all(isinstance(error, UnsupportedEngineError) and "is packed" in str(error) for error in outcomes), outcomes


def test_reports_are_kept_and_logged(caplog):
    site = Site("alone")
    with caplog.at_level(logging.INFO, logger="tests.drop_in"):
        site.load_policy(site.cluster.make_policy(1))
    report = fp8refit.last_report()
    assert report.version == 1
    assert [record.message for record in caplog.records if record.name == "tests.drop_in"] == [report.summary()]
    assert report.num_old_scales == 0


def test_kv_scales_are_calibrated_at_every_commit_or_said_to_be_old(tmp_path, caplog):
    old = Site("tensor", kv=[(ATTENTION,), (ATTENTION,)])
    for _ in range(2):
        old.load_policy(old.cluster.make_policy(1))
    assert fp8refit.last_report().num_old_scales == len(old.cluster.targets[0].live.kv.names) > 0
    assert re.search(r"scales +\d+ old", str(fp8refit.last_report()))
    assert caplog.text.count("FP8REFIT_CALIBRATION") == len(old.clients)  # once
    (tmp_path / "ids.json").write_text(json.dumps([[1, 2, 3]]))
    site = Site("tensor", kv=[(ATTENTION,), (ATTENTION,)], calibration=tmp_path / "ids.json")
    site.load_policy(site.cluster.make_policy(1))
    assert fp8refit.last_report().kv.num_tokens == 3
    assert fp8refit.last_report().num_old_scales == 0
    among = Site("tensor", kv=[(ATTENTION,), (ATTENTION,)])
    among.load_policy({K_SCALE: torch.tensor(0.5)} | among.cluster.make_policy(1))
    assert fp8refit.last_report().kv.scales == {K_SCALE: 0.5}


class Tied:
    """A model whose LM head is its embedding."""

    def __init__(self):
        self.model = fakes.FakeModel()
        self.refitter = fp8refit.Refitter(self.model)
        rank = self.refitter.engine.ranks.rank
        self.drop_in = DropIn(self.model, rank, DropInOptions(), logger)
        self.policies = [fakes.make_policy(self.model, seed) for seed in (1, 2)]

    def load(self, policy, *names):
        """What the tensors named `names` give one after another; of all if none is named."""
        for name in names or policy:
            self.drop_in.load([(name, policy[name])])

    def assert_holds(self, policy, version):
        fakes.assert_holds(self.model, policy)
        assert (self.refitter.version, self.refitter.is_dirty) == (version, False)


@pytest.fixture
def tied(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [fakes.FakeEntryPoint()])
    return Tied()


def order_of(policy, first, last):
    """All names, some at either end."""
    return [*first, *(name for name in policy if name not in (*first, *last)), *last]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ((EMBED,), (HEAD,)),
        ((HEAD,), (EMBED,)),
        ((HEAD, EMBED), ()),
        ((), (HEAD, EMBED)),
        ((), (EMBED, HEAD)),
        ((EMBED, HEAD), ()),
    ],
)
def test_a_second_name_of_a_tied_tensor_begins_and_completes_nothing(first, last, tied):
    for version, seed in enumerate((0, 1, 1, 0), start=1):
        policy = tied.policies[seed]
        both = policy | {HEAD: policy[EMBED]}
        tied.load(both, *order_of(both, first, last))
        tied.assert_holds(policy, version)
        assert not tied.drop_in.is_open


def test_a_second_name_of_what_the_engine_held_begins_nothing(tied):
    both = tied.policies[0] | {HEAD: tied.policies[0][EMBED]}
    names = order_of(both, (EMBED,), (HEAD,))
    other = tied.policies[1] | {name: both[name] for name in (EMBED, HEAD)}
    for version, policy in enumerate((both, other, both, other), start=1):
        tied.load(policy, *names)
        tied.assert_holds({name: tensor for name, tensor in policy.items() if name != HEAD}, version)
        assert not tied.drop_in.is_open
    tied.load(both | {EMBED: both[EMBED] + 1, HEAD: both[EMBED] + 1}, *names)
    assert not tied.drop_in.is_open


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_a_tied_tensor_may_come_under_either_name_alone(name, tied):
    for version, seed in enumerate((0, 1, 1), start=1):
        policy = tied.policies[seed]
        items = [(name if each == EMBED else each, tensor) for each, tensor in policy.items()]
        tied.load(dict(items))
        tied.assert_holds(policy, version)


def test_after_a_cut_a_second_name_begins_the_next_policy(tied):
    for version, (name, policy) in enumerate(zip((HEAD, EMBED), tied.policies, strict=True), start=1):
        items = [(name if each == EMBED else each, tensor) for each, tensor in policy.items()]
        tied.load(dict(items))
        tied.assert_holds(policy, version)
        tied.drop_in.cut()


@pytest.mark.parametrize(("first", "last"), [((EMBED,), (HEAD,)), ((EMBED, HEAD), ()), ((HEAD, EMBED), ())])
@pytest.mark.parametrize("are_together", [True, False])
def test_a_tied_tensor_that_differs_under_its_second_name_is_an_error(are_together, first, last, tied):
    policy = tied.policies[0]
    both = policy | {HEAD: policy[EMBED] + 1}
    with pytest.raises(
        InvalidSourceError, match=r"lm_head\.weight: is tied, and differs|embed.*: is tied, and differs"
    ):
        if are_together:
            tied.drop_in.load(iter([(name, both[name]) for name in order_of(both, first, last)]))
        else:
            tied.load(both, *order_of(both, first, last))
    came_late = last and not are_together
    assert (tied.refitter.version, tied.refitter.is_dirty) == (int(bool(came_late)), True)
    other = tied.policies[1]
    tied.load(other | {HEAD: other[EMBED]}, *order_of(both, first, last))
    tied.assert_holds(other, tied.refitter.version)


def test_a_refit_heals_what_a_stream_left_and_streams_go_on_after_it(tied):
    names = list(tied.policies[0])
    tied.load(tied.policies[0], *names[:2])
    tied.drop_in.close()
    assert tied.refitter.is_dirty
    tied.refitter.refit(tied.policies[1])
    tied.assert_holds(tied.policies[1], 1)
    tied.load(tied.policies[0])
    tied.assert_holds(tied.policies[0], 2)


def test_what_comes_after_closing_does_not_complete_what_came_before(tied):
    names = list(tied.policies[0])
    tied.load(tied.policies[0], *names[:2])
    tied.drop_in.close()
    with pytest.raises(EngineDirtyError, match="broke off"):
        tied.load(tied.policies[0], *names[2:])
    assert (tied.refitter.version, tied.refitter.is_dirty) == (0, True)


def test_a_refit_takes_over_between_two_calls_of_a_trainer_and_never_within_one():
    """A trainer that died in mid-push never calls again; one that lives may not write over what took over."""
    site = Site("alone")
    first, second, third = map(site.cluster.make_policy, (1, 2, 3))
    site.load_policy(first)
    items = list(second.items())

    def within():
        yield items[0]
        with pytest.raises(EngineBusyError):
            fp8refit.Refitter(site.clients[0]).refit(third)
        yield from items[1:3]

    assert site.load(within()) == [[{name for name, _ in items[:3]}]]
    fp8refit.Refitter(site.clients[0]).refit(third)
    site.assert_holds(third, version=2)
    (refused,) = site.load(items[3:])[0]
    assert isinstance(refused, DisplacedError)
    site.assert_holds(third, version=2)
    site.load_policy(second)
    site.assert_holds(second, version=3)


@pytest.mark.parametrize("call", [lambda drop_in: drop_in.load({}), DropIn.begin, DropIn.end, DropIn.cut, DropIn.close])
@pytest.mark.parametrize("is_thread", [False, True])
def test_a_call_within_another_is_refused_and_the_other_one_goes_on(is_thread, call):
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    (drop_in,) = site.drop_ins

    def intrude():
        with pytest.raises(EngineBusyError, match="load them in one thread, one call after the other"):
            call(drop_in)
        return True

    def lend():
        for number, item in enumerate(policy.items()):
            if number == 2:
                assert together([intrude]) == [True] if is_thread else intrude()
            yield item

    drop_in.load(lend())
    site.assert_holds(policy, 1)
    site.load_policy(policy, size=2)
    site.assert_holds(policy, 2)


def test_a_call_while_something_is_received_is_refused_and_the_rest_is_received():
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    (drop_in,), items = site.drop_ins, list(policy.items())

    def lend():
        for number, item in enumerate(items[:3]):
            if number == 2:
                (refusal,) = together([lambda: drop_in.load(items[:1])])
                assert isinstance(refusal, EngineBusyError)
            yield item

    with drop_in.receiving():
        drop_in.load(lend())
        drop_in.load(items[3:])
    site.assert_holds(policy, 1)


@pytest.mark.parametrize("attempt", range(5))
def test_two_threads_that_load_at_once_get_errors_of_ours_and_no_mixture(attempt):
    site = Site("alone")
    policies = [site.cluster.make_policy(seed) for seed in (1, 2)]

    def load(policy):
        for item in policy.items():
            site.drop_ins[0].load([item])

    outcomes = together([partial(load, policy) for policy in policies])
    assert all(outcome is None or isinstance(outcome, fp8refit.RefitError) for outcome in outcomes), outcomes
    assert site.is_dirty or [outcome for outcome in outcomes if outcome is None]
    assert (site.clients[0].blocked is not None) == site.is_dirty
    fp8refit.Refitter(site.clients[0]).refit(policies[0])
    site.assert_holds(policies[0], version=site.versions[0])


def test_a_refit_within_a_policy_that_is_not_caught_ends_the_policy():
    site = Site("alone")
    policy = site.cluster.make_policy(1)
    items = list(policy.items())

    def refit_within():
        yield items[0]
        fp8refit.Refitter(site.clients[0]).refit(policy)

    (refused,) = site.load(refit_within())[0]
    assert isinstance(refused, EngineBusyError) and "wait for it" in str(refused)
    assert site.is_dirty and "loading it failed (EngineBusyError: another refit" in site.clients[0].blocked
    site.load_policy(policy)
    site.assert_holds(policy, 1)


def test_no_policy_is_of_two_streams_wherever_they_break_off(simulate):
    """Every sequence of streams in one order, each of which may break off, repeat a tensor, or, if all change, lose one."""
    streams = [NAMES[:length] for length in (1, 2, 3)] + ["abb", "abcc", "abbc", "abca"]
    for frozen in ("", "a", "b", "c"):
        for given in product(streams if frozen else [*streams, "ac"], repeat=4):
            engine = simulate(given, frozen)
            assert all(len(set(policy.values()) - {FROZEN}) == 1 for policy in engine.served), given
            if given[2:] == (NAMES, NAMES):
                assert engine.held == {name: FROZEN if name in frozen else 3 for name in NAMES}, given
                assert not engine.is_dirty, given


@pytest.mark.parametrize("stages", product(("ab", "ba"), ("c", "ca", "ac")))
def test_stages_may_come_in_any_order_and_send_a_tied_tensor_twice(stages, simulate):
    for given in product(map("".join, permutations(stages)), repeat=5):
        engine = simulate(given)
        assert not engine.errors, given
        assert all(len(set(policy.values())) == 1 for policy in engine.served), given
        assert engine.held == dict.fromkeys(NAMES, 4), given
        assert not engine.is_dirty, given


NAMES, FROZEN = "abc", -1


class Simulated:
    """An engine that holds a number for each name, its rank, and its update."""

    group, witness, summary = SimpleNamespace(size=1), "", str
    _fp8refit_engine = SimpleNamespace(idle=set())

    def __init__(self):
        self.held, self.served, self.errors = dict.fromkeys(NAMES, FROZEN), [], []
        self.is_dirty, self.version, self.ignored, self.kv = False, 0, (), None
        self.target = self.report = self.live = self

    def holds(self, tensors, _):
        return tensors.items() <= self.held.items()

    def trust(self, names):
        pass

    def model_copy(self, update):
        return self

    def lend_turn(self, why):
        return lambda: True

    def __enter__(self):
        self.is_dirty = True

    def load(self, bucket):
        self.held.update(bucket)

    def __exit__(self, kind, error, traceback):
        if error is None:
            self.version, self.is_dirty = self.version + 1, False
            self.served.append(self.held.copy())


@pytest.fixture
def simulate(monkeypatch):
    """Load streams, in which all but what is frozen has the stream's number, one tensor a call."""
    monkeypatch.setattr("fp8refit.driver.drop_in.claims_of_all", lambda *_: Claims(needed=frozenset(NAMES)))
    monkeypatch.setattr("fp8refit.driver.drop_in.update", lambda engine, *_, **__: engine)
    silent = logging.getLogger("tests.silent")
    silent.disabled = True

    def load(streams, frozen=""):
        engine = Simulated()
        drop_in = DropIn(engine, engine, DropInOptions(), silent)
        for number, names in enumerate(streams):
            for name in names:
                try:
                    drop_in.load([(name, FROZEN if name in frozen else number)])
                except EngineDirtyError as error:
                    engine.errors.append(error)
        return engine

    return load


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, None, {"drop_in": False, "keep": ()}),
        ({"FP8REFIT_DROP_IN": "1"}, None, {"drop_in": True}),
        ({"FP8REFIT_DROP_IN": "0", "FP8REFIT_KEEP": "*norm*,a.b"}, {}, {"drop_in": False, "keep": ("*norm*", "a.b")}),
        ({"FP8REFIT_IN_FLIGHT": "continue"}, None, {"in_flight": "continue"}),
        ({"FP8REFIT_IGNORE": "critic.*"}, {}, {"ignore": ("critic.*",)}),
        ({"FP8REFIT_RENAME": "actor.=,a.b.=a."}, {}, {"rename": (("actor.", ""), ("a.b.", "a."))}),
        ({"FP8REFIT_RENAME": "actor.="}, {"rename": ["a.", "b."]}, {"rename": (("a.", "b."),)}),
        ({"FP8REFIT_DROP_IN": "1"}, {"drop_in": False}, {"drop_in": False}),
        ({"FP8REFIT_QUANTIZATION": "fp8_per_block"}, None, {"quantization": "fp8_per_block", "drop_in": False}),
    ],
)
def test_options_come_from_the_environment_and_from_the_engine(environment, options, expected):
    read = DropInOptions.read(environment, options)
    assert {name: getattr(read, name) for name in expected} == expected


def test_kv_scales_do_not_come_with_requests_that_go_on_with_their_kv():
    site = Site(in_flight="continue")
    policy = site.cluster.make_policy(3)
    for error in site.load([(NORM, policy[NORM]), (K_SCALE, torch.tensor(0.5))])[0]:
        assert isinstance(error, InvalidSourceError)
        assert f'{K_SCALE}: KV of the old scales stays in use with in_flight="continue"' in str(error)
    site.load_policy({NORM: policy[NORM]} | policy, size=99)
    site.assert_holds(policy, 1)


def test_a_trainers_own_names_become_the_engines():
    site = Site(rename="actor.=")
    for version, seed in enumerate((3, 4), start=1):
        policy = site.cluster.make_policy(seed)
        site.load_policy({f"actor.{name}": tensor for name, tensor in policy.items()}, size=3)
        site.assert_holds(policy, version)
    wrong = {f"actor.{name}": tensor for name, tensor in (policy | {NORM: torch.ones(3)}).items()}
    for error in site.load(list(wrong.items()))[0]:
        assert f"{NORM} (sent as actor.{NORM}): has shape [3]" in str(error)
    for error in Site().load([(f"actor.{NORM}", policy[NORM])])[0]:
        assert f"{UNEXPECTED}; FP8REFIT_RENAME=actor.= makes it fit" in str(error)


def test_two_names_that_become_one_are_named():
    site = Site(rename="actor.=")
    policy = site.cluster.make_policy(3)
    outcomes = site.load([(f"actor.{NORM}", policy[NORM])], [(NORM, policy[NORM] + 1)])
    for error in outcomes[1]:
        assert f"is made of actor.{NORM} and of {NORM}, which rename= makes one" in str(error)
    site.load_policy({NORM: policy[NORM]} | policy, size=99)
    site.assert_holds(policy, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"drop_inn": True},
        {"drop_in": "perhaps"},
        {"rename": "actor."},
        {"in_flight": "wait"},
        {"calibration": "ids.json", "in_flight": "continue"},
    ],
)
def test_wrong_options_are_errors(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DropInOptions.read({}, options)
