"""Streams to ranks in other processes: buckets in flight, whoever is slow, and whatever ends them."""

import asyncio
import threading
import time

import pytest
import torch

import fp8refit.remote.host.stream_reader
import fp8refit.remote.host.stream_sender
from fp8refit.errors import EngineBusyError, EngineLostError, RankFailedError, StagingMemoryError
from fp8refit.remote.protocol.messages import Packed
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.ring import Ring
from tests.fake_ranks import ClientEntryPoint, Cluster, Remote

LONG_S = 20.0
"""What nothing in these tests takes."""


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [ClientEntryPoint()])


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """How many texts were sent; a bucket is the size of the largest tensor, so that there are many."""
    monkeypatch.setattr("fp8refit.remote.host.host_route._make_bucket", lambda device, num_bytes: Bucket(1 << 17))
    texts, send = [], Ring.send
    monkeypatch.setattr(Ring, "send", lambda ring, text: (texts.append(text), send(ring, text))[1])
    return texts


def remote_of(kind):
    remote = Remote(Cluster("alone" if kind == "one rank" else "tensor"))
    if kind == "in turn":
        remote.channel.num_ahead = 0
    yield remote
    remote.refitter.close()


@pytest.fixture(params=["meanwhile", "in turn"])
def remote(request):
    """An engine that is asked while the source is read, and one that can only be called."""
    yield from remote_of(request.param)


@pytest.fixture(params=["meanwhile", "in turn", "one rank"])
def any_remote(request):
    """The same, and an engine of one rank, which ends a stream within the order that it carries out."""
    yield from remote_of(request.param)


def wait_until(is_true, *, timeout_s: float = LONG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


def num_orders(remote: Remote) -> int:
    return remote.channel.steps.count("stream")


def test_a_stream_takes_one_order_however_many_buckets_it_has(sent, patient):
    remote = Remote(Cluster())
    for version in (1, 2, 3):
        policy = remote.cluster.make_policy(version)
        remote.channel.requests.clear()
        sent.clear()
        remote.refitter.refit(iter(policy.items()))
        remote.cluster.assert_holds(policy, version=version)
        assert (num_orders(remote), len(sent) > 3) == (1, True)
    remote.refitter.close()


def test_a_policy_that_is_laid_out_as_the_last_is_told_in_the_same_words(sent, any_remote):
    remote = any_remote
    told = []
    for version in (1, 2, 3):
        sent.clear()
        remote.refitter.refit(iter(remote.cluster.make_policy(version).items()))
        told.append(list(sent))
    assert told[1] == told[2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_is_not_overtaken(rank, remote):
    target = remote.cluster.targets[rank]
    push = target.push

    def slow(*args, **kwargs):
        time.sleep(0.02)
        push(*args, **kwargs)

    target.push = slow
    for version in (1, 2):
        policy = remote.cluster.make_policy(version)
        remote.refitter.refit(iter(policy.items()))
        remote.cluster.assert_holds(policy, version=version)


def test_a_policy_that_is_laid_out_otherwise_is_read_where_it_lies_now(any_remote):
    remote = any_remote
    for version in range(1, 5):
        policy = remote.cluster.make_policy(version)
        order = list(policy.items())[:: 1 if version % 2 else -1]
        remote.refitter.refit(iter(order))
        remote.cluster.assert_holds(policy, version=version)


def test_texts_are_made_and_read_once_even_if_other_streams_come_in_between(any_remote, sent, monkeypatch):
    remote = any_remote
    made, read = [], []
    encode, validate = Packed.encode, Packed.model_validate_json
    monkeypatch.setattr(Packed, "encode", lambda packed: made.append(packed) or encode(packed))
    monkeypatch.setattr(Packed, "model_validate_json", lambda text: read.append(text) or validate(text))
    for version in range(1, 9):
        if version == 5:
            made.clear()
            read.clear()
        policy = remote.cluster.make_policy(version)
        order = list(policy.items())[:: 1 if version % 2 else -1]
        remote.refitter.refit(iter(order))
        remote.cluster.assert_holds(policy, version=version)
    assert sent and not made and not read


def test_ranks_write_while_the_source_is_read(patient):
    remote = Remote(Cluster())
    policy = remote.cluster.make_policy(1)
    shard = remote.cluster.shards[0]
    before = shard.slots()[0].weight.clone()

    def read():
        for number, item in enumerate(policy.items()):
            if number == len(policy) - 1:
                wait_until(lambda: not torch.equal(shard.slots()[0].weight, before))
            yield item

    remote.refitter.refit(read())
    remote.cluster.assert_holds(policy, version=1)
    remote.refitter.close()


def test_the_source_is_read_by_whoever_calls(any_remote):
    remote = any_remote
    policy, threads = remote.cluster.make_policy(1), set()

    def read():
        for item in policy.items():
            threads.add(threading.get_ident())
            yield item

    remote.refitter.refit(read())
    assert threads == {threading.get_ident()}
    remote.cluster.assert_holds(policy, version=1)


def test_ranks_do_not_wait_for_a_slow_source(any_remote, monkeypatch):
    """Between two orders an engine does what else it has to do."""
    remote = any_remote
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_LINGERING_S", 0.0)
    policy, idle = remote.cluster.make_policy(1), []
    under_way, handle = [], remote.channel._handle

    def watched(message):
        under_way.append(message)
        try:
            return handle(message)
        finally:
            under_way.pop()

    remote.channel._handle = watched

    def read():
        for item in policy.items():
            wait_until(lambda: not under_way)
            idle.append(True)
            yield item

    remote.refitter.refit(read())
    remote.cluster.assert_holds(policy, version=1)
    assert len(idle) == len(policy)
    assert num_orders(remote) >= 2


def test_no_order_takes_long_however_fast_the_source_is(sent, monkeypatch):
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_FOLLOWING_S", 1e-6)
    remote = Remote(Cluster())
    policy = remote.cluster.make_policy(1)
    remote.refitter.refit(iter(policy.items()))
    remote.cluster.assert_holds(policy, version=1)
    assert num_orders(remote) >= len(sent) // 2
    remote.refitter.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_reading_of_the_source(rank, remote):
    policy, num_read = remote.cluster.make_policy(1), 0
    target = remote.cluster.targets[rank]

    def fail(*_, **__):
        raise RuntimeError("boom")

    target.push = fail

    def read():
        nonlocal num_read
        while True:
            for item in policy.items():
                num_read += 1
                yield item

    with pytest.raises(RankFailedError, match=f"rank {rank}: RuntimeError: boom"):
        remote.refitter.refit(read())
    assert num_read < 3 * len(policy)
    assert remote.cluster.states == [(True, 0)] * 2
    del target.push
    remote.refitter.refit(iter(policy.items()))
    remote.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("place", range(1, 6))
def test_whatever_the_source_raises_is_told_when_no_rank_is_at_work_any_more(place, any_remote):
    remote = any_remote
    policy = remote.cluster.make_policy(1)

    def read():
        for number, item in enumerate(policy.items()):
            if number == place:
                raise ZeroDivisionError("of the trainer")
            yield item

    with pytest.raises(ZeroDivisionError, match="of the trainer"):
        remote.refitter.refit(read())
    assert remote.channel.steps[-1] == "abandon"
    assert remote.cluster.states == [(True, 0)] * len(remote.cluster.ranks)
    remote.refitter.refit(iter(policy.items()))
    remote.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("place", [0, 1])
def test_memory_for_buckets_is_taken_before_any_rank_writes(place, any_remote, monkeypatch):
    remote = any_remote
    policy, made = remote.cluster.make_policy(1), []

    def make_bucket(device, num_bytes):
        made.append(num_bytes)
        if len(made) == place + 1:
            raise StagingMemoryError("no room")
        return Bucket(1 << 17)

    monkeypatch.setattr(remote.ranks.host_route._packer, "_make_bucket", make_bucket)
    with pytest.raises(StagingMemoryError, match="no room"):
        remote.refitter.refit(iter(policy.items()))
    assert remote.cluster.states == [(False, 0)] * len(remote.cluster.ranks)
    assert "begin" not in remote.channel.steps
    remote.refitter.refit(iter(policy.items()))
    remote.cluster.assert_holds(policy, version=1)
    assert len(made) == 3


@pytest.mark.parametrize("kind", ["cuda_ipc", "memfd"])
@pytest.mark.parametrize("is_lost", [True, False])
def test_memory_of_a_gpu_that_a_lost_rank_may_be_reading_is_not_freed(is_lost, kind, monkeypatch):
    """A rank that hangs is lost, and its process lives."""
    remote, closed = Remote(Cluster()), []
    policy = remote.cluster.make_policy(1)
    remote.refitter.refit(iter(policy.items()))
    packer = remote.ranks.host_route._packer
    buckets = [bucket for each in packer._sets for bucket in each.values()]
    for bucket in buckets:
        bucket.segment = bucket.segment.model_copy(update={"kind": kind})
    monkeypatch.setattr(Bucket, "close", lambda bucket: closed.append(bucket))
    if is_lost:
        remote.ranks.client.lost_because = "it did not answer"
    remote.refitter.close()
    assert closed == ([] if is_lost and kind == "cuda_ipc" else buckets)


def test_a_refit_by_the_source_is_refused(any_remote):
    remote = any_remote
    policy = remote.cluster.make_policy(1)

    def read():
        for item in policy.items():
            with pytest.raises(EngineBusyError, match="another refit of this engine is under way"):
                remote.refitter.refit(policy)
            yield item

    remote.refitter.refit(read())
    remote.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_ranks_that_die_in_the_middle_are_lost_when_the_channel_says_so(is_asynchronous, monkeypatch):
    """They do not leave the ring: what they are asked is not answered."""
    monkeypatch.setattr(fp8refit.remote.host.stream_sender, "_PATIENCE_S", 0.01)
    remote = Remote(Cluster(), suspends=is_asynchronous)
    monkeypatch.setattr(type(remote.client.ranks), "num_ranks", 2, raising=False)
    handle = remote.channel._handle

    def die(message):
        if '"stream"' in message:
            time.sleep(0.05)
            raise EngineLostError("the engine core died")
        return handle(message)

    remote.channel._handle = die
    policy = remote.cluster.make_policy(1)
    monkeypatch.setattr("tests.fake_ranks.ClientEngine.is_asynchronous", is_asynchronous)
    with pytest.raises(EngineLostError, match="core died"):
        if is_asynchronous:
            asyncio.run(remote.refitter.refit_async(iter(policy.items())))
        else:
            remote.refitter.refit(iter(policy.items()))
    assert "the engine is lost" in remote.client.blocked


def test_others_run_in_the_event_loop_while_ranks_are_slow(patient, monkeypatch):
    monkeypatch.setattr("tests.fake_ranks.ClientEngine.is_asynchronous", True)
    remote = Remote(Cluster(), suspends=True)
    policy, ticks = remote.cluster.make_policy(1), []
    target = remote.cluster.targets[0]
    push = target.push

    def slow(*args, **kwargs):
        num_ticks = len(ticks)
        wait_until(lambda: len(ticks) > num_ticks)
        push(*args, **kwargs)

    target.push = slow

    async def tick():
        while True:
            ticks.append(True)
            await asyncio.sleep(0)

    async def main():
        ticking = asyncio.ensure_future(tick())
        await remote.refitter.refit_async(iter(policy.items()))
        ticking.cancel()
        await remote.refitter.close_async()

    asyncio.run(main())
    remote.cluster.assert_holds(policy, version=1)


def test_a_fault_that_shows_while_a_rank_waits_for_its_device_is_the_end_of_the_engine(remote, monkeypatch):
    def fault(*_):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    policy = remote.cluster.make_policy(1)
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_FOLLOWING_S", LONG_S)
    monkeypatch.setattr(Ring, "take", fault)
    with pytest.raises(EngineLostError, match="illegal memory access"):
        remote.refitter.refit(iter(policy.items()))
    assert all(target.live.lost_because for target in remote.cluster.targets)
