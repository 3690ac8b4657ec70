"""Updates from within: buckets of every kind, faults in every one of them, on one rank of several, and what is served after."""

from functools import partial

import pytest
import torch

import fp8refit
import fp8refit.fill.program
from fp8refit import KvConfig, RefitConfig, gathered
from fp8refit.errors import (
    CacheFlushError,
    EngineDirtyError,
    EngineLostError,
    InvalidOptionError,
    InvalidSourceError,
    NonFiniteError,
    UnsupportedEngineError,
)
from fp8refit.live.slots import Refusal
from tests.fake_kv import ATTENTION, K_SCALE
from tests.fake_ranks import NORM, ClientEntryPoint, Cluster, Drivers, Remote, manifest_of, together


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


def cut(policy, size):
    items = list(policy.items())
    return [items[start : start + size] for start in range(0, len(items), size)]


def as_generators(policy):
    """Each bucket a generator, which overwrites every tensor when it is asked for the next."""

    def bucket(items):
        for name, tensor in items:
            lent = tensor.clone()
            yield name, lent
            lent.fill_(float("nan"))

    return [bucket(items) for items in cut(policy, 3)]


BUCKETS = {
    "lists": lambda policy: cut(policy, 3),
    "mappings": lambda policy: [dict(bucket) for bucket in cut(policy, 4)],
    "single tensors": lambda policy: cut(policy, 1),
    "all at once": lambda policy: [list(policy.items())],
    "generators": as_generators,
    "an empty one": lambda policy: [[], *cut(policy, 3), {}],
    "gathered": lambda policy: [gathered(policy)],
    "wrapped names": lambda policy: [[(f"module._orig_mod.{name}", tensor)] for name, tensor in policy.items()],
    "fp32": lambda policy: cut({name: tensor.float() for name, tensor in policy.items()}, 3),
}


class Site:
    """The ranks of one engine, and what their trainer does on each."""

    def __init__(self, layout="tensor", *, kv=()):
        self.cluster = Cluster(layout, kv=kv)
        self.clients = Drivers(self.cluster).clients
        self.policy = self.cluster.make_policy(1)

    def update(self, make_buckets, **options):
        """The same on every rank at once; or on each what `make_buckets`, a list, has for it."""
        makers = make_buckets if isinstance(make_buckets, list) else [make_buckets] * len(self.clients)
        calls = [partial(run, client, make, **options) for client, make in zip(self.clients, makers, strict=True)]
        return together(calls)

    def heal(self):
        seed, version = 9, max(target.version for target in self.cluster.targets)
        policy = self.cluster.make_policy(seed)
        reports = self.update(lambda: cut(policy, 3))
        assert [report.version for report in reports] == [version + 1] * len(self.clients), reports
        self.cluster.assert_holds(policy, version=version + 1)
        assert [client.blocked for client in self.clients] == [None] * len(self.clients)


def run(client, make_buckets, **options):
    with fp8refit.update(client, **options) as update:
        for bucket in make_buckets():
            update.load(bucket)
    return update.report


@pytest.fixture(params=["alone", "tensor", "pipeline", "experts in parts"])
def site(request):
    return Site(request.param)


@pytest.mark.parametrize("kind", BUCKETS)
def test_buckets_of_every_kind_give_the_bytes_of_a_refit(kind, site):
    for version, seed in enumerate((3, 4, 3), start=1):
        policy = site.cluster.make_policy(seed)
        reports = site.update(lambda policy=policy: BUCKETS[kind](policy))
        assert [report.version for report in reports] == [version] * len(site.clients), reports
        site.cluster.assert_holds(policy, version=version)


def test_an_update_flushes_caches_before_it_writes_and_keeps_requests_away(site):
    site.update(lambda: cut(site.policy, 3))
    for client in site.clients:
        assert client.events[:3] == ["check_ready", "pause", "flush"]
        assert client.events[-2:] == ["version 1", "resume"]


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("fault", ["nan", "missing", "unexpected", "shape", "twice", "raise"])
@pytest.mark.parametrize("announced", [False, True])
def test_a_fault_in_any_bucket_on_one_rank_leaves_all_dirty_until_an_update_succeeds(fault, place, announced, site):
    # Every rank goes through all of its buckets, however another one fails: a collective operation may give them.
    policy = site.policy
    num_given = [0] * len(site.clients)

    def buckets(rank):
        is_faulty = rank == len(site.clients) - 1 or fault in ("missing", "unexpected", "shape", "nan")
        given = cut(policy, 3)
        bucket = [list(pair) for pair in given[place]]
        at = max(range(len(bucket)), key=lambda index: bucket[index][1].numel())
        if fault == "nan":
            bucket[at][1] = torch.full_like(bucket[at][1], torch.nan)
        elif fault == "missing":
            del bucket[at]
        elif fault == "unexpected":
            bucket.append(["model.layers.99.mlp.up_proj.weight", torch.zeros(128, 128)])
        elif fault == "shape":
            bucket[at][1] = bucket[at][1][:1]
        elif fault == "twice":
            bucket.append(bucket[0])
        if is_faulty and fault != "raise":
            given[place] = bucket
        for index, each in enumerate(given):
            if is_faulty and fault == "raise" and index == place % len(given):
                raise RuntimeError("the trainer's connection broke")
            num_given[rank] += 1
            yield each

    makers = [partial(buckets, rank) for rank in range(len(site.clients))]
    errors = site.update(makers, timeout_s=20, manifest=manifest_of(policy) if announced else None)
    expected = {"nan": NonFiniteError, "raise": Exception}.get(fault, InvalidSourceError)
    assert all(isinstance(error, expected) for error in errors), errors
    if fault == "raise":
        assert any("connection broke" in str(error) for error in errors[:-1]) or len(errors) == 1
    if len(site.clients) > 1 and fault != "raise":
        assert num_given == [len(cut(policy, 3))] * len(site.clients)
    assert site.cluster.states == [(True, 0)] * len(site.clients)
    assert all("failed part way" in client.blocked for client in site.clients)
    site.heal()


def test_a_rank_that_does_not_come_loses_the_engine_within_its_time(site):
    held = []

    def enter_only(client):
        held.append(fp8refit.update(client, timeout_s=0.5).__enter__())

    calls = [partial(run, client, lambda: cut(site.policy, 3), timeout_s=0.5) for client in site.clients[:-1]]
    outcomes = together([*calls, partial(enter_only, site.clients[-1])])
    assert [type(outcome) for outcome in outcomes[:-1]] == [EngineLostError] * len(calls)
    assert all(target.is_dirty for target in site.cluster.targets)


def test_a_block_that_is_left_without_its_end_is_told_by_all(site):
    def enter_only(client):
        fp8refit.update(client, timeout_s=20).__enter__()

    calls = [partial(run, client, lambda: cut(site.policy, 3), timeout_s=20) for client in site.clients[:-1]]
    outcomes = together([*calls, partial(enter_only, site.clients[-1])])
    assert [str(outcome) for outcome in outcomes[:-1]] == [f"rank {len(calls)}: an update was interrupted"] * len(calls)
    assert all("failed part way" in client.blocked for client in site.clients)
    site.heal()


def test_what_keeps_a_rank_from_being_written_is_told_by_all_before_anything_is_asked_for(site):
    site.cluster.shards[-1].refusals = (Refusal(module="x", reason="is packed", remedy="Boot otherwise"),)
    before, asked = site.cluster.live_bytes(), []
    errors = site.update(lambda: asked.append("asked") or [])
    assert all(isinstance(error, UnsupportedEngineError) for error in errors), errors
    assert not asked
    assert site.cluster.live_bytes() == before
    assert site.cluster.states == [(False, 0)] * len(site.clients)


def test_caches_that_stay_keep_all_ranks_from_being_written(site):
    site.clients[-1].flush_fails = True
    before = site.cluster.live_bytes()
    errors = site.update(lambda: cut(site.policy, 3))
    assert all(isinstance(error, CacheFlushError) for error in errors), errors
    assert site.cluster.live_bytes() == before
    assert [client.blocked for client in site.clients] == [None] * len(site.clients)


def test_names_that_are_announced_are_judged_before_anything_is_written(site):
    manifest = manifest_of(site.policy)
    del manifest[NORM]
    before = site.cluster.live_bytes()
    errors = site.update(lambda: cut(site.policy, 3), manifest=manifest)
    assert all(error.problems == (f"{NORM}: missing",) for error in errors), errors
    assert site.cluster.live_bytes() == before
    assert site.cluster.states == [(False, 0)] * len(site.clients)


def test_kv_scales_are_set_with_an_update():
    site = Site(kv=[(ATTENTION,), (ATTENTION,)])
    reports = site.update(lambda: cut(site.policy, 3), kv_scales={K_SCALE: 0.5})
    assert [report.kv.scales for report in reports] == [{K_SCALE: 0.5}] * 2
    reports = site.update(lambda: cut(site.policy, 3), calibration=[[1, 2, 3]], kv=KvConfig(margin=1.0))
    assert all(report.kv.num_tokens == 3 for report in reports), reports


def test_nothing_is_loaded_before_or_after_the_block():
    update = fp8refit.update(Site().clients[0])
    with pytest.raises(EngineDirtyError, match="was left or not entered"):
        update.load([])


def test_an_option_of_a_bucket_is_our_error_that_says_where_it_goes():
    update = fp8refit.update(Site().clients[0])
    with pytest.raises(InvalidOptionError, match=r"^`rename` is an option, .*: pass update\(\.\.\., rename=\.\.\.\)$"):
        update.load([], rename="a=")


def test_requests_that_an_update_does_not_pause_cannot_go_on_after_it():
    site = Site()
    with pytest.raises(InvalidOptionError, match=r'does not pause requests.*in_flight="continue"'):
        fp8refit.update(site.clients[0], in_flight="continue")


def test_values_cannot_be_looked_for_twice():
    site = Site()
    with pytest.raises(InvalidSourceError, match="strict"):
        fp8refit.update(site.clients[0], RefitConfig(validate="strict")).__enter__()


def test_ranks_elsewhere_are_updated_there():
    with pytest.raises(UnsupportedEngineError, match="other processes"):
        fp8refit.update(Remote(Cluster()).client)


def test_an_update_heals_what_a_refit_left_and_a_refit_what_an_update_left(site):
    drivers = [fp8refit.Refitter(client) for client in site.clients]
    bad = {**site.policy, NORM: torch.full_like(site.policy[NORM], torch.nan)}
    together([partial(driver.refit, bad) for driver in drivers])
    assert all(target.is_dirty for target in site.cluster.targets)
    site.heal()
    site.update(lambda: cut(bad, 3))
    assert all(target.is_dirty for target in site.cluster.targets)
    reports = together([partial(driver.refit, site.policy) for driver in drivers])
    site.cluster.assert_holds(site.policy, version=reports[0].version)


@pytest.fixture
def compiled(monkeypatch):
    """How many tasks each table was compiled of."""
    counts = []
    honest = fp8refit.fill.program.compile_table

    def note(tasks, *arguments, **options):
        counts.append(len(tasks))
        return honest(tasks, *arguments, **options)

    monkeypatch.setattr(fp8refit.fill.program, "compile_table", note)
    return counts


@pytest.mark.parametrize("kind", ["lists", "generators", "single tensors"])
def test_a_stream_like_the_last_one_compiles_nothing(kind, site, compiled):
    for seed in (3, 4, 5):
        compiled.clear()
        policy = site.cluster.make_policy(seed)
        site.update(lambda policy=policy: BUCKETS[kind](policy))
        site.cluster.assert_holds(policy, version=seed - 2)
    assert not compiled


def test_a_stream_that_is_cut_otherwise_compiles_nothing(site, compiled):
    site.update(lambda: BUCKETS["generators"](site.policy))
    for version, (kind, seed) in enumerate(
        zip(
            ("lists", "gathered", "single tensors", "all at once", "gathered", "generators"),
            (3, 4, 5, 6, 7, 8),
            strict=True,
        ),
        start=2,
    ):
        compiled.clear()
        policy = site.cluster.make_policy(seed)
        site.update(lambda policy=policy, kind=kind: BUCKETS[kind](policy))
        site.cluster.assert_holds(policy, version=version)
        assert not compiled, kind


def test_a_stream_that_comes_in_another_order_or_in_other_buckets_is_whole_too(site):
    for version, seed in enumerate(range(6), start=1):
        policy = site.cluster.make_policy(seed)
        items = list(policy.items())[:: -1 if seed % 2 else 1]
        site.update(lambda items=items, seed=seed: cut(dict(items), 2 + seed))
        site.cluster.assert_holds(policy, version=version)


@pytest.mark.parametrize("fault", ["missing", "twice", "nan", "shape"])
def test_a_fault_in_a_stream_that_begins_like_the_last_one_is_found(fault, site):
    for _ in range(2):
        site.update(lambda: cut(site.policy, 3))
    buckets = [list(bucket) for bucket in cut(site.policy, 3)]
    name, tensor = buckets[-1][0]
    if fault == "missing":
        del buckets[-1][0]
    elif fault == "twice":
        buckets.append([(name, tensor)])
    elif fault == "nan":
        buckets[-1][0] = name, torch.full_like(tensor, torch.nan)
    else:
        buckets[-1][0] = name, tensor[:1]
    errors = site.update(lambda: buckets)
    assert all(name in str(error) for error in errors), errors
    assert site.cluster.states == [(True, 2)] * len(site.clients)
    site.heal()


def test_a_tied_tensor_may_come_under_its_names_in_any_order_if_both_are_equal(monkeypatch):
    from tests import fakes

    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [fakes.FakeEntryPoint()])
    model = fakes.FakeModel()
    policy = fakes.make_policy(model, 1)
    embed = "model.embed_tokens.weight"
    head = "lm_head.weight", policy[embed].clone()
    with_both = [head, *policy.items()], [*policy.items(), head]
    alone = {**{name: tensor for name, tensor in policy.items() if name != embed}, "lm_head.weight": policy[embed]}
    for _ in range(3):
        for items in (*with_both, list(alone.items())):
            for size in (1, len(items)):
                run(model, lambda items=items, size=size: cut(dict(items), size))
                fakes.assert_holds(model, policy)
    odd = "lm_head.weight", torch.full_like(policy[embed], 7.0)
    for items in ([odd, *policy.items()], [*policy.items(), odd]):
        for size in (1, len(items)):
            with pytest.raises(InvalidSourceError, match="is tied, and differs"):
                run(model, lambda items=items, size=size: cut(dict(items), size))
            assert fp8refit.Refitter(model).is_dirty
            run(model, lambda: [policy])
            fakes.assert_holds(model, policy)
