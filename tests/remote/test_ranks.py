"""One driver, and ranks elsewhere: the same promises as in one process, over a channel that may lose, repeat and mangle."""

import asyncio
import gc
import json
import os
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8refit import KvConfig, RefitConfig, RefitReport, __version__, gathered
from fp8refit.config import Job
from fp8refit.errors import (
    CacheFlushError,
    CalibrationError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    StagingMemoryError,
    UnsupportedEngineError,
)
from fp8refit.fill.staging import Staging
from fp8refit.live.formats import ScaleFormat
from fp8refit.live.slots import Refusal
from fp8refit.ranks.live_model import LiveModel
from fp8refit.remote.host.host_route import HostRoute
from fp8refit.remote.protocol.channel import GRACE_S, NUM_VOTES
from fp8refit.remote.protocol.messages import Packed, RefitStep
from fp8refit.sources.source import as_source
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.memfd import map_memfd
from fp8refit.transport.memory.ring import Ring
from tests.fake_kv import ATTENTION, K_SCALE, V_SCALE
from tests.fake_ranks import (
    FAULTS,
    K_PROJ,
    KV_FAULTS,
    LAYOUTS,
    NORM,
    O_PROJ,
    Q_PROJ,
    SHAPES,
    STATE_DICTS,
    UP_PROJ,
    WRITES_NO_SCALE,
    WRITES_NOTHING,
    ClientEngine,
    ClientEntryPoint,
    Cluster,
    Remote,
    arm,
    as_announced_iterator,
    as_files,
    as_function,
    as_iterator,
    as_mapping,
    manifest_of,
)
from tests.fakes import bytes_of, changes_of, copies_of, prequantize
from tests.remote.test_rank_server import exporter_of, mapped_segments, on_the_gpu
from tests.transport.memory.test_shared_tensors import FakeDriver

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def remote(cluster):
    """Ranks that hold a good policy."""
    remote = refitted(cluster)
    yield remote
    remote.refitter.close()


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    """GPU memory for tensors that go by handle, as of another process."""
    driver = FakeDriver()
    monkeypatch.setattr("fp8refit.remote.host.host_route.Exporter", lambda: exporter_of(driver))
    monkeypatch.setattr("fp8refit.remote.rank_orders.Importer", lambda device: Importer(device, driver=driver))
    return driver


def refitted(cluster: Cluster, **options) -> Remote:
    remote = Remote(cluster, **options)
    remote.refitter.refit(cluster.make_policy(seed=0))
    remote.channel.requests.clear()
    return remote


def refuse(remote: Remote, error: type[Exception], match: str, state_dict, **more) -> Exception:
    """Check that nothing is written, and that the engine serves on."""
    before = remote.cluster.live_bytes()
    with pytest.raises(error, match=match) as caught:
        remote.refitter.refit(state_dict, **more)
    assert remote.cluster.live_bytes() == before
    assert remote.cluster.states == [(False, 1)] * 2
    assert (remote.refitter.is_dirty, remote.refitter.version, remote.client.blocked) == (False, 1, None)
    return caught.value


def break_off(remote: Remote, error: type[Exception], match: str, state_dict, **more) -> Exception:
    """Check that every rank is dirty, and that the engine refuses."""
    with pytest.raises(error, match=match) as caught:
        remote.refitter.refit(state_dict, **more)
    assert remote.cluster.states == [(True, 1)] * 2
    assert (remote.refitter.is_dirty, remote.refitter.version) == (True, 1)
    assert "failed part way" in remote.client.blocked
    return caught.value


def assert_heals(remote: Remote, *, version: int = 2) -> None:
    policy = remote.cluster.make_policy(seed=9)
    assert remote.refitter.refit(policy).version == version
    remote.cluster.assert_holds(policy, version=version)
    assert (remote.refitter.is_dirty, remote.client.blocked) == (False, None)


# Bytes.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_every_rank_holds_its_part_of_every_kind_of_source(layout, make_arguments, tmp_path):
    remote = Remote(Cluster(layout), count_changes=True)
    for version in (1, 2):
        policy, slots = remote.cluster.make_policy(seed=version), remote.cluster.slots
        before = copies_of(slots)
        report = remote.refitter.refit(**make_arguments(policy, tmp_path))
        remote.cluster.assert_holds(policy, version=version)
        assert (report.version, report.num_tensors) == (version, len(policy))
        assert report.changed == changes_of(slots, before)
        assert [rank.rank for rank in report.ranks] == [0, 1]
    remote.refitter.close()


def test_tensors_that_ranks_can_map_stay_where_they_are(driver, cluster):
    remote = Remote(cluster)
    policy = on_the_gpu(cluster.make_policy(seed=1), driver)
    for version in (1, 2, 3):
        for tensor, new in zip(policy.values(), cluster.make_policy(seed=version).values(), strict=True):
            tensor.copy_(new)
        remote.refitter.refit(policy)
        cluster.assert_holds(policy, version=version)
    sources = [request.order.source for request in remote.channel.requests if request.order.step == "prepare"]
    assert {source.kind for source in sources} == {"mapped"}
    assert [source.refs is None for source in sources] == [False, False, True]
    assert len({source.digest for source in sources}) == 1
    prepares = [request.order for request in remote.channel.requests if request.order.step == "prepare"]
    assert ["tensors" in prepare.keeps for prepare in prepares] == [False, True, True]


def test_tensors_that_stay_in_place_cost_one_question_a_segment(driver, cluster):
    remote, policy = Remote(cluster), on_the_gpu(cluster.make_policy(seed=1), driver)
    for _ in range(2):
        remote.refitter.refit(policy)
    driver.events.clear()
    remote.refitter.refit(policy)
    assert driver.events == ["buffer_id"]


def test_memory_that_the_trainer_takes_anew_is_unmapped_after_every_refit(driver, cluster):
    remote = Remote(cluster)
    for version in (1, 2, 3):
        policy = on_the_gpu(cluster.make_policy(seed=version), driver)
        remote.refitter.refit(policy)
        cluster.assert_holds(policy, version=version)
    prepares = [request.order for request in remote.channel.requests if request.order.step == "prepare"]
    assert ["tensors" in prepare.keeps for prepare in prepares] == [False, False, False]
    assert [driver.events.count(f"close_ipc {number}") for number in (1, 2, 3)] == [2, 2, 2]


def test_what_ranks_have_mapped_stays_mapped_whatever_is_refitted_in_between(driver, cluster, tmp_path, monkeypatch):
    remote, policy = Remote(cluster), on_the_gpu(cluster.make_policy(seed=1), driver)
    for _ in range(2):
        remote.refitter.refit(policy)
    remote.refitter.refit(iter(cluster.make_policy(seed=2).items()))
    opened, maps = driver.events.count("open_ipc"), []
    monkeypatch.setattr(
        "fp8refit.transport.memory.importer.map_memfd", lambda segment: maps.append(segment) or map_memfd(segment)
    )
    remote.channel.requests.clear()
    for version in (4, 7, 10):
        remote.refitter.refit(policy)
        cluster.assert_holds(policy, version=version)
        assert remote.refitter.verify(policy).is_equal
        remote.refitter.refit(**as_files(cluster.make_policy(seed=3), tmp_path))
        streamed = cluster.make_policy(seed=version)
        remote.refitter.refit(iter(streamed.items()))
        cluster.assert_holds(streamed, version=version + 2)
    remote.refitter.verify(policy)
    sources = [request.order.source for request in remote.channel.requests if request.order.step == "prepare"]
    assert all(source.refs is None for source in sources if source.kind == "mapped")
    assert driver.events.count("open_ipc") == opened
    assert not any(event.startswith("close_ipc") for event in driver.events[driver.events.index("open_ipc") + 4 :])
    assert not maps
    remote.refitter.close()


def test_a_refit_that_verify_follows_keeps_its_tensors_mapped(driver, cluster):
    remote, policy = Remote(cluster), on_the_gpu(cluster.make_policy(seed=1), driver)
    for _ in range(3):
        remote.refitter.refit(policy)
        assert remote.refitter.verify(policy).is_equal
    sources = [request.order.source for request in remote.channel.requests if request.order.step == "prepare"]
    assert [source.refs is None for source in sources] == [False, False, True, True, True, True]


@pytest.mark.parametrize("make_arguments", [each for each in STATE_DICTS if each is not as_mapping])
def test_tensors_that_the_trainer_freed_are_unmapped_by_any_refit(make_arguments, driver, cluster, tmp_path):
    remote, policy = Remote(cluster), on_the_gpu(cluster.make_policy(seed=1), driver)
    for _ in range(2):
        remote.refitter.refit(policy)
    ((memory, _),) = driver.buffers.values()
    driver.events.clear()
    driver.reallocate(memory)
    streamed = cluster.make_policy(seed=2)
    remote.refitter.refit(**make_arguments(streamed, tmp_path))
    assert sum(event.startswith("close_ipc") for event in driver.events) == 2
    cluster.assert_holds(streamed, version=3)
    remote.refitter.close()


def test_a_step_is_told_to_every_rank_once(patient, remote, cluster, tmp_path):
    remote.refitter.refit(**as_files(cluster.make_policy(1), tmp_path))
    assert remote.channel.steps == ["prepare", "write"]
    remote.channel.requests.clear()
    remote.refitter.refit(cluster.make_policy(2))
    assert remote.channel.steps == ["prepare", "stream", "finish"]


@pytest.mark.parametrize("suspends", [False, True])
def test_ranks_read_their_layout_while_the_first_policy_is_described(suspends, patient, cluster, monkeypatch):
    remote, described = Remote(cluster, suspends=suspends), threading.Event()
    read = LiveModel.read

    def read_then(live):
        assert live.inventory is not None or described.wait(10), "the policy is described after the layout is read"
        return read(live)

    def offer(route, source, job):
        found = describe(route, source, job)
        described.set()
        return found

    def refit(policy):
        if suspends:
            asyncio.run(remote.refitter.refit_async(policy))
        else:
            remote.refitter.refit(policy)

    describe = HostRoute._offer
    monkeypatch.setattr(LiveModel, "read", read_then)
    monkeypatch.setattr(HostRoute, "_offer", offer)
    refit(cluster.make_policy(1))
    assert remote.channel.steps == ["hello", "read", "prepare", "stream", "finish"]
    remote.channel.requests.clear()
    refit(cluster.make_policy(2))
    assert "read" not in remote.channel.steps
    cluster.assert_holds(cluster.make_policy(2), version=2)


def test_what_goes_wrong_while_ranks_read_their_layout_leaves_no_answer_behind(cluster, monkeypatch):
    remote, offer = Remote(cluster), HostRoute._offer
    send, happened = remote.channel.send, []

    async def send_and_note(messages, timeouts_s, *, begins):
        answers = await send(messages, timeouts_s, begins=begins)
        if not begins:
            return answers

        async def hear():
            heard = await answers
            happened.append("heard")
            return heard

        return hear()

    def fail(route, source, job):
        raise MemoryError("no memory for names")

    remote.channel.on_request = lambda request: happened.append(request.order.step)
    monkeypatch.setattr(remote.channel, "send", send_and_note)
    monkeypatch.setattr(HostRoute, "_offer", fail)
    with pytest.raises(MemoryError, match="no memory for names"):
        remote.refitter.refit(cluster.make_policy(1))
    assert happened == ["hello", "read", "heard", "abandon"]
    monkeypatch.setattr(HostRoute, "_offer", offer)
    remote.refitter.refit(cluster.make_policy(2))
    cluster.assert_holds(cluster.make_policy(2), version=1)


def test_ranks_that_are_not_ready_say_so_before_they_say_that_they_cannot_be_read(cluster, monkeypatch):
    remote, target = Remote(cluster), cluster.ranks[1].target

    def fail():
        raise UnsupportedEngineError("the live weights are on meta")

    def refuse():
        raise EngineBusyError("the engine loads weights itself")

    monkeypatch.setattr(target.live, "read", fail)
    with pytest.raises(UnsupportedEngineError, match=r"^rank 1: the live weights are on meta"):
        remote.refitter.refit(cluster.make_policy(1))
    monkeypatch.setattr(target, "_check_engine", refuse)
    with pytest.raises(EngineBusyError, match=r"^rank 1: the engine loads weights itself"):
        remote.refitter.refit(cluster.make_policy(1))
    assert remote.channel.steps == ["hello", *["read", "prepare", "abandon"] * 2]


def test_a_driver_waits_longer_than_the_ranks_for_each_other(cluster):
    remote = Remote(cluster, timeout_s=7.0)
    remote.refitter.refit(cluster.make_policy(1))
    assert set(remote.channel.timeouts_s) == {7.0 + GRACE_S, NUM_VOTES * 7.0 + GRACE_S}


def test_fingerprints_come_in_order_of_rank():
    cluster = Cluster()
    remote = Remote(cluster)
    remote.refitter.refit(cluster.make_policy(1))
    first = remote.refitter.fingerprints()
    assert len(first) == len(cluster.shards) == len(set(first))
    remote.refitter.refit(cluster.make_policy(2))
    assert not set(first) & set(remote.refitter.fingerprints())
    remote.refitter.refit(cluster.make_policy(1))
    assert remote.refitter.fingerprints() == first


def test_the_layout_is_that_of_all_ranks():
    cluster = Cluster("pipeline")
    layout = Remote(cluster).refitter.layout()
    assert [slot.name for slot in layout.slots] == list(cluster.make_policy(1))


def test_closing_unmaps_everything_and_keeps_version_and_plan_of_the_engine(cluster):
    before = mapped_segments()
    remote = refitted(cluster)
    assert len(mapped_segments() - before) == len(("bucket", "its twin", "ring"))
    remote.refitter.close()
    assert not mapped_segments() - before
    assert remote.refitter.version == 1
    assert_heals(remote)
    remote.refitter.close()


# Faults.


@pytest.mark.parametrize("make_arguments", [as_files, as_mapping])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("error", [StagingMemoryError("no room"), RuntimeError("boom")], ids=repr)
def test_a_fault_of_one_rank_is_the_engine_s(error, fault, rank, make_arguments, remote, cluster, tmp_path):
    arm(cluster.targets[rank], fault, error)
    arguments = make_arguments(cluster.make_policy(1), tmp_path)
    kind = RankFailedError if isinstance(error, RuntimeError) else StagingMemoryError
    told = refuse if fault in WRITES_NOTHING else break_off
    told(remote, kind, f"{error}", **arguments)
    assert remote.channel.steps[-1] == "abandon"
    assert_heals(remote)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_one_rank_cannot_take_leaves_every_rank_dirty(rank, remote, cluster):
    arm_push = StagingMemoryError("no room")
    target = cluster.targets[rank]

    def fail(*_, **__):
        del target.push
        raise arm_push

    target.push = fail
    break_off(remote, StagingMemoryError, f"^rank {rank}: no room", cluster.make_policy(1))
    assert_heals(remote)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_alone_cannot_commit_leaves_the_engine_dirty_until_versions_are_one_again(rank, remote, cluster):
    target = cluster.targets[rank]

    def fail(*_):
        del target.commit
        raise RuntimeError("boom")

    target.commit = fail
    with pytest.raises(RankFailedError, match=f"rank {rank}: RuntimeError: boom"):
        remote.refitter.refit(cluster.make_policy(1))
    assert (remote.refitter.is_dirty, remote.refitter.version) == (True, 1)
    assert "failed part way" in remote.client.blocked
    assert_heals(remote, version=3)


def test_an_error_of_all_ranks_is_told_once(remote, cluster):
    policy = cluster.make_policy(1)
    policy[K_PROJ][0, 0] = float("nan")  # both ranks hold it
    error = break_off(remote, NonFiniteError, "holds part of this policy", policy)
    assert error.names == (K_PROJ,)
    assert_heals(remote)


def test_names_that_ranks_cannot_take_are_told_before_a_byte_is_written(remote, cluster):
    policy = cluster.make_policy(1) | {"extra": torch.ones(1)}
    del policy[NORM]
    error = refuse(remote, InvalidSourceError, "2 problems", policy)
    assert sorted(error.problems) == [
        "extra: unexpected, this engine has no such weight; leave it out",
        f"{NORM}: missing",
    ]
    assert_heals(remote)


@pytest.mark.parametrize("gpu", [False, True])
def test_nothing_is_a_source_too(gpu, cluster, request):
    if gpu:
        request.getfixturevalue("driver")
    with pytest.raises(InvalidSourceError, match=f"{NORM}: missing"):
        Remote(cluster).refitter.refit({})


@pytest.mark.parametrize("gpu", [False, True])
def test_what_the_driver_finds_wrong_is_told_with_the_rest_and_only_then(gpu, cluster, request):
    policy = cluster.make_policy(1)
    if gpu:
        policy = on_the_gpu(policy, request.getfixturevalue("driver"))
    remote = Remote(cluster)
    twice = [*policy.items(), ("module." + NORM, policy[NORM]), ("extra", 3)]
    with pytest.raises(InvalidSourceError, match="2 problems") as caught:
        remote.refitter.refit(twice)
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == ["extra", NORM]
    remote.refitter.refit(policy)
    cluster.assert_holds(policy, version=1)
    remote.refitter.close()


def test_refusals_of_all_ranks_are_told(cluster):
    cluster.shards[1].refusals = (Refusal(module="layers.1", reason="repacks", remedy="Set X=1"),)
    with pytest.raises(UnsupportedEngineError, match=r"layers\.1: repacks\. Set X=1"):
        Remote(cluster).refitter.refit(cluster.make_policy(1))
    assert cluster.states == [(False, 0)] * 2


def test_ranks_that_cannot_be_made_are_each_told(cluster):
    remote = Remote(cluster)

    def fail():
        raise UnsupportedEngineError("no process group of their own; leave out pipeline parallelism")

    for server in remote.servers:
        server._make_rank = fail
    with pytest.raises(UnsupportedEngineError, match=r"^no process group"):
        remote.refitter.refit(cluster.make_policy(1))
    remote.servers[0]._make_rank = lambda: cluster.ranks[0]
    with pytest.raises(UnsupportedEngineError, match=r"^rank 1: no process group"):
        remote.refitter.refit(cluster.make_policy(1))


def test_a_busy_engine_is_left_alone(remote, cluster):
    remote.client.is_busy = True
    refuse(remote, EngineBusyError, "2 requests are unfinished", cluster.make_policy(1))
    assert remote.channel.steps == []


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_caches_that_stay_leave_the_engine_on_the_old_policy(make_arguments, remote, cluster, tmp_path):
    remote.client.flush_fails = True
    policies = [cluster.make_policy(1)]
    kept = [weakref.ref(tensor) for tensor in policies[0].values()]
    refuse(remote, CacheFlushError, "the prefix cache", **make_arguments(policies.pop(), tmp_path))
    assert remote.client.events[-1] == "resume"
    assert set(remote.channel.steps) == {"prepare", "abandon"}
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    remote.client.flush_fails = False
    assert_heals(remote)


def test_caches_that_stay_do_not_open_a_dirty_engine(remote, cluster):
    break_off(
        remote, NonFiniteError, "part of this policy", cluster.make_policy(1) | {NORM: torch.full((192,), torch.nan)}
    )
    remote.client.flush_fails = True
    break_off(remote, CacheFlushError, "the prefix cache", cluster.make_policy(1))
    remote.client.flush_fails = False
    assert_heals(remote)


def test_a_flush_that_fails_does_not_cost_the_next_refit(driver, cluster):
    remote = Remote(cluster)
    policies = [on_the_gpu(cluster.make_policy(seed), driver) for seed in range(2)]
    for _ in range(3):
        remote.refitter.refit(policies[0])
    remote.client.flush_fails = True
    with pytest.raises(CacheFlushError):
        remote.refitter.refit(policies[1])
    remote.client.flush_fails = False
    remote.refitter.refit(policies[0])
    cluster.assert_holds(policies[0], version=4)


@pytest.mark.parametrize("refits", [1, 3])
def test_a_rank_that_lost_the_tensors_it_had_gets_them_again_in_the_same_refit(driver, cluster, refits):
    remote = Remote(cluster)
    policy = on_the_gpu(cluster.make_policy(1), driver)
    for _ in range(refits):
        remote.refitter.refit(policy)
    for tensor, new in zip(policy.values(), cluster.make_policy(2).values(), strict=True):
        tensor.copy_(new)
    remote.servers[1].orders.forget()
    remote.refitter.refit(policy)
    cluster.assert_holds(policy, version=refits + 1)
    remote.servers[0].orders.forget()
    assert remote.refitter.verify(policy)


def test_an_engine_that_cannot_be_paused_lets_go_of_what_was_prepared(remote, cluster, monkeypatch):
    async def busy(self, config):
        raise EngineBusyError("2 requests did not finish within 1 s")

    monkeypatch.setattr(ClientEngine, "pause", busy)
    policy = cluster.make_policy(1)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    refuse(remote, EngineBusyError, "did not finish", policy)
    assert remote.channel.steps == ["prepare", "abandon"]
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    monkeypatch.undo()


# A channel that goes wrong.


def mangle(remote: Remote, step: str, change) -> None:
    """Change the answers to the next request of one step."""

    def on_answers(answers):
        if remote.channel.requests[-1].order.step != step:
            return answers
        remote.channel.on_answers = lambda answers: answers
        return change(answers)

    remote.channel.on_answers = on_answers


def with_fields(answer: str, **fields) -> str:
    return json.dumps(json.loads(answer) | fields)


@pytest.mark.parametrize("step", ["prepare", "stream", "finish"])
def test_an_answer_to_an_earlier_request_ends_the_engine(step, remote, cluster):
    mangle(remote, step, lambda answers: [answers[0], with_fields(answers[1], id="earlier")])
    with pytest.raises(EngineLostError, match=r"rank\(s\) 1 answered an earlier request.*Restart the engine"):
        remote.refitter.refit(cluster.make_policy(1))
    assert remote.refitter.is_dirty
    assert "the engine is lost" in remote.client.blocked
    num_requests = len(remote.channel.requests)
    with pytest.raises(EngineLostError, match="answered an earlier request"):
        remote.refitter.refit(cluster.make_policy(1))
    assert len(remote.channel.requests) == num_requests


@pytest.mark.parametrize("make_arguments", [as_files, as_mapping])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_serve_different_versions_after_a_write_are_dirty(make_arguments, rank, remote, cluster, tmp_path):
    def fall_behind(answers):
        cluster.targets[rank].version = 1
        return [with_fields(answer, version=1) if index == rank else answer for index, answer in enumerate(answers)]

    mangle(remote, "write" if make_arguments is as_files else "finish", fall_behind)
    match = r"the ranks serve different versions \(rank 0 holds \d, rank 1 holds \d\); refit again"
    with pytest.raises(RankFailedError, match=match):
        remote.refitter.refit(**make_arguments(cluster.make_policy(1), tmp_path))
    assert remote.refitter.is_dirty
    assert "failed part way (RankFailedError: the ranks serve different versions" in remote.client.blocked
    with pytest.raises(InvalidSourceError):
        remote.refitter.refit({})
    remote.refitter.layout()
    assert remote.refitter.is_dirty and remote.client.blocked is not None
    assert_heals(remote, version=3)


def test_nobody_answering_ends_the_engine(remote, cluster):
    mangle(remote, "prepare", lambda answers: [])
    with pytest.raises(EngineLostError, match="no rank of the engine answered; restart the engine"):
        remote.refitter.refit(cluster.make_policy(1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda answer: with_fields(answer, added_later=1), "cannot read a rank's answer; install the same version"),
        (lambda answer: with_fields(answer, protocol=99), "speaks protocol 99 .* install the same version"),
        (
            lambda answer: with_fields(answer, package_version="0.0.1"),
            f"has fp8refit 0.0.1, this process has {__version__}",
        ),
    ],
)
def test_ranks_of_another_version_are_refused_before_anything_is_prepared(change, match, cluster):
    remote = Remote(cluster)
    mangle(remote, "hello", lambda answers: [answers[0], change(answers[1])])
    with pytest.raises(RankFailedError, match=match):
        remote.refitter.refit(cluster.make_policy(1))
    assert remote.channel.steps == ["hello"]
    assert remote.client.blocked is None
    remote.refitter.refit(cluster.make_policy(1))
    assert remote.channel.steps[1] == "hello"
    remote.refitter.close()


@pytest.mark.parametrize("answer", ["not JSON", "", None])
@pytest.mark.parametrize("step", ["hello", "prepare", "finish"])
def test_what_no_rank_says_ends_the_engine(step, answer, cluster):
    remote = Remote(cluster)
    mangle(remote, step, lambda answers: [answers[0], answer])
    match = f"a rank answered {answer!r}: the engine's channel to its ranks is out of step.*Restart the engine"
    with pytest.raises(EngineLostError, match=match):
        remote.refitter.refit(cluster.make_policy(1))
    assert remote.channel.steps[-1] == step
    assert remote.refitter.is_dirty and "the engine is lost" in remote.client.blocked
    with pytest.raises(EngineLostError, match=match):
        remote.refitter.refit(cluster.make_policy(1))
    assert remote.channel.steps[-1] == step


def test_a_rank_of_an_older_protocol_says_so(cluster, monkeypatch):
    remote = Remote(cluster)
    handle = remote.servers[1].handle
    remote.servers[1].handle = lambda message: handle(with_fields(message, protocol=0))
    with pytest.raises(RankFailedError, match="rank 1: the driver speaks protocol 0 and this rank"):
        remote.refitter.refit(cluster.make_policy(1))


def test_a_channel_that_dies_keeps_the_source_for_whoever_still_reads_it(remote, cluster, tmp_path):
    def die(request):
        if request.order.step == "finish":
            raise EngineLostError("the engine core died")

    remote.channel.on_request = die
    policy = cluster.make_policy(1)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    with pytest.raises(EngineLostError, match="core died"):
        remote.refitter.refit(policy)
    del policy
    with pytest.raises(EngineLostError, match="core died"):
        remote.refitter.refit(lambda: pytest.fail("read"))
    gc.collect()
    assert None not in [ref() for ref in kept]
    assert "the engine is lost" in remote.client.blocked
    assert remote.refitter.is_dirty
    remote.refitter.close()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert remote.channel.steps[-1] == "finish"


def test_an_abandoned_refit_unmaps_tensors_and_the_next_one_maps_them_again(driver, cluster):
    remote, policy = Remote(cluster), on_the_gpu(cluster.make_policy(1), driver)
    remote.refitter.refit(policy)
    remote.refitter.refit(policy)
    asyncio.run(remote.ranks.prepare(lambda: as_source(policy), Job(config=remote.refitter.config)))
    asyncio.run(remote.ranks.abandon())
    remote.refitter.refit(policy)
    cluster.assert_holds(policy, version=3)


def test_a_close_that_fails_gives_the_memory_back_all_the_same(cluster):
    remote = refitted(cluster)
    remote.channel.on_request = lambda request: (_ for _ in ()).throw(EngineLostError("the engine core died"))
    with pytest.raises(EngineLostError):
        remote.refitter.close()
    assert bucket_sizes(remote) == []
    for server in remote.servers:
        server.orders.unmap()


class Vanished(BaseException):
    """The end of a driver."""


def vanish_after(remote: Remote, step: str, arguments: dict) -> Remote:
    """Let the driver send one step and hear no answer, nor say anything more; the driver that comes after it."""

    def vanish(answers):
        raise Vanished

    def send_no_more(request):
        if step in remote.channel.steps[:-1]:
            raise Vanished

    remote.channel.on_request = send_no_more
    mangle(remote, step, vanish)
    with pytest.raises(Vanished):
        remote.refitter.refit(**arguments)
    remote.channel.on_request = lambda request: None
    successor = Remote(remote.cluster)
    successor.servers = successor.channel.servers = remote.servers
    return successor


@pytest.mark.parametrize("step", ["prepare", "stream"])
def test_a_driver_that_vanishes_leaves_nothing_that_stops_the_next_one(step, remote, cluster):
    successor = vanish_after(remote, step, {"state_dict": cluster.make_policy(1)})
    is_dirty = step != "prepare"
    assert cluster.states == [(is_dirty, 1)] * 2
    with pytest.raises(InvalidSourceError):
        successor.refitter.refit({})
    assert (successor.refitter.is_dirty, successor.refitter.version) == (is_dirty, 1)
    assert_heals(successor)
    with pytest.raises(RankFailedError, match="this refit was abandoned: its driver gave it up"):
        asyncio.run(remote.ranks.client.ask(RefitStep(step="finish", refit=remote.ranks.client.refit)))
    assert cluster.states == [(False, 2)] * 2
    successor.refitter.close()


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_a_driver_that_vanishes_with_the_last_step_leaves_every_rank_on_the_whole_new_policy(
    make_arguments, remote, cluster, tmp_path
):
    policy = cluster.make_policy(1)
    step = "write" if make_arguments is as_files else "finish"
    successor = vanish_after(remote, step, make_arguments(policy, tmp_path))
    cluster.assert_holds(policy, version=2)
    with pytest.raises(InvalidSourceError):
        successor.refitter.refit({})
    assert (successor.refitter.is_dirty, successor.refitter.version, successor.client.blocked) == (False, 2, None)
    cluster.assert_holds(policy, version=2)
    assert_heals(successor, version=3)
    successor.refitter.close()


# Buckets.


@pytest.fixture
def large(monkeypatch):
    """Matrices larger than 1 MiB, of rows, of columns, and of a half that begins within a block."""
    for name, shape in ((Q_PROJ, (1024, 1280)), (O_PROJ, (640, 1024)), (UP_PROJ, (1344, 640)), (K_PROJ, (2304, 640))):
        monkeypatch.setitem(SHAPES, name, shape)
    return Cluster()


def as_gathered(policy, folder) -> dict:
    return {"state_dict": gathered(policy)}


IN_PARTS = [as_mapping, as_function, as_iterator, as_announced_iterator, as_gathered]


@pytest.fixture
def told(monkeypatch):
    """What ranks were told of buckets, one after another."""
    texts, send = [], Ring.send

    def note(ring, text):
        texts.append(Packed.model_validate_json(text))
        send(ring, text)

    monkeypatch.setattr(Ring, "send", note)
    return texts


def bucket_sizes(remote: Remote) -> list[int]:
    return [bucket.num_bytes for buckets in remote.ranks.host_route._packer._sets for bucket in buckets.values()]


@pytest.mark.parametrize("make_arguments", IN_PARTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_larger_than_the_bucket_comes_in_runs_of_rows(dtype, make_arguments, large, tmp_path, told):
    before, num_descriptors = mapped_segments(), len(os.listdir("/proc/self/fd"))
    remote = Remote(large, bucket_bytes=1 << 20)
    for version in (1, 2):
        policy = large.make_policy(version, dtype)
        remote.refitter.refit(**make_arguments(policy, tmp_path))
        large.assert_holds(policy, version=version)
    assert len(mapped_segments() - before) == len(("bucket", "bucket", "ring"))
    assert bucket_sizes(remote) == [1 << 20] * 2
    assert {name for packed in told for name in packed.runs} == {
        name for name, tensor in policy.items() if tensor.nbytes > 1 << 20
    }
    remote.refitter.close()
    assert not mapped_segments() - before
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


def test_runs_of_rows_are_written_from_where_they_lie(large, monkeypatch):
    monkeypatch.setattr(Staging, "_stage", lambda *_, **__: pytest.fail("staged"))
    remote = Remote(large, bucket_bytes=1 << 20)
    for version in (1, 2, 3):
        policy = large.make_policy(version)
        remote.refitter.refit(iter(policy.items()))
        large.assert_holds(policy, version=version)
    remote.refitter.close()


@pytest.mark.parametrize("make_arguments", IN_PARTS)
def test_fp8_larger_than_the_bucket_is_copied_bit_for_bit(make_arguments, large, tmp_path):
    remote = Remote(large, bucket_bytes=1 << 20)
    sent = prequantize(large.make_policy(1), K_PROJ, ScaleFormat.FP32)
    assert sent[K_PROJ].nbytes > 1 << 20
    remote.refitter.refit(**make_arguments(sent, tmp_path))
    large.assert_holds(large.make_policy(1), version=1)
    remote.refitter.close()


class Largest(TorchDispatchMode):
    """The largest memory that is taken while it is entered, to hold something in."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.empty, aten.new_empty, aten.empty_like, aten.cat, aten.clone):
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("make_arguments", IN_PARTS)
def test_neither_side_ever_holds_more_than_a_bucket_of_a_tensor(make_arguments, large, tmp_path):
    remote = Remote(large, bucket_bytes=1 << 20)
    largest = [Largest() for _ in range(3)]

    def observed(handle, seen):
        def observe(message):
            with seen:
                return handle(message)

        return observe

    for server, seen in zip(remote.servers, largest, strict=False):
        server.handle = observed(server.handle, seen)
    arguments = make_arguments(large.make_policy(1), tmp_path)
    with largest[2]:
        remote.refitter.refit(**arguments)
    assert max(tensor.nbytes for tensor in large.make_policy(1).values()) > 2 << 20
    assert [seen.num_bytes for seen in largest[:2]] == [1 << 20] * 2
    assert largest[2].num_bytes <= 1 << 20
    remote.refitter.close()


def test_a_row_of_blocks_larger_than_the_bucket_makes_it_grow(monkeypatch):
    monkeypatch.setitem(SHAPES, K_PROJ, (256, 8192))
    cluster = Cluster()
    before = mapped_segments()
    remote = Remote(cluster, bucket_bytes=1 << 20)
    policy = cluster.make_policy(1)
    remote.refitter.refit(policy)
    cluster.assert_holds(policy, version=1)
    assert 128 * 8192 * 2 in bucket_sizes(remote)
    assert len(mapped_segments() - before) <= len(("bucket", "bucket", "ring"))
    remote.refitter.refit(policy)
    cluster.assert_holds(policy, version=2)
    remote.refitter.close()


@pytest.mark.parametrize("validate", ["fused", "strict"])
def test_nan_in_the_middle_of_a_large_tensor_is_named(validate, large):
    remote = Remote(large, bucket_bytes=1 << 20, validate=validate)
    policy = large.make_policy(1)
    policy[UP_PROJ][700, 3] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        remote.refitter.refit(gathered(policy))
    assert caught.value.names == (UP_PROJ,)
    assert cluster_is_dirty(large) == (validate == "fused")
    remote.refitter.close()


def cluster_is_dirty(cluster: Cluster) -> bool:
    return any(is_dirty for is_dirty, _ in cluster.states)


def test_a_policy_larger_than_the_bucket_comes_in_parts(monkeypatch, told):
    made = []

    def make_small(device, num_bytes):
        made.append(Bucket(1 << 17))
        return made[-1]

    monkeypatch.setattr("fp8refit.remote.host.host_route._make_bucket", make_small)
    cluster = Cluster()
    remote = refitted(cluster)
    policy = cluster.make_policy(1)
    remote.refitter.refit(policy)
    cluster.assert_holds(policy, version=2)
    assert len(told) > 4
    assert len(made) == 2
    remote.refitter.close()


def test_a_generator_may_reuse_one_buffer(remote, cluster):
    policy = cluster.make_policy(1)
    buffer = torch.empty(max(tensor.numel() for tensor in policy.values()), dtype=torch.bfloat16)

    def gather():
        for name, tensor in policy.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            buffer.fill_(float("nan"))

    remote.refitter.refit(gather)
    cluster.assert_holds(policy, version=2)


def test_strides_gradients_and_empty_tensors_are_no_obstacle(remote, cluster):
    policy = cluster.make_policy(1)
    sent = {name: tensor.t().contiguous().t().requires_grad_() for name, tensor in policy.items()}
    sent["model.layers.0.rotary_emb.inv_freq"] = torch.empty(0)
    remote.refitter.refit(sent)
    cluster.assert_holds(policy, version=2)


@pytest.mark.parametrize("make_arguments", [as_mapping, as_files, as_iterator])
def test_nothing_grows_over_twenty_refits(make_arguments, remote, cluster, tmp_path):
    held = []
    for number in range(2, 22):
        remote.refitter.refit(**make_arguments(cluster.make_policy(1), tmp_path))
        if number in (4, 21):
            held.append((mapped_segments(), len(os.listdir("/proc/self/fd"))))
    (segments, num_descriptors), (segments_later, num_descriptors_later) = held
    assert not segments_later - segments
    # Threads of earlier tests may still let go of some.
    assert num_descriptors_later <= num_descriptors


@pytest.mark.parametrize("validate", ["fused", "strict"])
@pytest.mark.parametrize("bad", [False, True])
def test_the_driver_lets_go_of_the_source_however_the_refit_ends(bad, validate, cluster):
    remote = Remote(cluster, validate=validate)
    policy = cluster.make_policy(1)
    if bad:
        policy[NORM][0] = float("nan")
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    try:
        remote.refitter.refit(policy)
    except NonFiniteError:
        assert bad
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    remote.refitter.close()


# Values.


@pytest.mark.parametrize("make_arguments", [as_mapping, as_function, as_files])
def test_strict_finds_what_is_not_finite_before_writing(make_arguments, cluster, tmp_path):
    remote = refitted(cluster, validate="strict")
    policy = cluster.make_policy(1, dtype=torch.float32)
    policy[Q_PROJ][200, 3] = float("inf")
    policy[K_PROJ][0, 0] = 3.4e38  # beyond BF16
    error = refuse(remote, NonFiniteError, "Nothing was written", **make_arguments(policy, tmp_path))
    assert error.names == tuple(sorted([K_PROJ, Q_PROJ]))
    assert_heals(remote)
    remote.refitter.close()


def test_strict_refuses_what_can_be_read_only_once(cluster):
    remote = refitted(cluster, validate="strict")
    policy = cluster.make_policy(1)
    for more in ({}, {"manifest": manifest_of(policy)}):
        refuse(remote, InvalidSourceError, "reads everything twice", iter(policy.items()), **more)
    remote.refitter.close()


@pytest.mark.parametrize(("name", "scale_format"), [(K_PROJ, ScaleFormat.FP32), (O_PROJ, ScaleFormat.UE8M0)])
@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_strict_finds_scales_that_are_not_finite_and_positive(name, scale_format, value, cluster):
    remote = refitted(cluster, validate="strict")
    sent = prequantize(cluster.make_policy(1), name, scale_format)
    sent[name + "_scale_inv"][0, 0] = value
    refuse(remote, InvalidSourceError, f"{name}_scale_inv: holds scales that are not finite and positive", sent)
    remote.refitter.close()


def test_strict_finds_codes_that_are_nan(cluster):
    remote = refitted(cluster, validate="strict")
    sent = prequantize(cluster.make_policy(1), K_PROJ, ScaleFormat.FP32)
    sent[K_PROJ].view(torch.uint8)[3, 3] = 0x7F
    assert refuse(remote, NonFiniteError, "Nothing was written", sent).names == (K_PROJ,)
    remote.refitter.close()


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_fp8_is_copied_bit_for_bit(make_arguments, remote, cluster, tmp_path):
    sent = prequantize(cluster.make_policy(1), O_PROJ, ScaleFormat.UE8M0)
    remote.refitter.refit(**make_arguments(sent, tmp_path))
    for rank, shard in enumerate(cluster.shards):
        (slot,) = [slot for slot in shard.slots() if slot.name == O_PROJ]
        assert bytes_of(slot.weight) == bytes_of(sent[O_PROJ][:, 128 * rank : 128 * (rank + 1)])
        assert torch.equal(slot.scale, sent[O_PROJ + "_scale_inv"][:, rank : rank + 1])


@pytest.mark.parametrize("make_arguments", [as_mapping, as_function, as_files])
def test_scales_that_are_no_powers_of_two_are_refused_where_the_kernel_wants_them(
    make_arguments, remote, cluster, tmp_path
):
    sent = prequantize(cluster.make_policy(1), O_PROJ, ScaleFormat.FP32)
    match = f"{O_PROJ}_scale_inv: holds scales that are not powers of two"
    refuse(remote, InvalidSourceError, match, **make_arguments(sent, tmp_path))
    sent = prequantize(cluster.make_policy(1), K_PROJ, ScaleFormat.FP32)
    remote.refitter.refit(**make_arguments(sent, tmp_path))


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_scales_that_are_no_powers_of_two_are_copied_when_asked(make_arguments, cluster, tmp_path):
    remote = Remote(cluster, on_scale_mismatch="copy")
    sent = prequantize(cluster.make_policy(1), O_PROJ, ScaleFormat.FP32)
    remote.refitter.refit(**make_arguments(sent, tmp_path))
    (slot,) = [slot for slot in cluster.shards[1].slots() if slot.name == O_PROJ]
    assert torch.equal(slot.scale, sent[O_PROJ + "_scale_inv"][:, 1:])
    remote.refitter.close()


@pytest.mark.parametrize("change", ["short", "raises"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_stream_that_breaks_off_leaves_the_engine_dirty(announced, change, remote, cluster):
    policy = cluster.make_policy(1)

    def gather():
        yield from list(policy.items())[:-1]
        if change == "raises":
            raise ConnectionError("the trainer went away")

    more = {"manifest": manifest_of(policy)} if announced else {}
    last = list(policy)[-1]
    error = ConnectionError if change == "raises" else InvalidSourceError
    match = (
        "went away"
        if change == "raises"
        else f"{last}: {'was announced but did not arrive' if announced else 'missing'}"
    )
    break_off(remote, error, match, gather(), **more)
    assert_heals(remote)


# Asynchronous engines.


class AsyncClientEngine(ClientEngine):
    is_asynchronous = True


@pytest.fixture
def asynchronous(cluster, monkeypatch) -> Remote:
    class AsyncEntryPoint(ClientEntryPoint):
        def load(self):
            return AsyncClientEngine

    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [AsyncEntryPoint()])
    return Remote(cluster, suspends=True)


def test_an_asynchronous_engine_is_refitted_in_its_event_loop(asynchronous, cluster):
    async def refit():
        ticks = 0

        async def serve():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        serving = asyncio.create_task(serve())
        report = await asynchronous.refitter.refit_async(policy)
        serving.cancel()
        layout = await asynchronous.refitter.layout_async()
        await asynchronous.refitter.close_async()
        return report, ticks, layout

    policy = cluster.make_policy(1)
    report, ticks, layout = asyncio.run(refit())
    assert isinstance(report, RefitReport)
    assert ticks > 3
    assert len(layout.slots) == len(policy)
    cluster.assert_holds(policy, version=1)


def cancel_at(step: str, remote: Remote, make_arguments) -> None:
    """Cancel a refit as soon as one step of it was sent."""

    async def cancel():
        reached = asyncio.Event()
        remote.channel.on_request = lambda request: reached.set() if request.order.step == step else None
        task = asyncio.create_task(remote.refitter.refit_async(**make_arguments()))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        remote.channel.on_request = lambda request: None

    asyncio.run(cancel())


@pytest.mark.parametrize("step", ["hello", "prepare", "stream", "finish"])
def test_a_refit_that_is_cancelled_lets_go_of_the_source_and_the_next_one_heals(step, asynchronous, cluster):
    policies = [cluster.make_policy(1)]
    kept = [weakref.ref(tensor) for tensor in policies[0].values()]
    refitter, before = asynchronous.refitter, cluster.live_bytes()

    async def heal():
        report = await refitter.refit_async(healing)
        await refitter.close_async()
        return report

    cancel_at(step, asynchronous, lambda: {"state_dict": policies.pop()})
    is_dirty = step == "stream"
    assert (asynchronous.client.blocked is not None) == refitter.is_dirty == is_dirty
    assert cluster.states == [(is_dirty, int(step == "finish"))] * 2
    if step in ("hello", "prepare"):
        assert cluster.live_bytes() == before
    if step == "finish":
        cluster.assert_holds(cluster.make_policy(1), version=1)
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    healing = cluster.make_policy(9)
    report = asyncio.run(heal())
    cluster.assert_holds(healing, version=report.version)
    assert asynchronous.client.blocked is None


def test_a_refit_that_is_cancelled_while_it_is_written_is_whole(asynchronous, cluster, tmp_path):
    policy = cluster.make_policy(1)
    cancel_at("write", asynchronous, lambda: as_files(policy, tmp_path))
    cluster.assert_holds(policy, version=1)
    assert (asynchronous.refitter.is_dirty, asynchronous.refitter.version, asynchronous.client.blocked) == (
        False,
        1,
        None,
    )


# KV scales.


BATCH = [[1, 2, 3], [4, 5]]
KV_CONFIG = RefitConfig(kv=KvConfig(margin=1.0))
"""A scale is the largest value over 448."""
BOOTED, LARGEST = {K_SCALE: 1.0, V_SCALE: 1.0}, {K_SCALE: 2.0, V_SCALE: 3.0}


def with_caches(cluster: Cluster) -> Cluster:
    for cache, largest in zip(cluster.caches, ((896.0, 448.0), (448.0, 1344.0)), strict=True):
        cache.largest = dict(zip((K_SCALE, V_SCALE), largest, strict=True))
    return cluster


@pytest.fixture
def kv_remote():
    """Ranks that hold a good policy, and an FP8 KV cache each, of which each sees something larger than the other does."""
    remote = refitted(with_caches(Cluster(kv=[[ATTENTION], [ATTENTION]])), config=KV_CONFIG)
    yield remote
    remote.refitter.close()


def test_a_calibration_is_told_to_every_rank_once(kv_remote):
    report = kv_remote.refitter.calibrate(BATCH)
    assert kv_remote.channel.steps == ["check_calibration", "calibrate"]
    assert kv_remote.cluster.scales == [LARGEST] * 2
    assert (report.scales, report.num_sequences, report.num_tokens) == (LARGEST, 2, 5)
    assert kv_remote.cluster.states == [(False, 1)] * 2
    assert (kv_remote.refitter.version, kv_remote.refitter.is_dirty, kv_remote.client.blocked) == (1, False, None)


def test_the_ranks_are_met_before_they_are_calibrated():
    remote = Remote(with_caches(Cluster(kv=[[ATTENTION], [ATTENTION]])), config=KV_CONFIG)
    assert remote.refitter.calibrate(BATCH).scales == LARGEST
    assert remote.channel.steps == ["hello", "check_calibration", "calibrate"]


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_scales_are_set_with_every_kind_of_source(make_arguments, kv_remote, tmp_path):
    policy = kv_remote.cluster.make_policy(1)
    report = kv_remote.refitter.refit(**make_arguments(policy, tmp_path), calibration=BATCH)
    kv_remote.cluster.assert_holds(policy, version=2)
    assert kv_remote.cluster.scales == [LARGEST] * 2
    assert report.kv.scales == LARGEST
    assert [rank.kv.scales for rank in report.ranks] == [LARGEST] * 2
    assert "kv" in report.phases_s


def test_given_scales_are_every_rank_s(kv_remote):
    given = {K_SCALE: torch.tensor(0.5), f"{ATTENTION}.attn.v_scale": 0.25}
    report = kv_remote.refitter.refit(kv_remote.cluster.make_policy(1), kv_scales=given)
    assert kv_remote.cluster.scales == [report.kv.scales] * 2 == [{K_SCALE: 0.5, V_SCALE: 0.25}] * 2


@pytest.mark.parametrize("make_arguments", STATE_DICTS)
def test_scales_come_with_every_kind_of_source(make_arguments, kv_remote, tmp_path):
    policy = kv_remote.cluster.make_policy(1)
    sent = policy | {K_SCALE: torch.tensor(0.3), V_SCALE: torch.tensor([0.25], dtype=torch.bfloat16)}
    report = kv_remote.refitter.refit(**make_arguments(sent, tmp_path))
    kv_remote.cluster.assert_holds(policy, version=2)
    exact = {K_SCALE: torch.tensor(0.3).item(), V_SCALE: 0.25}
    assert kv_remote.cluster.scales == [report.kv.scales] * 2 == [exact] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["ready", *KV_FAULTS])
@pytest.mark.parametrize("error", [CalibrationError("no memory"), RuntimeError("boom")], ids=repr)
def test_a_fault_of_one_rank_in_a_calibration_is_the_engine_s(error, fault, rank, kv_remote):
    cluster = kv_remote.cluster
    before, kind = cluster.live_bytes(), RankFailedError if isinstance(error, RuntimeError) else CalibrationError
    arm(cluster.targets[rank], fault, error)
    with pytest.raises(kind, match=f"{error}"):
        kv_remote.refitter.calibrate(BATCH)
    is_dirty = fault not in WRITES_NO_SCALE
    assert cluster.live_bytes() == before
    assert cluster.states == [(is_dirty, 1)] * 2
    assert kv_remote.refitter.is_dirty == is_dirty
    if is_dirty:
        assert "failed part way" in kv_remote.client.blocked
        with pytest.raises(EngineDirtyError, match="weights are incomplete"):
            kv_remote.refitter.calibrate(BATCH)
        assert kv_remote.channel.steps == ["check_calibration", "calibrate"]
    else:
        assert cluster.scales == [BOOTED] * 2
        assert kv_remote.client.blocked is None
    assert_heals(kv_remote)
    assert kv_remote.refitter.calibrate(BATCH).scales == LARGEST


@pytest.mark.parametrize("make_arguments", [as_files, as_mapping])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_one_rank_in_the_scales_of_a_refit_leaves_it_dirty(rank, make_arguments, kv_remote, tmp_path):
    cluster = kv_remote.cluster
    cluster.caches[rank].on_pass = lambda: 1 / 0
    arguments = make_arguments(cluster.make_policy(1), tmp_path)
    break_off(kv_remote, RankFailedError, "ZeroDivisionError", **arguments, calibration=BATCH)
    assert cluster.scales == [BOOTED] * 2
    assert_heals(kv_remote)


def test_a_batch_that_ranks_cannot_take_is_refused_before_a_byte_is_written(kv_remote):
    policy = kv_remote.cluster.make_policy(1)
    refuse(kv_remote, ValueError, "token id 100 is outside the vocabulary", policy, calibration=[[100]])
    refuse(kv_remote, ValueError, "no x.k_scale", policy, kv_scales={"x.k_scale": 1.0})
    assert kv_remote.channel.steps == ["prepare", "abandon"] * 2


def test_caches_that_stay_leave_the_old_scales(kv_remote):
    kv_remote.client.flush_fails = True
    with pytest.raises(CacheFlushError):
        kv_remote.refitter.calibrate(BATCH)
    assert kv_remote.channel.steps == ["check_calibration"]
    assert kv_remote.cluster.scales == [BOOTED] * 2
    assert kv_remote.client.blocked is None
    kv_remote.client.flush_fails = False


@pytest.mark.parametrize("call", ["calibrate", "refit"])
def test_a_driver_waits_longer_than_the_ranks_for_each_other_in_every_vote(call, kv_remote):
    remote = Remote(kv_remote.cluster, config=KV_CONFIG.model_copy(update={"timeout_s": 7.0}))
    if call == "calibrate":
        remote.refitter.calibrate(BATCH)
    else:
        remote.refitter.refit(remote.cluster.make_policy(1), calibration=BATCH)
    assert remote.channel.timeouts_s[-1] == 3 * 7.0 + GRACE_S
    remote.refitter.close()


def test_a_rank_that_does_not_say_what_it_calibrated_is_told(kv_remote):
    mangle(kv_remote, "calibrate", lambda answers: [with_fields(answer, kv=None) for answer in answers])
    with pytest.raises(RankFailedError, match="did not report the result"):
        kv_remote.refitter.calibrate(BATCH)
    assert kv_remote.refitter.calibrate(BATCH).scales == LARGEST


def test_ranks_that_do_not_answer_a_calibration_end_the_engine():
    remote = refitted(with_caches(Cluster(kv=[[ATTENTION], [ATTENTION]])), config=KV_CONFIG)

    def die(request):
        raise EngineLostError("the engine core died")

    remote.channel.on_request = die
    for _ in range(2):
        with pytest.raises((EngineLostError, EngineDirtyError)):
            remote.refitter.calibrate(BATCH)
    assert remote.refitter.is_dirty and "the engine is lost" in remote.client.blocked
    with pytest.raises(EngineLostError, match="core died"):
        remote.refitter.refit(remote.cluster.make_policy(1))
    remote.refitter.close()


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_calibration_that_is_cancelled_leaves_an_engine_that_is_whole_or_refuses(is_failing, monkeypatch):
    class AsyncEntryPoint(ClientEntryPoint):
        def load(self):
            return AsyncClientEngine

    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [AsyncEntryPoint()])
    cluster = with_caches(Cluster(kv=[[ATTENTION], [ATTENTION]]))
    remote = Remote(cluster, suspends=True, config=KV_CONFIG)
    if is_failing:
        arm(cluster.targets[1], "kv written", RuntimeError("boom"))

    async def cancel():
        await remote.refitter.refit_async(cluster.make_policy(0))
        reached = asyncio.Event()
        remote.channel.on_request = lambda request: reached.set() if request.order.step == "calibrate" else None
        task = asyncio.create_task(remote.refitter.calibrate_async(BATCH))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await remote.refitter.layout_async()  # what was sent is answered
        found = cluster.states, remote.refitter.is_dirty, remote.client.blocked
        await remote.refitter.refit_async(cluster.make_policy(1))
        await remote.refitter.close_async()
        return found

    states, is_dirty, blocked = asyncio.run(cancel())
    assert states == [(is_failing, 1)] * 2
    assert is_dirty == is_failing
    assert (blocked is not None) == is_failing, "a mixture of scales is not served"
    assert remote.client.blocked is None
