"""Streams of every kind against a model of what an engine has to hold: updates from within, refits by streams, what is kept,
what is compared, and faults at any place of any of them. On ranks in threads, beside their drivers and elsewhere.
"""

from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import fp8refit
from fp8refit import RefitError, Refitter
from tests.fake_ranks import EMBED, HEAD, LAYOUTS, ClientEntryPoint, Cluster, Drivers, Remote, together
from tests.fakes import assert_slots_hold

BUCKET_BYTES = 1 << 20
KINDS = ["mapping", "generator", "function", "handed lists", "handed generators"]


def lent(items):
    """Tensors that are overwritten when the next one is asked for."""
    for name, tensor in items:
        copy = tensor.clone()
        yield name, copy
        copy.fill_(7.0)


def cut(items, sizes):
    """Buckets of these sizes, and one of the rest."""
    buckets = []
    for size in sizes:
        buckets.append(items[:size])
        items = items[size:]
    return [*buckets, items]


class Broken(Exception):
    """What a trainer's stream raises."""


class Streams(RuleBasedStateMachine):
    """One engine; `held` is the policy of each tensor that it has to hold, or None if it may be parts of two."""

    @initialize(layout=st.sampled_from(["tensor", "pipeline"]), is_here=st.booleans())
    def boot(self, layout, is_here):
        self.layout, self.cluster = layout, Cluster(layout)
        self.drivers = Drivers(self.cluster, bucket_bytes=BUCKET_BYTES)
        self.remote = None if is_here else Remote(self.cluster, bucket_bytes=BUCKET_BYTES)
        self.policies = [self.cluster.make_policy(seed) for seed in range(3)]
        self.expected = {}
        self.names = list(self.policies[0])
        self.frozen = {name for name in self.names if "norm" in name}
        self.version = 0
        self.is_dirty = False
        self.held = None
        self.lost = False
        self.written = set()
        self.refit(seed=0, kind="mapping", fault=None, keeps=False, order=0)

    def teardown(self):
        if getattr(self, "remote", None) is not None:
            self.remote.refitter.close()

    @rule(
        seed=st.integers(0, 2),
        kind=st.sampled_from(KINDS),
        fault=st.sampled_from([None, None, None, "nan", "missing", "twice", "raise"]),
        keeps=st.booleans(),
        order=st.integers(0, 3),
        sizes=st.lists(st.integers(0, 4), max_size=3),
        place=st.integers(0, 10),
        second=st.sampled_from([None, None, "same", "other"]),
        draft=st.none() | st.integers(0, 10),
    )
    def refit(self, seed, kind, fault, keeps, order, sizes=(), place=0, sends_all=False, second=None, draft=None):
        policy = self.policies[seed]
        kept = self.frozen if keeps and not sends_all else set()
        items = [(name, tensor) for name, tensor in policy.items() if name not in kept]
        items = items[order % len(items) :] + items[: order % len(items)]
        sent = {name for name, _ in items}
        items = self.with_fault(items, fault, place)
        second = second if fault is None and self.layout == "tensor" else None
        if second is not None:
            head = policy[EMBED].clone()
            head[-1, -1] += 1 if second == "other" else 0  # on the last rank alone
            items.insert(place % (len(items) + 1), (HEAD, head))
            fault = "untied" if second == "other" else None
        if draft is not None:
            items.insert(draft % (len(items) + 1), ("mtp.fc.weight", torch.ones(4, 4)))
        config = {"keep": ("*norm*",) if keeps else (), "bucket_bytes": BUCKET_BYTES, "timeout_s": 300.0}
        outcomes = self.run(kind, items, sizes, config)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        is_refused = keeps and (self.lost or bool(self.frozen & self.written))
        if fault is None and not is_refused:
            assert not errors, errors
            self.version += 1
            assert all(outcome.version == self.version for outcome in outcomes)
            assert all(set(outcome.kept) == kept for outcome in outcomes)
            ignored = [HEAD] * (second is not None) + ["mtp.fc.weight"] * (draft is not None)
            assert all(sorted(outcome.ignored) == ignored for outcome in outcomes)
            self.held = {**(self.held or {}), **dict.fromkeys(sent, seed)}
            self.is_dirty, self.written, self.lost = False, set(), False
            return
        assert len(errors) == len(outcomes), outcomes
        assert all(isinstance(error, RefitError | Broken) for error in errors), errors
        is_seen_before = (
            kind == "mapping" and self.remote is None if fault == "untied" else kind in ("mapping", "function")
        )
        if is_refused or (is_seen_before and fault != "nan"):
            return  # which is known before anything is written
        if kind == "generator" and items[0] is None:
            return  # an iterator is looked at whether it has anything
        self.is_dirty = True
        self.written |= sent

    def with_fault(self, items, fault, place):
        """The stream with a fault in it."""
        items, place = list(items), place % len(items)
        name, tensor = items[place]
        if fault == "nan":
            items[place] = name, torch.full_like(tensor, torch.nan)
        elif fault == "missing":
            del items[place]
        elif fault == "twice":
            items.insert(place, items[place])
        elif fault == "raise":
            items.insert(place, None)
        return items

    def run(self, kind, items, sizes, config):
        def broken(items):
            for item in items:
                if item is None:
                    raise Broken
                yield item

        if kind.startswith("handed"):
            calls = [
                partial(self.update, client, kind, items, sizes, config, broken) for client in self.drivers.clients
            ]
            return together(calls)
        make = {
            "mapping": lambda: list(broken(items)) if None in items else items,
            "generator": lambda: lent(broken(items)),
            "function": lambda: lambda: lent(broken(items)),
        }[kind]
        refitters = [Refitter(client, **config) for client in self.clients]
        return together([lambda refitter=refitter: refitter.refit(make()) for refitter in refitters])

    @staticmethod
    def update(client, kind, items, sizes, config, broken):
        with fp8refit.update(client, **config) as update:
            for bucket in cut(items, sizes):
                update.load(lent(broken(bucket)) if kind == "handed generators" else list(broken(bucket)))
        return update.report

    @property
    def clients(self):
        return self.drivers.clients if self.remote is None else [self.remote.client]

    @rule(kind=st.sampled_from(KINDS), first_keeps=st.booleans(), place=st.integers(0, 10), order=st.integers(0, 3))
    def keep_what_a_refit_that_failed_may_have_written(self, kind, first_keeps, place, order):
        """Twice: a stream that brings what is to be kept fails too, or one that leaves it out."""
        self.refit(seed=1, kind=kind, fault="nan", keeps=first_keeps, order=order, place=place)
        self.refit(seed=2, kind=kind, fault=None, keeps=True, order=order)
        self.refit(seed=2, kind="handed lists", fault="nan", keeps=True, order=0, place=place, sends_all=True)
        self.refit(seed=1, kind=kind, fault=None, keeps=True, order=order)
        self.refit(seed=1, kind=kind, fault=None, keeps=False, order=order)

    @rule(kind=st.sampled_from(KINDS), order=st.integers(0, 3))
    def keep_through_a_deep_sleep(self, kind, order):
        self.sleep_deeply()
        self.refit(seed=1, kind=kind, fault=None, keeps=True, order=order)
        self.refit(seed=1, kind=kind, fault=None, keeps=False, order=order)
        self.refit(seed=2, kind=kind, fault=None, keeps=True, order=order)

    def sleep_deeply(self):
        """A sleep that throws the weights away; what is there afterwards says nothing."""
        for target in self.cluster.targets:
            target.forget_values()
        self.lost = True

    @rule(
        seed=st.integers(0, 2),
        kind=st.sampled_from(["mapping", "generator"]),
        nudged=st.none() | st.integers(0, 10),
        place=st.sampled_from([0, -1]),
    )
    def verify(self, seed, kind, nudged, place):
        policy = dict(self.policies[seed])
        other = set()
        if nudged is not None:
            name = self.names[nudged % len(self.names)]
            other, policy[name] = {name}, policy[name].clone()
            policy[name].view(-1)[place] += 4.0
        before = self.cluster.live_bytes()

        def call(client):
            source = policy if kind == "mapping" else lent(policy.items())
            return Refitter(client, bucket_bytes=BUCKET_BYTES).verify(source)

        reports = together([partial(call, client) for client in self.clients])
        assert self.cluster.live_bytes() == before
        if not self.is_dirty:
            differing = {name for name, held in self.held.items() if held != seed} | other
            assert all(set(report.differing) == differing for report in reports), reports

    @invariant()
    def what_is_there_is_what_was_agreed_on(self):
        if not hasattr(self, "held"):
            return
        assert self.cluster.states == [(self.is_dirty, self.version)] * len(self.cluster.targets)
        if not self.is_dirty:
            held = tuple(self.held.items())
            if held not in self.expected:
                for shard in self.cluster.shards:
                    assert_slots_hold(shard.slots(), {name: self.policies[seed][name] for name, seed in held})
                self.expected[held] = self.cluster.live_bytes()
            assert self.cluster.live_bytes() == self.expected[held]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


TestStreams = Streams.TestCase
TestStreams = pytest.mark.usefixtures("fake_engine")(TestStreams)
assert "tensor" in LAYOUTS
