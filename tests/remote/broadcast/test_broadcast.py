"""A policy broadcast to the ranks of an engine: the bytes of an ordinary refit, and one end for all when it goes wrong."""

import time
from dataclasses import replace
from functools import partial
from math import prod
from threading import Event
from unittest.mock import Mock

import pytest
import torch

import fp8refit.driver.adapters
from fp8refit import (
    EngineLostError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    RefitError,
    Refitter,
    StagingMemoryError,
    TransportError,
)
from fp8refit.live.formats import ScaleFormat
from fp8refit.remote.broadcast import broadcast as broadcast_module
from fp8refit.remote.broadcast import receiver as receiver_module
from fp8refit.remote.broadcast import sender as sender_module
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Reply
from fp8refit.remote.ranks import RemoteRanks
from tests.fake_ranks import (
    EXPERTS,
    FAULTS,
    HEAD,
    HIDDEN,
    K_PROJ,
    LAYOUTS,
    NORM,
    O_PROJ,
    Q_PROJ,
    STATE_DICTS,
    UP_PROJ,
    WRITES_NOTHING,
    Client,
    ClientEntryPoint,
    Cluster,
    Remote,
    ThreadChannel,
    arm,
    as_iterator,
    fail_once,
    manifest_of,
    stack_experts,
)
from tests.fakes import assert_slots_hold, changes_of, copies_of, prequantize
from tests.wire_bytes import num_bytes_sent, num_bytes_to

TIMEOUT_S = 40.0
every_way = pytest.mark.parametrize("layout", ["tensor", "replicated"])
"""Ranks that get parts of their own, and ranks that all get everything."""


@pytest.fixture(autouse=True)
def adapter(monkeypatch):
    monkeypatch.setattr(fp8refit.driver.adapters, "entry_points", lambda group: [ClientEntryPoint()])


@pytest.fixture
def small_buckets(monkeypatch):
    """Buckets that take no matrix whole."""
    for module in (sender_module, receiver_module):
        original = module.lay_out
        monkeypatch.setattr(
            module, "lay_out", lambda tensors, _, num, original=original: original(tensors, 30_000, num)
        )


@pytest.fixture(params=["during", "ahead"])
def open_remote(request):
    """Engines that are closed with the test. A policy is sent while they are paused, or before."""
    opened = []

    def open_remote(layout="tensor", *, collective=None, **options):
        collective = {"stage": request.param, **(collective or {})}
        options = {"timeout_s": TIMEOUT_S, "collective": collective, **options}
        opened.append(Remote(Cluster(layout), transport="collective", **options))
        opened[-1].is_ahead = request.param == "ahead"
        return opened[-1]

    yield open_remote
    for remote in opened:
        remote.refitter.close()


def first_offer(remote):
    """What was announced first."""
    return next(r.order.source for r in remote.channel.requests if isinstance(r.order, messages.Prepare))


def heals(remote, seed=9):
    """Check that the next refit gives every byte."""
    policy = remote.cluster.make_policy(seed)
    report = remote.refitter.refit(policy)
    remote.cluster.assert_holds(policy, version=report.version)
    assert remote.client.blocked is None


def assert_is_torn(remote, error=None):
    """Check that a bad source has left an engine dirty; or serving, if it was sent before the engine was paused."""
    assert [is_dirty for is_dirty, _ in remote.cluster.states] == [not remote.is_ahead] * 2
    assert (remote.client.blocked is None) == remote.is_ahead
    assert error is None or error.written == (not remote.is_ahead)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
def test_every_byte_is_that_of_the_policy(layout, wire, open_remote):
    remote = open_remote(layout, collective={"wire": wire}, count_changes=True)
    for version in (1, 2):
        policy, slots = remote.cluster.make_policy(version), remote.cluster.slots
        before = copies_of(slots)
        report = remote.refitter.refit(policy)
        assert (report.version, report.changed) == (version, changes_of(slots, before))
        remote.cluster.assert_holds(policy, version=version)


@pytest.mark.parametrize("layout", ["experts in parts", "experts apart"])
@pytest.mark.parametrize("wire", ["fp8", "bf16"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("as_stream", [False, True])
def test_experts_that_come_stacked_travel_one_by_one(
    layout, wire, is_transposed, as_stream, open_remote, small_buckets
):
    remote = open_remote(layout, collective={"wire": wire})
    for version in (1, 2):
        policy = remote.cluster.make_policy(version)
        stacked = stack_experts(policy, is_transposed=is_transposed)
        remote.refitter.refit((lambda stacked=stacked: iter(stacked.items())) if as_stream else stacked)
        remote.cluster.assert_holds(policy, version=version)
    offer = first_offer(remote)
    assert {tensor.name for tensor in offer.tensors} == policy.keys()
    dtypes = {tensor.dtype for tensor in offer.tensors if tensor.name.startswith(EXPERTS)}
    assert dtypes == {"float8_e4m3fn" if wire == "fp8" else "bfloat16"}


def test_nan_in_a_stack_is_named_as_it_was_sent(open_remote):
    remote = open_remote("experts apart")
    stacked = stack_experts(remote.cluster.make_policy(1))
    name = f"{EXPERTS}.down_proj"
    stacked[name][1, 3, 5] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        remote.refitter.refit(stacked)
    assert caught.value.names == (name,)


def test_what_overflows_in_the_dtype_of_one_rank_alone_is_named(open_remote):
    remote = open_remote()
    shard = remote.cluster.shards[1]
    place = next(place for place, slot in enumerate(shard._slots) if slot.name == NORM)
    shard._slots[place] = replace(shard._slots[place], weight=torch.zeros(HIDDEN, dtype=torch.float16))
    policy = remote.cluster.make_policy(1)
    policy[NORM][3] = 1e5
    with pytest.raises(NonFiniteError) as caught:
        remote.refitter.refit(policy)
    assert caught.value.names == (NORM,)
    assert [is_dirty for is_dirty, _ in remote.cluster.states] == [True] * 2


def test_nothing_is_flagged_if_nobody_looks(open_remote):
    remote = open_remote("experts apart", validate="off")
    stacked = stack_experts(remote.cluster.make_policy(1))
    stacked[f"{EXPERTS}.down_proj"][1, 3, 5] = float("nan")
    assert remote.refitter.refit(stacked).version == 1


@pytest.mark.parametrize("wrong", ["shape", "expert by expert too"])
def test_a_stack_that_does_not_fit_is_named_before_a_byte_is_written(wrong, open_remote):
    remote = open_remote("experts apart")
    policy = remote.cluster.make_policy(1)
    stacked, name = stack_experts(policy), f"{EXPERTS}.gate_up_proj"
    if wrong == "shape":
        stacked[name] = stacked[name][:, :-1]
    else:
        stacked = {f"{EXPERTS}.0.up_proj.weight": policy[f"{EXPERTS}.0.up_proj.weight"], **stacked}
    with pytest.raises(InvalidSourceError, match=rf"{name}: (has shape|holds .*send it once)"):
        remote.refitter.refit(stacked)
    assert remote.cluster.states == [(False, 0)] * 2


def test_a_rank_of_two_receives_its_half_and_what_both_need(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    sender = remote.ranks._broadcast._plan.sender
    of_rank = [num_bytes_to(sender, section) for section in (0, 1)]
    offer = first_offer(remote)
    cut = sum(prod(tensor.shape) * (1 if tensor.format else 2) for tensor in offer.tensors if tensor.cut)
    shared = sum(bucket.portion_bytes[0] for bucket in sender.buckets)
    assert offer.sections == (0, 1)
    assert of_rank[0] == pytest.approx(shared + cut / 2, rel=0.02) == of_rank[1]
    assert num_bytes_sent(sender) == sum(of_rank) - shared
    held = [sum(buffer.nbytes for buffer in server.orders.receiver._buffers) for server in remote.servers]
    assert max(held) < 0.7 * sum(buffer.nbytes for buffer in sender._buffers)


def test_ranks_that_hold_the_same_take_one_broadcast(open_remote):
    remote = open_remote("replicated")
    remote.refitter.refit(remote.cluster.make_policy(1))
    offer = first_offer(remote)
    assert offer.sections == () and {tensor.cut for tensor in offer.tensors} == {None}
    sender = remote.ranks._broadcast._plan.sender
    assert num_bytes_sent(sender) == num_bytes_to(sender, None)


def test_a_stream_may_come_in_another_order_than_the_last(open_remote):
    remote = open_remote()
    for seed in (1, 2, 3):
        policy = remote.cluster.make_policy(seed)
        items = list(policy.items())[:: -1 if seed == 2 else 1]
        remote.refitter.refit(lambda items=items: iter(items))
        remote.cluster.assert_holds(policy, version=seed)


def test_another_dtype_than_was_announced_is_refused(open_remote):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    manifest = manifest_of(policy)
    policy[Q_PROJ] = policy[Q_PROJ].float()
    with pytest.raises(InvalidSourceError, match=rf"{Q_PROJ}: arrived as float32 .* but bfloat16 .*was announced"):
        remote.refitter.refit(iter(policy.items()), manifest=manifest)
    heals(remote)


def test_ranks_that_answer_out_of_order_get_their_own_parts(open_remote):
    remote = open_remote()
    remote.channel.on_answers = lambda answers: answers[::-1]
    for version in (1, 2):
        policy = remote.cluster.make_policy(version)
        remote.refitter.refit(policy)
        remote.cluster.assert_holds(policy, version=version)


def test_a_rank_that_holds_more_than_it_is_sent_says_so_before_a_byte_is_written(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    first, last = remote.servers
    # As if the engine had been started again, its ranks the other way round, and nobody had noticed.
    first.orders.rank.target.live.forget()
    last.orders.rank.target.live.forget()
    first.orders.rank.target.live._read_inventory, last.orders.rank.target.live._read_inventory = (
        last.orders.rank.target.live._read_inventory,
        first.orders.rank.target.live._read_inventory,
    )
    remote.channel.requests.clear()
    policy = remote.cluster.make_policy(2)
    remote.refitter.refit(policy)
    assert remote.channel.steps == ["prepare", "abandon", "describe", "join", "prepare", "take"]
    for shard in remote.cluster.shards:
        assert_slots_hold(shard.slots(), policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masters_are_rounded_as_an_ordinary_refit_rounds_them(dtype, open_remote):
    remote = open_remote()
    policy = remote.cluster.make_policy(1, dtype)
    remote.refitter.refit(policy)
    remote.cluster.assert_holds(policy, version=1)


@pytest.mark.parametrize("state_dict", [kind for kind in STATE_DICTS if kind is not as_iterator])
def test_any_source_that_says_what_will_come(state_dict, open_remote, tmp_path):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    remote.refitter.refit(**state_dict(policy, tmp_path))
    remote.cluster.assert_holds(policy, version=1)


def test_an_iterator_that_says_nothing_is_refused(open_remote):
    remote = open_remote()
    with pytest.raises(InvalidSourceError, match="manifest"):
        remote.refitter.refit(iter(remote.cluster.make_policy(1).items()))
    assert remote.cluster.states == [(False, 0)] * 2


@pytest.mark.parametrize("as_stream", [False, True])
def test_a_tensor_larger_than_a_bucket_comes_in_runs_of_rows(as_stream, open_remote, small_buckets):
    remote = open_remote()
    for version in (1, 2):
        policy = remote.cluster.make_policy(version)
        remote.refitter.refit((lambda policy=policy: iter(policy.items())) if as_stream else policy)
        remote.cluster.assert_holds(policy, version=version)


def test_scales_beside_a_tensor_that_is_not_fp8_are_refused(open_remote):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    policy[K_PROJ + "_scale_inv"] = torch.ones(1, 2)
    with pytest.raises(InvalidSourceError, match="leave the scale out"):
        remote.refitter.refit(policy)
    assert remote.cluster.states == [(False, 0)] * 2


@pytest.mark.parametrize(
    ("name", "scale_format"), [(K_PROJ, ScaleFormat.FP32), (Q_PROJ, ScaleFormat.FP32), (O_PROJ, ScaleFormat.UE8M0)]
)
def test_a_tensor_that_is_fp8_already_is_copied_bit_for_bit(name, scale_format, open_remote):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    remote.refitter.refit(prequantize(policy, name, scale_format))
    remote.cluster.assert_holds(policy, version=1)
    cuts = {tensor.name: tensor.cut for tensor in first_offer(remote).tensors}
    assert (cuts[name] is None) == (name == K_PROJ)


def test_fp8_travels_where_no_slice_cuts_a_block(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    offer = first_offer(remote)
    forms = {tensor.name: (tensor.dtype, tensor.format and tensor.format.scale_format) for tensor in offer.tensors}
    assert forms[Q_PROJ] == ("float8_e4m3fn", "fp32")
    assert forms[O_PROJ] == ("float8_e4m3fn", "ue8m0")
    assert forms[UP_PROJ][0] == forms[NORM][0] == "bfloat16"


def test_the_second_refit_announces_and_joins_nothing(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    ranks = remote.ranks._broadcast
    held = [tensor.data_ptr() for tensor in ranks._plan.sender._buffers]
    tables = {key: table.table for key, table in ranks._plan.sender._tables.items()}
    remote.channel.requests.clear()
    report = remote.refitter.refit(remote.cluster.make_policy(2))
    assert remote.channel.steps == ["prepare", "take"]
    assert remote.channel.requests[0].order.source.tensors is None
    assert not report.is_first
    assert [tensor.data_ptr() for tensor in ranks._plan.sender._buffers] == held
    assert {key: table.table for key, table in ranks._plan.sender._tables.items()} == tables


def test_a_source_that_is_laid_out_as_the_last_is_not_judged_again(open_remote, monkeypatch):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    summarize = broadcast_module.summarize
    monkeypatch.setattr(broadcast_module, "summarize", None)
    policy = remote.cluster.make_policy(2)
    remote.refitter.refit(policy)
    remote.cluster.assert_holds(policy, version=2)
    monkeypatch.setattr(broadcast_module, "summarize", summarize)
    with pytest.raises(InvalidSourceError, match="missing"):
        remote.refitter.refit({name: policy[name] for name in policy if name != NORM})
    heals(remote)


def test_scales_that_come_with_the_weights_are_judged_every_time(open_remote):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    remote.refitter.refit(prequantize(policy, O_PROJ, ScaleFormat.UE8M0))
    before = remote.cluster.live_bytes()
    with pytest.raises(InvalidSourceError, match=rf"{O_PROJ}_scale_inv: holds scales that are not powers of two"):
        remote.refitter.refit(prequantize(policy, O_PROJ, ScaleFormat.FP32))
    assert remote.cluster.live_bytes() == before
    heals(remote)


def test_wrong_names_are_told_before_a_byte_is_written(open_remote):
    remote = open_remote()
    before = remote.cluster.live_bytes()
    policy = remote.cluster.make_policy(1)
    with pytest.raises(InvalidSourceError) as caught:
        remote.refitter.refit({"model.more.weight": policy.pop(NORM), **policy})
    assert sorted(line.partition(":")[0] for line in caught.value.problems) == ["model.more.weight", NORM]
    assert remote.cluster.live_bytes() == before
    assert remote.cluster.states == [(False, 0)] * 2
    heals(remote)


def test_nan_in_several_buckets_is_named_everywhere(open_remote, small_buckets):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    policy[Q_PROJ][200, 3] = float("nan")
    policy[NORM][7] = float("inf")
    with pytest.raises(NonFiniteError) as caught:
        remote.refitter.refit(policy)
    assert set(caught.value.names) == {Q_PROJ, NORM}
    assert_is_torn(remote, caught.value)
    assert remote.is_ahead or "NaN or Inf" in remote.client.blocked
    heals(remote)


def test_strict_looks_for_nan_before_a_byte_is_written(open_remote):
    remote = open_remote(validate="strict")
    policy = remote.cluster.make_policy(1)
    policy[Q_PROJ][200, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="Nothing was written"):
        remote.refitter.refit(policy)
    assert remote.cluster.states == [(False, 0)] * 2


@pytest.mark.parametrize("at", range(7))
@every_way
def test_a_source_that_raises_ends_the_refit_everywhere(layout, at, open_remote, small_buckets):
    remote = open_remote(layout)
    policy = remote.cluster.make_policy(1)

    def read(policy=policy):
        for place, item in enumerate(policy.items()):
            if place == min(at, len(policy) - 1):
                raise OSError("the disk is gone")
            yield item

    start_s = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        remote.refitter.refit(iter(read()) if at else read_nothing(read), manifest=manifest_of(policy) if at else None)
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    if at:
        assert_is_torn(remote)
    heals(remote)


def read_nothing(read):
    return lambda: read()


@pytest.mark.parametrize("change", ["order", "shape", "fewer", "more"])
def test_a_stream_that_is_not_what_was_announced_ends_everywhere(change, open_remote):
    remote = open_remote()
    policy = remote.cluster.make_policy(1)
    items = {
        "order": list(policy.items())[::-1],
        "shape": [(name, tensor[:-1]) for name, tensor in policy.items()],
        "fewer": list(policy.items())[:-1],
        "more": [*policy.items(), ("more", policy[NORM])],
    }[change]
    with pytest.raises(InvalidSourceError) as caught:
        remote.refitter.refit(iter(items), manifest=manifest_of(policy))
    assert ("holds part" in str(caught.value)) == (not remote.is_ahead)
    assert_is_torn(remote, caught.value)
    heals(remote)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
@every_way
def test_a_rank_that_fails_fails_all_and_keeps_nobody_waiting(layout, fault, rank, open_remote, small_buckets):
    remote = open_remote(layout)
    remote.refitter.refit(remote.cluster.make_policy(1))
    arm(remote.cluster.targets[rank], fault, RuntimeError("injected"))
    start_s = time.monotonic()
    with pytest.raises(RankFailedError, match="RuntimeError: injected"):
        remote.refitter.refit(remote.cluster.make_policy(2))
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    assert [is_dirty for is_dirty, _ in remote.cluster.states] == [fault not in WRITES_NOTHING] * 2
    heals(remote)


def test_a_rank_that_fails_in_the_middle_goes_on_receiving(open_remote, small_buckets):
    remote = open_remote()
    fail_once(remote.cluster.targets[1], "push", RuntimeError("injected"))
    with pytest.raises(RankFailedError, match="rank 1: RuntimeError: injected"):
        remote.refitter.refit(remote.cluster.make_policy(2))
    assert [is_dirty for is_dirty, _ in remote.cluster.states] == [True] * 2
    assert remote.servers[0].orders.receiver._communicator.is_joined
    heals(remote)


@every_way
def test_a_rank_that_vanishes_loses_the_engine_and_keeps_nobody_waiting(layout, open_remote, small_buckets):
    remote = open_remote(layout, timeout_s=2.0)
    remote.refitter.refit(remote.cluster.make_policy(1))
    target = remote.cluster.targets[1]

    def vanish(*_, **__):
        communicator = remote.servers[1].orders.receiver._communicator
        communicator.broadcast = communicator.wait = communicator.agree = vanish  # and nobody is told
        raise SystemExit

    target.push = vanish
    remote.channel.on_answers = lambda answers: lose(answers)
    start_s = time.monotonic()
    with pytest.raises(EngineLostError):
        remote.refitter.refit(remote.cluster.make_policy(2))
    assert time.monotonic() - start_s < 2 * 2.0
    assert remote.cluster.states[0][0]
    assert "lost" in remote.client.blocked
    remote.channel.on_answers = lambda answers: answers


def lose(answers):
    if any(Reply.model_validate_json(answer).error is not None for answer in answers):
        raise EngineLostError("a worker died")
    return answers


def test_a_rank_that_does_not_come_is_named_and_nothing_is_written(open_remote):
    remote = open_remote(timeout_s=1.0)
    handle = remote.servers[1].handle
    remote.servers[1].handle = lambda message: handle(
        message if '"join"' not in message else message.replace('"join"', '"late"')
    )
    with pytest.raises(RefitError) as caught:
        remote.refitter.refit(remote.cluster.make_policy(1))
    assert isinstance(caught.value, RankFailedError | TransportError)
    assert remote.cluster.states == [(False, 0)] * 2
    remote.servers[1].handle = handle
    heals(remote)


def test_an_offer_that_was_changed_on_its_way_is_refused(open_remote):
    remote = open_remote()
    handle = remote.servers[1].handle
    remote.servers[1].handle = lambda message: handle(
        message.replace('"scale_format":"fp32"', '"scale_format":"ue8m0"')
    )
    with pytest.raises(RankFailedError, match="does not match its digest"):
        remote.refitter.refit(remote.cluster.make_policy(1))
    assert remote.cluster.states == [(False, 0)] * 2
    remote.servers[1].handle = handle
    heals(remote)


def second_driver(remote):
    """Another trainer of the same ranks."""
    channel = ThreadChannel(remote.servers)
    return Refitter(Client(RemoteRanks(channel)), transport="collective", timeout_s=TIMEOUT_S)


def test_two_trainers_take_turns(open_remote):
    remote = open_remote()
    other = second_driver(remote)
    for version, refitter in enumerate([remote.refitter, other, remote.refitter, other], 1):
        policy = remote.cluster.make_policy(version)
        assert refitter.refit(policy).version == version
        remote.cluster.assert_holds(policy, version=version)
    other.close()


def test_a_trainer_that_comes_between_wins_and_the_first_is_told(open_remote):
    remote = open_remote()
    other, policy = second_driver(remote), remote.cluster.make_policy(2)

    def come_between(request):
        if request.order.step == "take":
            remote.channel.on_request = lambda request: None
            other.refit(policy)

    remote.channel.on_request = come_between
    with pytest.raises(RankFailedError, match="another one began"):
        remote.refitter.refit(remote.cluster.make_policy(1))
    remote.cluster.assert_holds(policy, version=1)
    heals(remote)
    other.close()


def test_an_engine_that_was_started_again_is_joined_again(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    for server in remote.servers:
        server.orders.receiver.forget()
    heals(remote)
    assert "join" in remote.channel.steps


def test_a_padded_name_of_a_tied_head_need_not_travel(open_remote):
    remote = open_remote("pipeline")
    policy = remote.cluster.make_policy(1)
    assert HEAD in policy
    remote.refitter.refit(policy)
    remote.cluster.assert_holds(policy, version=1)


def test_a_mapped_refit_after_a_broadcast_gives_its_buffers_back(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    ordinary = Refitter(remote.client)
    policy = remote.cluster.make_policy(2)
    ordinary.refit(policy)
    remote.cluster.assert_holds(policy, version=2)
    heals(remote)


def test_a_policy_is_there_before_requests_are_paused(open_remote):
    remote, had_all = open_remote(), []
    original = remote.refitter._engine.pause

    async def pause(config):
        receivers = [server.orders.receiver for server in remote.servers]
        had_all.extend(receiver.is_ahead and not receiver._arriving for receiver in receivers)
        return await original(config)

    remote.refitter._engine.pause = pause
    for version in (1, 2):
        policy = remote.cluster.make_policy(version)
        report = remote.refitter.refit(policy)
        remote.cluster.assert_holds(policy, version=version)
        assert ("stage" in report.phases_s) == remote.is_ahead
    assert had_all == [remote.is_ahead] * 4


@pytest.mark.parametrize("open_remote", ["ahead"], indirect=True)
def test_what_ranks_are_asked_for_while_a_policy_comes_ends_nothing(open_remote):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    original = remote.refitter._engine.pause

    async def pause(config):
        for server in remote.servers:
            server.handle(messages.Request(id="other", order=messages.Do(step="fingerprint")).encode())
        return await original(config)

    remote.refitter._engine.pause = pause
    heals(remote)


@pytest.mark.parametrize("open_remote", ["ahead"], indirect=True)
def test_a_trainer_that_falls_silent_when_all_has_come_leaves_the_engine_to_the_next(open_remote, monkeypatch):
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        engine = remote.refitter._engine
        for what, name in ((engine, "pause"), (engine.ranks, "write"), (engine.ranks, "abandon")):
            patched.setattr(what, name, Mock(side_effect=KeyboardInterrupt))
        remote.refitter.refit(remote.cluster.make_policy(2))
    assert [server.orders.receiver.is_ahead for server in remote.servers] == [True] * 2
    remote.cluster.assert_holds(remote.cluster.make_policy(1), version=1)
    other = Refitter(remote.client, transport="collective", timeout_s=TIMEOUT_S)
    other.refit(remote.cluster.make_policy(3))
    remote.cluster.assert_holds(remote.cluster.make_policy(3), version=2)
    other.close()


@pytest.mark.parametrize("open_remote", ["ahead"], indirect=True)
@pytest.mark.parametrize("as_stream", [False, True])
def test_a_rank_that_is_lost_while_a_policy_comes_ends_the_push_and_its_stream_is_not_read_again(
    as_stream, open_remote, small_buckets, monkeypatch
):
    remote = open_remote()
    policy = remote.cluster.make_policy(2)
    remote.refitter.refit(remote.cluster.make_policy(1))
    reads = []

    def read():
        for item in policy.items():
            reads.append(item[0])
            yield item

    fail_once(remote.servers[1].orders.receiver, "_begin_next", TransportError("a wire broke"))
    if as_stream:
        with pytest.raises(TransportError):
            remote.refitter.refit(iter(read()), manifest=manifest_of(policy))
        assert len(reads) == len(set(reads))
        assert remote.cluster.states == [(False, 1)] * 2
    else:
        remote.refitter.refit(policy)  # is sent again
        remote.cluster.assert_holds(policy, version=2)
    heals(remote)


@pytest.mark.parametrize("open_remote", ["ahead"], indirect=True)
def test_a_source_that_hangs_ends_when_ranks_have_waited(open_remote, small_buckets):
    remote = open_remote(timeout_s=1.0)
    policy, may_end = remote.cluster.make_policy(1), Event()

    def read():
        yield next(iter(policy.items()))
        may_end.wait(60)

    start_s = time.monotonic()
    with pytest.raises(RefitError):
        remote.refitter.refit(iter(read()), manifest=manifest_of(policy))
    assert time.monotonic() - start_s < 20
    may_end.set()
    assert remote.cluster.states == [(False, 0)] * 2
    heals(remote)


@pytest.mark.parametrize("open_remote", ["ahead"], indirect=True)
def test_an_engine_that_is_lost_while_a_policy_is_sent_is_noticed(open_remote, monkeypatch):
    monkeypatch.setattr(broadcast_module, "_LOOK_S", 0.1)
    remote = open_remote()
    policy, may_end = remote.cluster.make_policy(1), Event()

    def read():
        items = iter(policy.items())
        yield next(items)
        may_end.wait(60)
        yield from items

    def die(request):
        if request.order.step == "hello" and "prepare" in remote.channel.steps:
            may_end.set()
            raise EngineLostError("the engine is gone")

    remote.channel.on_request = die
    start_s = time.monotonic()
    with pytest.raises(EngineLostError, match="the engine is gone"):
        remote.refitter.refit(iter(read()), manifest=manifest_of(policy))
    assert time.monotonic() - start_s < TIMEOUT_S / 2


@pytest.mark.parametrize("open_remote", ["auto"], indirect=True)
def test_an_engine_without_memory_for_all_of_it_is_sent_buckets_by_itself(open_remote, monkeypatch):
    original, take_buffers = receiver_module.Receiver.join, receiver_module.take_buffers

    def join(receiver, order):
        original(receiver, order)
        return 1 << 30

    def take(buckets, device, *, count, remedy):
        if "during" in remedy:
            raise StagingMemoryError("no room")
        return take_buffers(buckets, device, count=count, remedy=remedy)

    monkeypatch.setattr(receiver_module.Receiver, "join", join)
    monkeypatch.setattr(receiver_module, "take_buffers", take)
    monkeypatch.setattr(ThreadChannel, "serves_meanwhile", True)
    remote = open_remote("alone")
    for seed in (1, 2):
        heals(remote, seed)
    offers = [r.order.source.is_ahead for r in remote.channel.requests if isinstance(r.order, messages.Prepare)]
    assert offers == [True, False, False]


@pytest.mark.parametrize("open_remote", ["ahead"], indirect=True)
def test_an_engine_without_memory_for_all_of_it_names_the_remedy(open_remote, monkeypatch):
    remote = open_remote()
    with monkeypatch.context() as patched, pytest.raises(StagingMemoryError, match=r'stage="during"'):
        patched.setattr(receiver_module, "take_buffers", partial(refuse_buffers, receiver_module.take_buffers))
        remote.refitter.refit(remote.cluster.make_policy(1))
    assert remote.cluster.states == [(False, 0)] * 2
    heals(remote)


def refuse_buffers(take_buffers, buckets, device, **options):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "empty", Mock(side_effect=torch.OutOfMemoryError))
        return take_buffers(buckets, device, **options)


def test_memory_for_all_of_it_is_given_back_to_a_trainer_that_needs_two_buckets(
    open_remote, small_buckets, monkeypatch
):
    monkeypatch.setattr(receiver_module, "NUM_BUFFERS", 2)
    remote = open_remote()
    remote.refitter.refit(remote.cluster.make_policy(1))
    receivers = [server.orders.receiver for server in remote.servers]
    num_buckets = first_offer(remote).num_buckets
    assert num_buckets > 2
    assert [len(receiver._buffers) for receiver in receivers] == [num_buckets if remote.is_ahead else 2] * 2
    other = Refitter(remote.client, transport="collective", timeout_s=TIMEOUT_S, collective={"stage": "during"})
    other.refit(remote.cluster.make_policy(2))
    assert [len(receiver._buffers) for receiver in receivers] == [2] * 2
    other.close()


@pytest.mark.parametrize(
    ("layout", "free_bytes", "serves", "is_ahead"),
    [
        ("alone", 1 << 30, True, True),
        ("alone", 1 << 10, True, False),
        ("alone", 1 << 30, False, False),
        ("tensor", 1 << 30, True, False),
    ],
    ids=["all", "memory", "idle", "ranks"],
)
@pytest.mark.parametrize("open_remote", ["auto"], indirect=True)
def test_a_policy_is_sent_ahead_by_itself_where_that_helps(
    layout, free_bytes, serves, is_ahead, open_remote, monkeypatch
):
    original = receiver_module.Receiver.join

    def join(receiver, order):
        assert original(receiver, order) == 0, "on a CPU"
        return free_bytes

    monkeypatch.setattr(receiver_module.Receiver, "join", join)
    monkeypatch.setattr(ThreadChannel, "serves_meanwhile", serves)
    remote = open_remote(layout)
    heals(remote)
    assert first_offer(remote).is_ahead == is_ahead
