"""Ranks that agree: bytes on every one of them, faults at every step on any one of them, and who hears of it."""

import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from fp8refit.config import Job, KvConfig, KvOrder, RefitConfig
from fp8refit.errors import (
    CacheFlushError,
    CalibrationError,
    EngineAsleepError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    InvalidCalibrationError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    StagingMemoryError,
    UnsupportedEngineError,
)
from fp8refit.live.slots import PartlyRead, Refusal
from fp8refit.ranks.rank import Rank
from fp8refit.report import KvReport, RefitReport
from fp8refit.sources.source import as_source
from tests.fake_kv import ATTENTION, K_SCALE, V_SCALE, FakeKvCache
from tests.fake_ranks import (
    BIAS,
    EXPERT_1,
    FAULTS,
    HEAD,
    HIDDEN,
    K_PROJ,
    KV_FAULTS,
    LAYOUTS,
    NORM,
    O_PROJ,
    Q_PROJ,
    Q_PROJ_1,
    SHAPES,
    STATE_DICTS,
    WRITES_NO_SCALE,
    WRITES_NOTHING,
    ClientEngine,
    ClientEntryPoint,
    Cluster,
    Drivers,
    arm,
    as_announced_iterator,
    as_function,
    as_iterator,
    as_mapping,
    manifest_of,
    together,
)
from tests.fakes import live_bytes, make_policy, make_target

CONFIG = RefitConfig()


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def drivers(cluster) -> Drivers:
    """Ranks that hold a good policy."""
    return refitted(cluster)


def refitted(cluster: Cluster, **options) -> Drivers:
    drivers = Drivers(cluster, **options)
    drivers.refit({"state_dict": cluster.make_policy(seed=0)})
    return drivers


def assert_agreed(outcomes, error: type[Exception], match: str) -> Exception:
    """Check that every rank raised the same."""
    assert {type(outcome) for outcome in outcomes} == {error}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    with pytest.raises(error, match=match):
        raise outcomes[0]
    return outcomes[0]


def assert_untouched(cluster: Cluster, before: list[dict[str, bytes]]) -> None:
    assert cluster.live_bytes() == before
    assert cluster.states == [(False, 1)] * 2


def assert_heals(drivers: Drivers, *, version: int = 2) -> None:
    policy = drivers.cluster.make_policy(seed=9)
    reports = drivers.refit({"state_dict": policy})
    assert [type(report) for report in reports] == [RefitReport] * 2, reports
    drivers.cluster.assert_holds(policy, version=version)
    assert [client.blocked for client in drivers.clients] == [None, None]


# Bytes.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_every_rank_holds_its_part_of_every_kind_of_source(layout, make_arguments, tmp_path):
    cluster = Cluster(layout)
    drivers = Drivers(cluster)
    for seed in (1, 2):
        policy = cluster.make_policy(seed)
        reports = drivers.refit(*(make_arguments(policy, tmp_path) for _ in cluster.ranks))
        assert [type(report) for report in reports] == [RefitReport] * 2, reports
        cluster.assert_holds(policy, version=seed)


def test_the_report_is_that_of_all_ranks(cluster):
    policy = cluster.make_policy(1)
    reports = Drivers(cluster).refit({"state_dict": policy})
    slots = [slot for shard in cluster.shards for slot in shard.slots()]
    for report in reports:
        assert [rank.rank for rank in report.ranks] == [0, 1]
        assert (report.num_tensors, report.ignored, report.is_first) == (len(policy), (), True)
        assert report.bytes_read == sum(2 * slot.weight.numel() for slot in slots)
        assert report.bytes_written == sum(
            tensor.nbytes for slot in slots for tensor in (slot.weight, slot.scale) if tensor is not None
        )
        assert "ranks" in str(report)


def test_a_tensor_of_another_rank_is_not_called_ignored():
    cluster = Cluster("pipeline")
    policy = cluster.make_policy(1) | {"model.layers.0.rotary_emb.inv_freq": torch.ones(4)}
    for report in Drivers(cluster).refit({"state_dict": policy}):
        assert report.ignored == ("model.layers.0.rotary_emb.inv_freq",)
        assert report.num_tensors == len(policy) - 1
        assert [rank.num_tensors for rank in report.ranks] == [3, 4]


# Names.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_that_no_rank_holds_is_unexpected(layout):
    cluster = Cluster(layout)
    drivers = refitted(cluster)
    before = cluster.live_bytes()
    policy = cluster.make_policy(1) | {"model.extra.weight": torch.ones(3)}
    error = assert_agreed(drivers.refit({"state_dict": policy}), InvalidSourceError, "model.extra.weight: unexpected")
    assert len(error.problems) == 1
    assert_untouched(cluster, before)


@pytest.mark.parametrize(("layout", "name"), [("tensor", NORM), ("pipeline", Q_PROJ_1), ("expert", EXPERT_1)])
def test_a_name_that_some_rank_misses_is_missing_once(layout, name):
    cluster = Cluster(layout)
    drivers = refitted(cluster)
    before = cluster.live_bytes()
    policy = cluster.make_policy(1)
    del policy[name]
    error = assert_agreed(drivers.refit({"state_dict": policy}), InvalidSourceError, f"{name}: missing")
    assert error.problems == (f"{name}: missing",)
    assert_untouched(cluster, before)


def test_problems_of_all_ranks_are_told_at_once():
    cluster = Cluster("pipeline")
    policy = cluster.make_policy(1) | {Q_PROJ: torch.ones(3), HEAD: torch.ones(3), "model.extra.weight": torch.ones(3)}
    error = assert_agreed(Drivers(cluster).refit({"state_dict": policy}), InvalidSourceError, "3 problems")
    assert sorted(problem.partition(":")[0] for problem in error.problems) == [HEAD, "model.extra.weight", Q_PROJ]


@pytest.mark.parametrize(("layout", "first", "later"), [("tensor", 4, 4), ("pipeline", 5, 4)])
def test_names_are_told_once_and_only_where_ranks_differ(layout, first, later):
    cluster = Cluster(layout)
    drivers = Drivers(cluster)
    for expected in (first, later):
        before = [group.num_exchanges for group in cluster.groups]
        drivers.refit({"state_dict": cluster.make_policy(1)})
        assert [group.num_exchanges - n for group, n in zip(cluster.groups, before, strict=True)] == [expected] * 2


def test_what_all_ranks_together_do_not_read_is_refused_on_every_one():
    cluster = Cluster()
    halves = (((0, 128), (0, HIDDEN)),), (((128, 128), (0, HIDDEN)),)
    columns = (((0, HIDDEN), (0, 128)),), (((0, HIDDEN), (128, 64)),)
    for shard, rows_read, columns_read in zip(cluster.shards, halves, columns, strict=True):
        shard.partly_read = {
            "dropped.bias": PartlyRead(shape=(4,), reason="is not taken by the model's loader"),
            Q_PROJ: PartlyRead(shape=SHAPES[Q_PROJ], boxes=rows_read),
            O_PROJ: PartlyRead(shape=SHAPES[O_PROJ], boxes=columns_read),
            "model.rotary_emb.inv_freq": PartlyRead(shape=(4,)),
        }
    cluster.shards[0].partly_read[NORM] = PartlyRead(shape=SHAPES[NORM])  # the other rank reads it whole
    before = cluster.live_bytes()
    drivers = Drivers(cluster)
    outcomes = drivers.refit({"state_dict": cluster.make_policy(1)})
    error = assert_agreed(outcomes, UnsupportedEngineError, "cannot be refitted")
    assert [reason.split(". ")[0] for reason in error.reasons] == [
        "dropped.bias: 4 of its 4 elements are read by no rank: it is not taken by the model's loader",
        f"{O_PROJ}: {64 * HIDDEN} of its {256 * HIDDEN} elements are read by no rank",
    ]
    assert cluster.live_bytes() == before
    assert [target.version for target in cluster.targets] == [0, 0]


def test_parts_of_which_each_is_read_by_another_rank_are_a_whole():
    cluster = Cluster()
    for rank, shard in enumerate(cluster.shards):
        shard.partly_read = {Q_PROJ: PartlyRead(shape=SHAPES[Q_PROJ], boxes=(((128 * rank, 128), (0, HIDDEN)),))}
    refitted(cluster)
    assert cluster.states == [(False, 1)] * 2


def test_a_tensor_of_another_rank_may_come_in_another_dtype():
    cluster = Cluster("pipeline")
    drivers = refitted(cluster)
    policy = cluster.make_policy(1)
    policy[NORM] = policy[NORM].to(torch.float32)
    reports = drivers.refit({"state_dict": policy})
    assert [type(report) for report in reports] == [RefitReport] * 2, reports
    cluster.assert_holds(policy, version=2)


# Faults.


@pytest.mark.parametrize("make_arguments", [as_mapping, as_announced_iterator])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("error", [StagingMemoryError("no room"), RuntimeError("boom")], ids=repr)
def test_a_fault_of_one_rank_is_every_rank_s(error, fault, rank, make_arguments, drivers, cluster):
    before, policy = cluster.live_bytes(), cluster.make_policy(1)
    arm(cluster.targets[rank], fault, error)
    outcomes = drivers.refit(*(make_arguments(policy, None) for _ in range(2)))
    if isinstance(error, RuntimeError):
        assert outcomes[rank] is error
        assert type(outcomes[1 - rank]) is RankFailedError
        assert str(outcomes[1 - rank]) == f"rank {rank}: RuntimeError: boom"
    else:
        assert_agreed(outcomes, StagingMemoryError, f"^rank {rank}: no room")
    if fault in WRITES_NOTHING:
        assert_untouched(cluster, before)
        assert [client.blocked for client in drivers.clients] == [None, None]
    else:
        assert cluster.states == [(True, 1)] * 2
        assert all("failed part way" in client.blocked for client in drivers.clients)
    assert_heals(drivers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_busy_driver_keeps_every_rank_from_reading_the_source(rank, drivers, cluster):
    before, read = cluster.live_bytes(), []
    drivers.clients[rank].is_busy = True

    def gather():
        read.append(1)
        return iter(())

    error = assert_agreed(drivers.refit({"state_dict": gather}), EngineBusyError, "2 requests are unfinished")
    assert str(error).startswith(f"rank {rank}: ")
    assert read == []
    assert_untouched(cluster, before)
    drivers.clients[rank].is_busy = False
    assert_heals(drivers)


@pytest.mark.parametrize("make_arguments", [as_mapping, as_announced_iterator, as_iterator])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "error", [CacheFlushError("the prefix cache stays"), RuntimeError("boom"), KeyboardInterrupt()], ids=repr
)
def test_a_driver_that_cannot_go_on_keeps_every_rank_from_writing(
    error, rank, make_arguments, drivers, cluster, monkeypatch
):
    async def flush_caches(self):
        if self._model is drivers.clients[rank]:
            raise error

    before, policy = cluster.live_bytes(), cluster.make_policy(1)
    with monkeypatch.context() as patch:
        patch.setattr(ClientEngine, "flush_caches", flush_caches)
        outcomes = drivers.refit(*(make_arguments(policy, None) for _ in range(2)))
    if isinstance(error, CacheFlushError):
        assert_agreed(outcomes, CacheFlushError, f"^rank {rank}: the prefix cache stays")
    else:
        assert outcomes[rank] is error
        assert type(outcomes[1 - rank]) is RankFailedError
        assert str(outcomes[1 - rank]).startswith(f"rank {rank}: {type(error).__name__}: ")
    assert_untouched(cluster, before)
    assert [(client.blocked, client.events[-1]) for client in drivers.clients] == [(None, "resume")] * 2
    assert_heals(drivers)


def test_caches_that_stay_do_not_open_a_dirty_rank(drivers, cluster):
    arm(cluster.targets[0], "finished", StagingMemoryError("no room"))
    drivers.refit({"state_dict": cluster.make_policy(1)})
    before = cluster.live_bytes()
    drivers.clients[1].flush_fails = True
    outcomes = drivers.refit({"state_dict": cluster.make_policy(2)})
    assert_agreed(outcomes, CacheFlushError, "^rank 1: the prefix cache")
    assert (cluster.live_bytes(), cluster.states) == (before, [(True, 1)] * 2)
    assert all("failed part way" in client.blocked for client in drivers.clients)
    drivers.clients[1].flush_fails = False
    assert_heals(drivers)


def test_refusals_of_all_ranks_are_told_together(drivers, cluster):
    before = cluster.live_bytes()
    for rank, shard in enumerate(cluster.shards):
        shard.refusals = (Refusal(module=f"layers.{rank}", reason="repacks", remedy="Set X=1"),)
        cluster.targets[rank].close()
    error = assert_agreed(drivers.refit({"state_dict": {}}), UnsupportedEngineError, "cannot be refitted")
    assert error.reasons == ("layers.0: repacks. Set X=1", "layers.1: repacks. Set X=1")
    assert_untouched(cluster, before)


def test_a_bad_value_in_one_rank_s_part_is_named_on_all(drivers, cluster):
    policy = cluster.make_policy(1)
    policy[Q_PROJ][200, 3] = float("nan")
    error = assert_agreed(drivers.refit({"state_dict": policy}), NonFiniteError, "holds part of this policy")
    assert error.names == (Q_PROJ,)
    assert cluster.states == [(True, 1)] * 2
    assert_heals(drivers)


def test_strict_on_every_rank_writes_nothing(cluster):
    drivers = refitted(cluster, validate="strict")
    before, policy = cluster.live_bytes(), cluster.make_policy(1)
    policy[Q_PROJ][200, 3] = float("nan")
    assert_agreed(drivers.refit({"state_dict": policy}), NonFiniteError, "Nothing was written")
    assert_untouched(cluster, before)


def test_a_device_fault_of_one_rank_ends_the_engine(drivers, cluster):
    arm(cluster.targets[1], "finished", torch.AcceleratorError("an illegal memory access was encountered"))
    outcomes = drivers.refit({"state_dict": cluster.make_policy(1)})
    assert_agreed(outcomes, EngineLostError, "rank 1: a CUDA fault ended")
    assert all("the engine is lost" in client.blocked for client in drivers.clients)
    assert_agreed(drivers.refit({"state_dict": cluster.make_policy(1)}), EngineLostError, "illegal memory access")


def test_an_interrupt_on_one_rank_is_the_others_failure(drivers, cluster):
    policy = cluster.make_policy(1)

    def interrupted():
        yield from list(policy.items())[:2]
        raise KeyboardInterrupt

    outcomes = drivers.refit({"state_dict": interrupted()}, {"state_dict": iter(policy.items())})
    assert type(outcomes[0]) is KeyboardInterrupt
    assert type(outcomes[1]) is RankFailedError
    assert cluster.states == [(True, 1)] * 2
    assert_heals(drivers)


def test_a_stream_is_read_to_its_end_on_every_rank(drivers, cluster):
    policy = cluster.make_policy(1)
    counts = [0, 0]

    def gather(rank, items):
        for item in items:
            counts[rank] += 1
            yield item

    twice = [next(iter(policy.items())), *policy.items()]
    streams = [gather(0, twice), gather(1, policy.items())]
    outcomes = drivers.refit(*({"state_dict": stream, "manifest": manifest_of(policy)} for stream in streams))
    assert_agreed(outcomes, InvalidSourceError, "sent twice")
    assert counts == [len(policy) + 1, len(policy)]
    assert_heals(drivers)


# Ranks that were given different things.


@pytest.mark.parametrize("make_arguments", [as_mapping, as_function, as_announced_iterator])
def test_ranks_given_different_sources_write_nothing(make_arguments, drivers, cluster):
    before, policy = cluster.live_bytes(), cluster.make_policy(1)
    other = policy | {NORM: policy[NORM].to(torch.float32)}
    outcomes = drivers.refit(make_arguments(policy, None), make_arguments(other, None))
    assert_agreed(outcomes, InvalidSourceError, "the ranks were given different names, shapes, dtypes or values")
    assert_untouched(cluster, before)
    assert_heals(drivers)


def test_ranks_that_opened_two_checkpoints_in_one_place_write_nothing(drivers, cluster, tmp_path):
    before, latest = cluster.live_bytes(), tmp_path / "latest"
    sources = []
    for seed in (1, 2):
        save_file(cluster.make_policy(seed), latest.with_suffix(f".{seed}"))
        latest.with_suffix(f".{seed}").rename(latest)
        os.utime(latest, ns=(10**18, 10**18))
        sources.append({"state_dict": as_source(latest)})
    error = assert_agreed(drivers.refit(*sources), InvalidSourceError, "replaced or changed while the ranks opened it")
    assert str(latest) in str(error)
    assert_untouched(cluster, before)
    assert_heals(drivers)


def test_ranks_may_read_copies_that_were_written_at_other_times_and_in_other_shards(drivers, cluster, tmp_path):
    policy = cluster.make_policy(1)
    copies = [tmp_path / name for name in ("whole", "halves")]
    for count, copy in enumerate(copies, 1):
        copy.mkdir()
        for part in range(count):
            file = copy / f"{part}.safetensors"
            save_file(dict(list(policy.items())[part::count]), file)
            os.utime(file, ns=(10**18 + count, 10**18 + count))
    reports = drivers.refit(*({"state_dict": copy} for copy in copies))
    assert [type(report) for report in reports] == [RefitReport] * 2, reports
    cluster.assert_holds(policy, version=2)


def test_unannounced_streams_that_differ_leave_every_rank_dirty(drivers, cluster):
    policy = cluster.make_policy(1)
    other = policy | {NORM: policy[NORM].to(torch.float32)}
    outcomes = drivers.refit(as_iterator(policy, None), as_iterator(other, None))
    error = assert_agreed(
        outcomes, InvalidSourceError, "the ranks were given different names, shapes, dtypes or values"
    )
    assert error.written
    assert cluster.states == [(True, 1)] * 2
    assert_heals(drivers)


def test_a_source_that_one_rank_cannot_make_is_no_rank_s(drivers, cluster):
    before = cluster.live_bytes()
    outcomes = drivers.refit({"state_dict": cluster.make_policy(1)}, {"state_dict": "/nowhere"})
    assert_agreed(outcomes, InvalidSourceError, "/nowhere: does not exist")
    assert_untouched(cluster, before)
    assert_heals(drivers)


def test_a_rank_whose_layout_is_not_proved_is_refused_on_every_rank_unless_nobody_asks(drivers, cluster):
    live, refusal = cluster.targets[1].live, Refusal(module="embed", reason="is loaded otherwise", remedy="Ask")
    read = live._read_inventory
    live._read_inventory = lambda: replace(read(), prove=lambda write, device: (refusal,))
    live.forget()
    before = cluster.live_bytes()
    outcomes = drivers.refit({"state_dict": cluster.make_policy(1)})
    assert_agreed(outcomes, UnsupportedEngineError, "embed: is loaded otherwise. Ask")
    assert_untouched(cluster, before)
    together(
        [
            partial(rank.prepare, partial(as_source, cluster.make_policy(1)), RefitConfig(prove_trace=False))
            for rank in cluster.ranks
        ]
    )
    assert [target.layout().is_proved for target in cluster.targets] == [None, False]


# Ranks out of step.


def test_ranks_out_of_step_end_the_engine(drivers, cluster):
    make_source = partial(as_source, cluster.make_policy(1))
    first, second = cluster.ranks
    prepared, _ = together([partial(rank.prepare, make_source, Job(config=CONFIG)) for rank in cluster.ranks])
    outcomes = together([partial(first.agree, prepared), partial(second.prepare, make_source, Job(config=CONFIG))])
    assert_agreed(outcomes, EngineLostError, "rank 0 is at 'go', rank 1 is at 'ready'")
    outcomes = drivers.refit({"state_dict": cluster.make_policy(1)})
    assert_agreed(outcomes, EngineLostError, "out of step")
    assert all("the engine is lost" in client.blocked for client in drivers.clients)


def test_a_rank_that_never_comes_is_waited_for_as_long_as_asked(cluster):
    start_s = time.perf_counter()
    with pytest.raises(EngineLostError):
        cluster.ranks[0].prepare(lambda: None, Job(config=RefitConfig(timeout_s=0.2)))
    assert 0.2 <= time.perf_counter() - start_s < 5
    assert not cluster.targets[0].is_dirty
    with pytest.raises(EngineLostError):
        cluster.targets[0].check_ready()


def test_a_rank_that_dies_before_all_agreed_leaves_the_others_unwritten_and_lost(drivers, cluster):
    policy, before = cluster.make_policy(1), cluster.live_bytes()

    def die():
        cluster.ranks[1].prepare(partial(as_source, policy), Job(config=CONFIG))
        cluster.groups[1]._meeting.barrier.abort()

    outcome, _ = together([partial(drivers.refitters[0].refit, policy), die])
    assert type(outcome) is EngineLostError
    assert_untouched(cluster, before)
    assert "the engine is lost" in drivers.clients[0].blocked
    with pytest.raises(EngineLostError):
        cluster.targets[0].check_ready()


def test_a_rank_that_dies_while_it_is_written_leaves_the_others_dirty_and_lost(drivers, cluster):
    policy = cluster.make_policy(1)
    kept = threading.Event()

    def die():
        cluster.ranks[1].agree(cluster.ranks[1].prepare(partial(as_source, policy), Job(config=CONFIG)))
        kept.wait(10)
        cluster.groups[1]._meeting.barrier.abort()

    cluster.shards[0].on_refresh = kept.set
    outcome, _ = together([partial(drivers.refitters[0].refit, policy), die])
    assert type(outcome) is EngineLostError
    assert cluster.states[0] == (True, 1)
    assert "the engine is lost" in drivers.clients[0].blocked


def test_versions_that_came_apart_are_one_again_after_the_next_refit(drivers, cluster):
    cluster.targets[1].version = 7
    assert_heals(drivers, version=8)


@pytest.mark.parametrize("way", ["write", "finish"])
def test_a_write_that_is_whole_on_every_rank_is_committed_by_it(way, cluster):
    policy = cluster.make_policy(1)
    prepared = together(
        [partial(rank.prepare, partial(as_source, policy), Job(config=CONFIG)) for rank in cluster.ranks]
    )
    if way == "finish":
        together([partial(rank.target.begin, each) for rank, each in zip(cluster.ranks, prepared, strict=True)])
    outcomes = together([partial(getattr(rank, way), each) for rank, each in zip(cluster.ranks, prepared, strict=True)])
    assert outcomes[0] == outcomes[1]
    assert [report.rank for report in outcomes[0]] == [0, 1]
    cluster.assert_holds(policy, version=1)


# Alone.


def test_alone_nothing_of_the_source_is_read_before_the_rank_is_ready(model):
    target, made = make_target(model), []

    def make_source():
        made.append(1)
        return as_source(make_policy(model, seed=1))

    def asleep():
        raise EngineAsleepError("the weights are asleep")

    target.check_ready = asleep
    with pytest.raises(EngineAsleepError):
        Rank(target).prepare(make_source, Job(config=CONFIG))
    with pytest.raises(EngineBusyError):
        Rank(target).prepare(make_source, Job(config=CONFIG), driver_error=EngineBusyError("2 requests"))
    assert made == []


def test_alone_the_rank_is_asked_once_whether_it_is_ready(model):
    target, asked = make_target(model), []
    check_ready = target.check_ready
    target.check_ready = lambda: asked.append(1) or check_ready()
    Rank(target).prepare(lambda: as_source(make_policy(model, seed=1)), Job(config=CONFIG))
    assert asked == [1]


def test_alone_an_error_is_raised_as_it_is(model):
    error = ConnectionError("the trainer went away")

    def make_source():
        raise error

    with pytest.raises(ConnectionError) as caught:
        Rank(make_target(model)).prepare(make_source, Job(config=CONFIG))
    assert caught.value is error


# What is held, and for how long.


@pytest.mark.parametrize("fault", [None, "judged", "prepared", "finished"])
def test_every_rank_lets_go_of_the_source_however_the_refit_ends(fault, drivers, cluster):
    policy = cluster.make_policy(1)
    policy[BIAS] = policy[BIAS].to(torch.float32)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    if fault is not None:
        arm(cluster.targets[1], fault, StagingMemoryError("no room"))
    drivers.refit({"state_dict": policy})
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_closed_ranks_can_be_refitted_again(drivers, cluster):
    together([refitter.close for refitter in drivers.refitters])
    assert_heals(drivers)


def test_the_layout_is_that_of_this_rank(cluster):
    assert [slot.offset for slot in cluster.ranks[1].target.live.layout().slots if slot.name == Q_PROJ] == [(128, 0)]
    assert K_PROJ in {slot.name for slot in cluster.ranks[1].target.live.layout().slots}


# KV scales.


BATCH = [[1, 2, 3], [4, 5]]
KV_CONFIG = RefitConfig(kv=KvConfig(margin=1.0))
"""A scale is the largest value over 448."""
OTHER_ATTENTION = "model.layers.1.self_attn"


@pytest.fixture
def kv_cluster() -> Cluster:
    """Two ranks of the same attention layer, of which each sees something larger than the other does."""
    cluster = Cluster(kv=[[ATTENTION], [ATTENTION]])
    for cache, largest in zip(cluster.caches, ((896.0, 448.0), (448.0, 1344.0)), strict=True):
        cache.largest = dict(zip((K_SCALE, V_SCALE), largest, strict=True))
    return cluster


@pytest.fixture
def kv_drivers(kv_cluster) -> Drivers:
    """Ranks that hold a good policy."""
    return refitted(kv_cluster, config=KV_CONFIG)


LARGEST = {K_SCALE: 2.0, V_SCALE: 3.0}
BOOTED = {K_SCALE: 1.0, V_SCALE: 1.0}


def test_every_rank_uses_the_largest_value_that_any_of_them_saw(kv_drivers, kv_cluster):
    reports = kv_drivers.calibrate({"calibration": BATCH})
    assert [type(report) for report in reports] == [KvReport] * 2, reports
    for report in reports:
        assert (report.origin, report.scales, report.kept) == ("calibration", LARGEST, ())
        assert (report.num_sequences, report.num_tokens, report.num_passes) == (2, 5, 1)
    assert kv_cluster.scales == [LARGEST] * 2
    assert kv_cluster.states == [(False, 1)] * 2
    assert [cache.batches for cache in kv_cluster.caches] == [[BATCH]] * 2
    assert [cache.num_writes for cache in kv_cluster.caches] == [1, 1]
    assert [client.blocked for client in kv_drivers.clients] == [None, None]


def test_each_rank_may_use_what_it_saw_itself(kv_cluster):
    drivers = refitted(kv_cluster, kv=KvConfig(margin=1.0, reduction="rank"))
    reports = drivers.calibrate({"calibration": BATCH})
    assert kv_cluster.scales == [{K_SCALE: 2.0, V_SCALE: 1.0}, {K_SCALE: 1.0, V_SCALE: 3.0}]
    assert [report.scales for report in reports] == [{K_SCALE: 2.0, V_SCALE: 3.0}] * 2


def test_ranks_of_other_layers_each_write_their_own():
    cluster = Cluster("pipeline", kv=[[ATTENTION], [OTHER_ATTENTION]])
    drivers = refitted(cluster, config=KV_CONFIG)
    cluster.caches[1].largest = dict.fromkeys(cluster.caches[1].largest, 4 * 448.0)
    reports = drivers.calibrate({"calibration": BATCH})
    assert [type(report) for report in reports] == [KvReport] * 2, reports
    assert [set(scales.values()) for scales in cluster.scales] == [{1.0}, {4.0}]
    assert [cache.num_writes for cache in cluster.caches] == [1, 1]


def test_what_one_rank_alone_saw_is_every_rank_s_and_what_none_saw_is_kept(kv_drivers, kv_cluster):
    for cache in kv_cluster.caches:
        cache.largest[V_SCALE] = 0.0
    kv_cluster.caches[0].largest[K_SCALE] = 0.0
    reports = kv_drivers.calibrate({"calibration": BATCH})
    assert [(report.scales, report.kept) for report in reports] == [({K_SCALE: 1.0}, (V_SCALE,))] * 2
    assert kv_cluster.scales == [BOOTED] * 2


def test_scales_are_set_with_the_weights(kv_drivers, kv_cluster):
    policy = kv_cluster.make_policy(1)
    reports = kv_drivers.refit({"state_dict": policy, "calibration": BATCH})
    assert [type(report) for report in reports] == [RefitReport] * 2, reports
    kv_cluster.assert_holds(policy, version=2)
    assert kv_cluster.scales == [report.kv.scales for report in reports] == [LARGEST] * 2
    assert all("kv" in report.phases_s for report in reports)


def test_the_network_that_is_measured_holds_the_new_policy(kv_drivers, kv_cluster):
    policy, held = kv_cluster.make_policy(1), []
    for shard in kv_cluster.shards:
        shard.kv.on_pass = lambda shard=shard: held.append(live_bytes(shard))
    kv_drivers.refit({"state_dict": policy, "calibration": BATCH})
    assert len(held) == 2
    assert all(written in kv_cluster.live_bytes() for written in held)
    kv_cluster.assert_holds(policy, version=2)


def test_scales_are_carried_over_by_a_refit_without_any(kv_drivers, kv_cluster):
    kv_drivers.calibrate({"calibration": BATCH})
    assert_heals(kv_drivers)
    assert kv_cluster.scales == [LARGEST] * 2


def test_given_scales_are_every_rank_s(kv_drivers, kv_cluster):
    given = {f"{ATTENTION}.attn.k_scale": 0.5, V_SCALE: 0.25, f"{ATTENTION}.q_scale": 9.0}
    reports = kv_drivers.refit({"state_dict": kv_cluster.make_policy(1), "kv_scales": given})
    assert [type(report) for report in reports] == [RefitReport] * 2, reports
    assert kv_cluster.scales == [report.kv.scales for report in reports] == [{K_SCALE: 0.5, V_SCALE: 0.25}] * 2
    assert [cache.batches for cache in kv_cluster.caches] == [[], []]


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_scales_that_come_with_the_weights_are_every_rank_s(make_arguments, kv_drivers, kv_cluster, tmp_path):
    policy = kv_cluster.make_policy(1)
    sent = policy | {K_SCALE: torch.tensor(0.5), f"{ATTENTION}.attn.v_scale": torch.tensor([0.25])}
    reports = kv_drivers.refit(*(make_arguments(sent, tmp_path) for _ in kv_cluster.ranks))
    assert [type(report) for report in reports] == [RefitReport] * 2, reports
    kv_cluster.assert_holds(policy, version=2)
    assert kv_cluster.scales == [{K_SCALE: 0.5, V_SCALE: 0.25}] * 2
    assert [report.kv.origin for report in reports] == ["state_dict"] * 2


@pytest.mark.parametrize(("call", "expected"), [("calibrate", 4), ("refit", 6), ("plain refit", 4)])
def test_ranks_vote_when_they_are_ready_when_they_have_measured_and_when_they_have_written(
    call, expected, kv_drivers, kv_cluster
):
    before = [group.num_exchanges for group in kv_cluster.groups]
    if call == "calibrate":
        kv_drivers.calibrate({"calibration": BATCH})
    else:
        more = {"calibration": BATCH} if call == "refit" else {}
        kv_drivers.refit({"state_dict": kv_cluster.make_policy(1), **more})
    assert [group.num_exchanges - n for group, n in zip(kv_cluster.groups, before, strict=True)] == [expected] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["ready", *KV_FAULTS])
@pytest.mark.parametrize("error", [CalibrationError("no memory"), RuntimeError("boom")], ids=repr)
@pytest.mark.parametrize("call", ["calibrate", "refit"])
def test_a_fault_of_one_rank_in_its_scales_is_every_rank_s(call, error, fault, rank, kv_drivers, kv_cluster):
    before = kv_cluster.live_bytes()
    arm(kv_cluster.targets[rank], fault, error)
    if call == "calibrate":
        outcomes = kv_drivers.calibrate({"calibration": BATCH})
        is_clean = fault in WRITES_NO_SCALE
    else:
        outcomes = kv_drivers.refit({"state_dict": kv_cluster.make_policy(1), "calibration": BATCH})
        is_clean = fault in ("ready", "kv judged")
    if isinstance(error, RuntimeError):
        assert outcomes[rank] is error
        assert str(outcomes[1 - rank]) == f"rank {rank}: RuntimeError: boom"
    else:
        assert_agreed(outcomes, CalibrationError, f"^rank {rank}: no memory")
    if fault in WRITES_NO_SCALE:
        assert kv_cluster.scales == [BOOTED] * 2
    assert kv_cluster.states == [(not is_clean, 1)] * 2
    assert (kv_cluster.live_bytes() == before) == (is_clean or call == "calibrate")
    for client in kv_drivers.clients:
        assert client.blocked is None if is_clean else "failed part way" in client.blocked
    assert_heals(kv_drivers)
    kv_drivers.calibrate({"calibration": BATCH})
    assert kv_cluster.scales == [LARGEST] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [0, 1])
def test_nan_that_one_rank_sees_is_told_on_all_and_no_scale_is_written(rank, bad, kv_drivers, kv_cluster):
    kv_cluster.caches[rank].largest[V_SCALE] = bad
    outcomes = kv_drivers.calibrate({"calibration": BATCH})
    assert_agreed(outcomes, CalibrationError, f"rank {rank}: NaN or Inf in the attention at 1 place.*{V_SCALE}")
    assert kv_cluster.scales == [BOOTED] * 2
    assert kv_cluster.states == [(False, 1)] * 2
    outcomes = kv_drivers.refit({"state_dict": kv_cluster.make_policy(1), "calibration": BATCH})
    assert_agreed(outcomes, CalibrationError, f"rank {rank}: NaN or Inf")
    assert kv_cluster.states == [(True, 1)] * 2
    assert_heals(kv_drivers)


def test_ranks_given_different_batches_write_nothing(kv_drivers, kv_cluster):
    before = kv_cluster.live_bytes()
    outcomes = kv_drivers.calibrate({"calibration": BATCH}, {"calibration": BATCH[:1]})
    assert_agreed(outcomes, RankFailedError, "want to refit in different ways")
    policy = kv_cluster.make_policy(1)
    outcomes = kv_drivers.refit(
        {"state_dict": policy, "calibration": BATCH}, {"state_dict": policy, "kv_scales": {K_SCALE: 2.0}}
    )
    assert_agreed(outcomes, RankFailedError, "want to refit in different ways")
    assert_untouched(kv_cluster, before)
    assert kv_cluster.scales == [BOOTED] * 2


@pytest.mark.parametrize("call", ["calibrate", "refit"])
def test_a_batch_that_does_not_fit_is_refused_on_every_rank(call, kv_drivers, kv_cluster):
    before, batch = kv_cluster.live_bytes(), {"calibration": [[100]]}
    outcomes = (
        kv_drivers.calibrate(batch)
        if call == "calibrate"
        else kv_drivers.refit({"state_dict": kv_cluster.make_policy(1), **batch})
    )
    assert_agreed(outcomes, InvalidCalibrationError, "^all ranks: calibration: token id 100 is outside")
    assert_untouched(kv_cluster, before)


def test_an_engine_without_an_fp8_cache_on_one_rank_is_refused_on_all(kv_drivers, kv_cluster):
    kv_cluster.shards[1].kv = None
    kv_cluster.targets[1].close()
    before = kv_cluster.live_bytes()
    outcomes = kv_drivers.calibrate({"calibration": BATCH})
    assert_agreed(outcomes, UnsupportedEngineError, "rank 1: fp8refit knows no KV cache of fake")
    assert_untouched(kv_cluster, before)


def test_a_dirty_rank_is_not_calibrated_and_neither_are_the_others(kv_drivers, kv_cluster):
    arm(kv_cluster.targets[0], "finished", StagingMemoryError("no room"))
    kv_drivers.refit({"state_dict": kv_cluster.make_policy(1)})
    assert_agreed(kv_drivers.calibrate({"calibration": BATCH}), EngineDirtyError, "weights are incomplete")
    job = Job(config=KV_CONFIG, kv=KvOrder(token_ids=((1, 2),)))
    kv_cluster.targets[0].is_dirty = False
    outcomes = together([partial(rank.calibrate, job) for rank in kv_cluster.ranks])
    assert_agreed(outcomes, EngineDirtyError, "^rank 1: this engine's weights are incomplete")
    assert kv_cluster.scales == [BOOTED] * 2
    assert_heals(kv_drivers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_driver_that_may_not_calibrate_keeps_every_rank_from_it(rank, kv_drivers, kv_cluster):
    kv_drivers.clients[rank].is_busy = True
    outcomes = kv_drivers.calibrate({"calibration": BATCH})
    assert_agreed(outcomes, EngineBusyError, f"^rank {rank}: 2 requests are unfinished")
    assert [cache.batches for cache in kv_cluster.caches] == [[], []]
    assert kv_cluster.states == [(False, 1)] * 2
    kv_drivers.clients[rank].is_busy = False
    kv_drivers.calibrate({"calibration": BATCH})
    assert kv_cluster.scales == [LARGEST] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_written_in_part_on_one_rank_leave_every_rank_dirty(rank, kv_drivers, kv_cluster, monkeypatch):
    def fail(*_):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(kv_cluster.caches[rank], "_count_write", fail)
        kv_cluster.targets[rank].close()
        outcomes = kv_drivers.calibrate({"calibration": BATCH})
    assert [str(outcome).removeprefix(f"rank {rank}: RuntimeError: ") for outcome in outcomes] == ["boom"] * 2
    assert kv_cluster.states == [(True, 1)] * 2
    assert all("failed part way (" in client.blocked for client in kv_drivers.clients)
    kv_cluster.targets[rank].close()
    assert_heals(kv_drivers)
    assert kv_cluster.scales == [BOOTED] * 2, "the last whole set, on the rank that wrote another one too"


def test_alone_a_rank_raises_what_its_pass_raised(model):
    error = ConnectionError("gone")

    def fail() -> None:
        raise error

    model.kv = FakeKvCache()
    model.kv.on_pass = fail
    target = make_target(model)
    with pytest.raises(ConnectionError) as caught:
        Rank(target).calibrate(Job(config=CONFIG, kv=KvOrder(token_ids=((1,),))))
    assert caught.value is error
    assert not target.is_dirty
    model.kv.on_pass = lambda: None
    assert Rank(target).calibrate(Job(config=KV_CONFIG, kv=KvOrder(token_ids=((1,),)))).scales == BOOTED
    assert target.version == 0


def test_memory_that_runs_out_in_a_pass_is_a_calibration_error(kv_drivers, kv_cluster):
    def fail() -> None:
        raise torch.OutOfMemoryError("1 GiB")

    kv_cluster.caches[1].on_pass = fail
    outcomes = kv_drivers.calibrate({"calibration": BATCH})
    assert_agreed(outcomes, CalibrationError, "rank 1: no memory on cpu for a calibration pass .* shorter sequences")
    assert kv_cluster.states == [(False, 1)] * 2
