"""KV scales of engines that policies are broadcast to: measured by each, given by the trainer, or among the weights."""

import time

import pytest
import torch

import fp8refit.driver.adapters
from fp8refit import (
    Broadcaster,
    CalibrationError,
    InvalidCalibrationError,
    KvConfig,
    RankFailedError,
    RefitConfig,
    UnsupportedEngineError,
    gathered,
)
from tests.fake_kv import ATTENTION, K_SCALE, V_SCALE
from tests.fake_ranks import (
    KV_FAULTS,
    STATE_DICTS,
    ClientEntryPoint,
    Cluster,
    Remote,
    arm,
    as_iterator,
)

TIMEOUT_S = 40.0
BATCH = [[1, 2, 3], [4, 5]]
CONFIG = RefitConfig(kv=KvConfig(margin=1.0), timeout_s=TIMEOUT_S)
"""A scale is the largest value over 448."""
BOOTED = {K_SCALE: 1.0, V_SCALE: 1.0}


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [ClientEntryPoint()])


class Replicas:
    """Engines of two ranks with an FP8 KV cache each, which see what they see, and one trainer."""

    def __init__(self, *largest: tuple[tuple[float, float], tuple[float, float]]) -> None:
        self.remotes = [Remote(Cluster(kv=[[ATTENTION], [ATTENTION]] if of_ranks else ())) for of_ranks in largest]
        self.clusters = [remote.cluster for remote in self.remotes]
        for cluster, of_ranks in zip(self.clusters, largest, strict=True):
            for cache, seen in zip(cluster.caches, of_ranks, strict=True):
                cache.largest = {K_SCALE: seen[0] * 448.0, V_SCALE: seen[1] * 448.0}
        self.broadcaster = Broadcaster([remote.client for remote in self.remotes], config=CONFIG)

    def make_policy(self, seed):
        return self.clusters[0].make_policy(seed)

    @property
    def scales(self):
        return [scales for cluster in self.clusters for scales in cluster.scales]

    @property
    def states(self):
        return [state for cluster in self.clusters for state in cluster.states]

    def assert_hold(self, policy, *, version):
        for remote in self.remotes:
            remote.cluster.assert_holds(policy, version=version)
            assert remote.client.blocked is None


@pytest.fixture
def open_replicas():
    """Replicas that are closed with the test."""
    opened = []

    def open_replicas(*largest):
        opened.append(Replicas(*largest))
        return opened[-1]

    yield open_replicas
    for replicas in opened:
        replicas.broadcaster.close()


@pytest.fixture
def replicas(open_replicas):
    """Two of a kind: the same network on the same batch, but for the ranks' parts of it."""
    return open_replicas(((2.0, 1.0), (1.0, 3.0)), ((2.0, 3.0), (1.0, 1.0)))


MEASURED = {K_SCALE: 2.0, V_SCALE: 3.0}
GIVEN = {K_SCALE: 0.5, V_SCALE: 0.25}


def as_gathered(policy, folder):
    return {"state_dict": gathered(policy)}


SOURCES = [*(kind for kind in STATE_DICTS if kind is not as_iterator), as_gathered]


@pytest.mark.parametrize("make_arguments", SOURCES)
def test_every_replica_measures_after_every_kind_of_broadcast(make_arguments, replicas, tmp_path):
    for version in (1, 2):
        policy = replicas.make_policy(version)
        report = replicas.broadcaster.push(**make_arguments(policy, tmp_path), calibration=BATCH)
        replicas.assert_hold(policy, version=version)
        assert replicas.scales == [MEASURED] * 4
        assert (report.kv.origin, report.kv.scales, report.kv.num_tokens) == ("calibration", MEASURED, 5)
        assert [rank.kv.scales for rank in report.ranks] == [MEASURED] * 4
    assert [cache.batches for cluster in replicas.clusters for cache in cluster.caches] == [[BATCH] * 2] * 4


def test_what_a_replica_measures_is_its_own(open_replicas):
    replicas = open_replicas(((2.0, 1.0), (1.0, 3.0)), ((4.0, 1.0), (1.0, 1.0)))
    report = replicas.broadcaster.push(replicas.make_policy(1), calibration=BATCH)
    assert replicas.scales == [MEASURED] * 2 + [{K_SCALE: 4.0, V_SCALE: 1.0}] * 2
    assert [rank.kv.scales for rank in report.ranks] == replicas.scales


@pytest.mark.parametrize("make_arguments", SOURCES)
def test_given_scales_are_every_replica_s(make_arguments, replicas, tmp_path):
    policy = replicas.make_policy(1)
    given = {K_SCALE: torch.tensor(0.5), f"{ATTENTION}.attn.v_scale": 0.25}
    report = replicas.broadcaster.push(**make_arguments(policy, tmp_path), kv_scales=given)
    replicas.assert_hold(policy, version=1)
    assert replicas.scales == [report.kv.scales] * 4 == [GIVEN] * 4


@pytest.mark.parametrize("make_arguments", SOURCES)
def test_scales_travel_among_the_weights(make_arguments, replicas, tmp_path):
    policy = replicas.make_policy(1)
    sent = {K_SCALE: torch.tensor(0.3), **policy, V_SCALE: torch.tensor([0.25], dtype=torch.bfloat16)}
    exact = {K_SCALE: torch.tensor(0.3).item(), V_SCALE: 0.25}
    for version in (1, 2):
        report = replicas.broadcaster.push(**make_arguments(sent, tmp_path))
        replicas.assert_hold(policy, version=version)
        assert replicas.scales == [report.kv.scales] * 4 == [exact] * 4
    assert report.kv.origin == "state_dict"


def test_what_is_ordered_wins_over_what_travels(replicas):
    sent = replicas.make_policy(1) | {K_SCALE: torch.tensor(9.0)}
    replicas.broadcaster.push(sent, kv_scales=GIVEN)
    assert replicas.scales == [GIVEN] * 4
    replicas.broadcaster.push(sent, calibration=BATCH)
    assert replicas.scales == [MEASURED] * 4


def test_scales_stay_where_nothing_is_said_of_them(replicas):
    replicas.broadcaster.push(replicas.make_policy(1), kv_scales=GIVEN)
    report = replicas.broadcaster.push(replicas.make_policy(2))
    assert report.kv is None and replicas.scales == [GIVEN] * 4


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
@pytest.mark.parametrize("make_arguments", SOURCES)
def test_a_scale_that_is_none_is_refused(make_arguments, value, replicas, tmp_path):
    replicas.broadcaster.push(replicas.make_policy(1), kv_scales=GIVEN)
    sent = replicas.make_policy(2) | {V_SCALE: torch.tensor(value)}
    with pytest.raises(ValueError, match=V_SCALE):
        replicas.broadcaster.push(**make_arguments(sent, tmp_path))
    is_seen_at_once = make_arguments.__name__ in ("as_mapping", "as_files")
    assert replicas.states == [(not is_seen_at_once, 1)] * 4
    assert replicas.scales == [GIVEN] * 4
    replicas.broadcaster.push(replicas.make_policy(3))
    replicas.assert_hold(replicas.make_policy(3), version=2)
    assert replicas.scales == [GIVEN] * 4


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"calibration": [[1, 100]]}, "token id 100 is outside the vocabulary"),
        ({"calibration": [[1] * 17]}, "a sequence has 17 tokens"),
        ({"kv_scales": {"model.layers.9.self_attn.k_scale": 1.0}}, "this engine has no model.layers.9"),
        ({"kv_scales": {K_SCALE: float("nan")}}, "is nan"),
        ({"kv_scales": GIVEN, "calibration": BATCH}, "not both"),
    ],
    ids=["token", "length", "name", "NaN", "both"],
)
def test_an_order_that_an_engine_cannot_take_leaves_every_replica_serving(more, match, replicas):
    replicas.broadcaster.push(replicas.make_policy(1), kv_scales=GIVEN)
    with pytest.raises(InvalidCalibrationError, match=match):
        replicas.broadcaster.push(replicas.make_policy(2), **more)
    replicas.assert_hold(replicas.make_policy(1), version=1)
    assert replicas.scales == [GIVEN] * 4


def test_a_replica_without_such_a_cache_keeps_all_on_the_old_policy(open_replicas):
    replicas = open_replicas(((2.0, 1.0), (1.0, 3.0)), ())
    for more in ({"calibration": BATCH}, {"kv_scales": GIVEN}):
        with pytest.raises(UnsupportedEngineError, match="KV cache"):
            replicas.broadcaster.push(replicas.make_policy(1), **more)
    assert replicas.states == [(False, 0)] * 4
    policy = replicas.make_policy(1)
    replicas.broadcaster.push(policy | {K_SCALE: torch.tensor(0.5)})
    replicas.assert_hold(policy, version=1)
    assert replicas.scales == [{K_SCALE: 0.5, V_SCALE: 1.0}] * 2


@pytest.mark.parametrize("fault", KV_FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_that_fails_at_its_scales_fails_all(rank, fault, replicas):
    replicas.broadcaster.push(replicas.make_policy(1), kv_scales=GIVEN)
    arm(replicas.clusters[1].targets[rank], fault, RuntimeError("injected"))
    start_s = time.monotonic()
    with pytest.raises(RankFailedError, match="injected"):
        replicas.broadcaster.push(replicas.make_policy(2), calibration=BATCH)
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    is_dirty = fault != "kv judged"
    assert replicas.states == [(is_dirty, 1)] * 4
    assert [remote.client.blocked is not None for remote in replicas.remotes] == [is_dirty] * 2
    replicas.broadcaster.push(replicas.make_policy(3))
    replicas.assert_hold(replicas.make_policy(3), version=2)
    assert replicas.scales == [GIVEN] * 4, "those of the last policy that was whole"
    replicas.broadcaster.push(replicas.make_policy(3), calibration=BATCH)
    assert replicas.scales == [MEASURED] * 4


def test_nan_in_the_attention_of_one_replica_fails_all(replicas):
    replicas.clusters[0].caches[1].largest[K_SCALE] = float("inf")
    with pytest.raises(CalibrationError, match="NaN or Inf in the attention"):
        replicas.broadcaster.push(replicas.make_policy(1), calibration=BATCH)
    assert replicas.states == [(True, 0)] * 4


def test_a_source_that_raises_leaves_scales_as_they_were(replicas):
    def read():
        yield from list(replicas.make_policy(1).items())[:3]
        raise OSError("the disk is gone")

    policy = replicas.make_policy(1)
    manifest = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in policy.items()}
    with pytest.raises(OSError, match="the disk is gone"):
        replicas.broadcaster.push(read(), manifest=manifest, calibration=BATCH)
    assert replicas.states == [(True, 0)] * 4
    assert replicas.scales == [BOOTED] * 4
    assert [cache.batches for cluster in replicas.clusters for cache in cluster.caches] == [[]] * 4
