"""One rank behind a wire: what it answers to whatever it is asked, and what it holds."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8refit import KvConfig, RefitConfig, __version__
from fp8refit.config import Job, KvOrder
from fp8refit.errors import (
    CalibrationError,
    EngineDirtyError,
    InvalidCalibrationError,
    InvalidSourceError,
    NonFiniteError,
    RankFailedError,
    TensorsForgottenError,
    TransportError,
    UnsupportedEngineError,
)
from fp8refit.live.fingerprint import fingerprint
from fp8refit.live.slots import dtype_name
from fp8refit.ranks.rank import Rank
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Reply, Request
from fp8refit.remote.rank_server import RankServer
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.transport.memory.bucket import Bucket
from fp8refit.transport.memory.exporter import Exporter
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.ring import Ring
from tests.fake_kv import K_SCALE, V_SCALE, FakeKvCache
from tests.fakes import assert_holds, live_bytes, make_policy, make_target
from tests.transport.memory.test_shared_tensors import FakeDriver

NORM = "model.layers.0.input_layernorm.weight"
RING = Ring.make()


@pytest.fixture
def target(model):
    return make_target(model)


@pytest.fixture
def server(target) -> RankServer:
    return RankServer(lambda: Rank(target))


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    """GPU memory for tensors that go by handle."""
    driver = FakeDriver()
    monkeypatch.setattr("fp8refit.remote.rank_orders.Importer", lambda device: Importer(device, driver=driver))
    return driver


@pytest.fixture
def bucket():
    bucket = Bucket(1 << 20)
    yield bucket
    bucket.close()


def ask(server: RankServer, order: messages.Order, id: str = "1") -> Reply:
    reply = Reply.model_validate_json(server.handle(Request(id=id, order=order).encode()))
    assert reply.id == id
    return reply


def do(server: RankServer, order: messages.Order) -> Reply:
    """Check that it could."""
    reply = ask(server, order)
    assert reply.error is None, reply.error
    return reply


def refused(server: RankServer, order: messages.Order, error: type[Exception], match: str) -> Reply:
    """Check that it could not."""
    reply = ask(server, order)
    assert reply.error is not None, order
    with pytest.raises(error, match=match):
        raise reply.error.error()
    return reply


def prepare(refit: str, source, *, keeps=(), **options) -> messages.Prepare:
    return messages.Prepare(refit=refit, job=Job(config=RefitConfig(**options)), source=source, keeps=keeps)


def pushed(policy, **fields) -> messages.Pushed:
    manifest = {name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in policy.items()}
    return messages.Pushed(manifest=manifest, **fields)


def files(policy, folder: Path) -> messages.Files:
    save_file(policy, folder / "weights.safetensors")
    return messages.Files(path=str(folder), stamps=SafetensorsSource(folder).stamps)


def packed(policy, bucket: Bucket) -> messages.Packed:
    bucket.clear()
    refs = tuple(bucket.put(name, tensor) for name, tensor in policy.items())
    return messages.Packed(segments=(bucket.segment,), refs=refs)


def push(refit: str, policy, bucket: Bucket) -> messages.Stream:
    """All that there is of a stream."""
    RING.begin()
    RING.send(packed(policy, bucket).encode())
    RING.call_back()
    return messages.Stream(refit=refit, ring=RING.segment)


def written(refit: str) -> messages.RefitStep:
    return messages.RefitStep(step="write", refit=refit)


def refit(server, model, folder, *, name: str = "good", seed: int = 1) -> None:
    policy = make_policy(model, seed)
    before = do(server, prepare(name, files(policy, folder))).version
    reply = do(server, written(name))
    assert_holds(model, policy)
    assert (reply.is_dirty, reply.version) == (False, before + 1)


# What is asked.


@pytest.mark.parametrize(
    ("message", "id", "match"),
    [
        ("", "", "cannot read"),
        ("{}", "", "cannot read"),
        ("[1", "", "cannot read"),
        ('{"id": "7", "order": {"step": "dance"}}', "", "cannot read"),
        ('{"id": "7", "order": {"step": "hello", "more": 1}}', "", "cannot read"),
        ('{"id": "7", "more": 1, "order": {"step": "hello"}}', "", "cannot read"),
        ('{"id": "7", "order": {"step": "write"}}', "", "cannot read"),
        ('{"id": "7", "protocol": 99, "order": {"step": "hello"}}', "", "the driver speaks protocol 99"),
    ],
)
def test_what_is_no_request_is_answered_with_an_error(message, id, match, server):
    reply = Reply.model_validate_json(server.handle(message))
    assert (reply.id, reply.package_version) == (id, __version__)
    with pytest.raises(RankFailedError, match=f"{match}.*install the same version on both sides"):
        raise reply.error.error()


def test_a_server_says_who_it_is(server):
    reply = do(server, messages.Do(step="hello"))
    assert (reply.rank, reply.version, reply.is_dirty) == (0, 0, False)
    assert (reply.package_version, reply.protocol) == (__version__, messages.PROTOCOL)


def test_a_rank_that_cannot_be_made_is_asked_for_again(target):
    ready = []

    def make_rank():
        if not ready:
            raise UnsupportedEngineError("its ranks have no process group", ["leave out pipeline parallelism"])
        return Rank(target)

    server = RankServer(make_rank)
    reply = refused(server, messages.Do(step="hello"), UnsupportedEngineError, "no process group\n  - leave out")
    assert (reply.package_version, reply.is_dirty) == (__version__, False)
    ready.append(1)
    do(server, messages.Do(step="hello"))


def test_an_unforeseen_error_is_a_value_and_is_logged(server, model, caplog):
    model.slots = lambda: 1 / 0
    refused(server, messages.Do(step="describe"), RankFailedError, "ZeroDivisionError: division by zero")
    assert "ZeroDivisionError" in caplog.text


def test_the_end_of_the_process_is_no_value(server, model):
    def end():
        raise SystemExit

    model.slots = end
    with pytest.raises(SystemExit):
        server.handle(Request(id="1", order=messages.Do(step="describe")).encode())


def test_a_fingerprint_is_told(server, model):
    before = do(server, messages.Do(step="fingerprint")).fingerprint
    assert before == do(server, messages.Do(step="fingerprint")).fingerprint == fingerprint(model.read_inventory())
    model.embed[3, 4] += 1
    assert do(server, messages.Do(step="fingerprint")).fingerprint != before


def test_a_layout_is_told(server, model):
    layout = do(server, messages.Do(step="describe")).layout
    assert [slot.name for slot in layout.slots] == [slot.name for slot in model.slots()]


# Refits.


def test_files_are_read_by_the_rank(server, model, target, tmp_path):
    refit(server, model, tmp_path)
    assert target.version == 1


def test_parts_are_written_as_they_come(server, model, bucket):
    policy = make_policy(model, seed=1)
    do(server, prepare("a", pushed(policy)))
    assert do(server, messages.RefitStep(step="begin", refit="a")).is_dirty
    for name, tensor in policy.items():
        do(server, push("a", {name: tensor}, bucket))
    reply = do(server, messages.RefitStep(step="finish", refit="a"))
    (report,) = reply.reports
    assert report.num_tensors == len(policy)
    assert (reply.version, reply.is_dirty) == (1, False)
    assert_holds(model, policy)


def test_files_that_are_not_there_are_named(server):
    refused(
        server, prepare("a", messages.Files(path="/nowhere", stamps=())), InvalidSourceError, "/nowhere: does not exist"
    )


def test_a_dtype_that_this_torch_does_not_know_is_named(server):
    source = messages.Pushed(manifest={"w": ((1,), "float3"), "v": ((1,), "nn")})
    refused(server, prepare("a", source), RankFailedError, "w: 'float3' is not a dtype of this rank's PyTorch")


def test_what_the_driver_found_wrong_is_told_with_the_rest(server, model):
    source = pushed(make_policy(model, seed=1) | {"extra": torch.ones(1)}, problems=(f"{NORM}: sent twice",))
    reply = refused(server, prepare("a", source), InvalidSourceError, "2 problems")
    assert f"{NORM}: sent twice" in reply.error.items


def test_an_error_of_the_values_is_a_value(server, model, bucket):
    policy = make_policy(model, seed=1)
    policy[NORM][0] = float("nan")
    do(server, prepare("a", pushed(policy)))
    do(server, messages.RefitStep(step="begin", refit="a"))
    do(server, push("a", policy, bucket))
    reply = refused(server, messages.RefitStep(step="finish", refit="a"), NonFiniteError, "holds part of this policy")
    assert (reply.is_dirty, reply.error.items, reply.error.written) == (True, (NORM,), True)


@pytest.mark.parametrize("way", ["write", "finish"])
def test_a_write_is_committed_once(way, server, model, target, bucket, tmp_path):
    policy = make_policy(model, seed=1)
    if way == "write":
        do(server, prepare("a", files(policy, tmp_path)))
        last = written("a")
    else:
        do(server, prepare("a", pushed(policy)))
        do(server, messages.RefitStep(step="begin", refit="a"))
        do(server, push("a", policy, bucket))
        last = messages.RefitStep(step="finish", refit="a")
    do(server, last)
    reply = refused(server, last, RankFailedError, "nothing is prepared|follows")
    assert (reply.version, reply.is_dirty) == (target.version, target.is_dirty) == (1, False)
    assert_holds(model, policy)


# Refits that another one overtook.


@pytest.mark.parametrize(
    "late",
    [
        lambda policy, bucket: written("old"),
        lambda policy, bucket: messages.RefitStep(step="begin", refit="old"),
        lambda policy, bucket: push("old", policy, bucket),
        lambda policy, bucket: messages.RefitStep(step="finish", refit="old"),
    ],
    ids=["write", "begin", "push", "finish"],
)
@pytest.mark.parametrize("reached", ["prepared", "begun", "half way", "pushed", "committed"])
def test_a_step_of_a_refit_that_was_given_up_changes_nothing(reached, late, server, model, bucket):
    old, policy = make_policy(model, seed=1), make_policy(model, seed=2)
    do(server, prepare("old", pushed(old)))
    if reached != "prepared":
        do(server, messages.RefitStep(step="begin", refit="old"))
    if reached in ("half way", "pushed", "committed"):
        do(server, push("old", dict(list(old.items())[: 3 if reached == "half way" else len(old)]), bucket))
    if reached == "committed":
        do(server, messages.RefitStep(step="finish", refit="old"))
    version = int(reached == "committed")
    do(server, prepare("new", pushed(policy)))
    before = live_bytes(model)
    reply = refused(server, late(old, bucket), RankFailedError, "this refit was abandoned: its driver gave it up")
    assert (reply.is_dirty, reply.version) == (reached not in ("prepared", "committed"), version)
    do(server, messages.RefitStep(step="abandon", refit="old"))
    assert live_bytes(model) == before
    do(server, messages.RefitStep(step="begin", refit="new"))
    do(server, push("new", policy, bucket))
    assert do(server, messages.RefitStep(step="finish", refit="new")).version == version + 1
    assert_holds(model, policy)


def test_a_refit_that_was_abandoned_before_its_order_came_is_not_prepared(server, model, tmp_path):
    """Its driver had sent both, and the second came first."""
    do(server, messages.RefitStep(step="abandon", refit="late"))
    source = files(make_policy(model, 1), tmp_path)
    refused(server, prepare("late", source), RankFailedError, "this refit was abandoned")
    refused(server, written("late"), RankFailedError, "abandoned")
    do(server, prepare("next", source))
    do(server, written("next"))


def test_a_refit_that_was_abandoned_is_not_written(server, model, tmp_path):
    before = live_bytes(model)
    do(server, prepare("a", files(make_policy(model, seed=1), tmp_path)))
    do(server, messages.RefitStep(step="abandon", refit="a"))
    reply = refused(server, written("a"), RankFailedError, "nothing is prepared|follows")
    assert live_bytes(model) == before and not reply.is_dirty
    refit(server, model, tmp_path)


def test_a_closed_engine_writes_nothing_until_it_is_prepared_anew(server, model, tmp_path):
    before = live_bytes(model)
    do(server, prepare("a", files(make_policy(model, seed=1), tmp_path)))
    do(server, messages.Do(step="close"))
    refused(server, written("a"), RankFailedError, "abandoned")
    assert live_bytes(model) == before
    refit(server, model, tmp_path)


@pytest.mark.parametrize("again", ["write", "finish"])
def test_a_refit_that_failed_cannot_be_declared_whole(again, server, model, tmp_path):
    def fail():
        raise RuntimeError("boom")

    model.on_refresh = fail
    do(server, prepare("a", files(make_policy(model, seed=1), tmp_path)))
    refused(server, written("a"), RankFailedError, "RuntimeError: boom")
    model.on_refresh = lambda: None
    order = written("a") if again == "write" else messages.RefitStep(step="finish", refit="a")
    reply = refused(server, order, RankFailedError, "nothing is prepared|follows")
    assert (reply.is_dirty, reply.version) == (True, 0)
    refit(server, model, tmp_path)


# KV scales.


@pytest.fixture
def cache(model) -> FakeKvCache:
    model.kv = FakeKvCache(largest=896.0)
    return model.kv


BATCH = KvOrder(token_ids=((1, 2, 3), (4,)))


def calibrate(kv: KvOrder = BATCH) -> messages.Calibrate:
    return messages.Calibrate(job=Job(kv=kv, config=RefitConfig(kv=KvConfig(margin=1.0))))


def test_a_calibration_is_done_as_the_driver_says_and_told(server, cache, target):
    reply = do(server, calibrate())
    assert reply.kv.scales == cache.held == {K_SCALE: 2.0, V_SCALE: 2.0}
    assert (reply.kv.num_sequences, reply.kv.num_tokens, reply.kv.num_passes) == (2, 4, 1)
    assert cache.batches == [[[1, 2, 3], [4]]]
    assert (reply.version, reply.is_dirty, target.version) == (0, False, 0)


def test_a_calibration_that_cannot_be_is_a_value_and_the_engine_serves(server, cache, model):
    before = live_bytes(model)
    reply = refused(server, calibrate(KvOrder(token_ids=((100,),))), InvalidCalibrationError, "outside the vocabulary")
    assert not reply.is_dirty
    reply = refused(server, calibrate(KvOrder(scales={"x.k_scale": 1.0})), InvalidCalibrationError, "no x.k_scale")
    cache.largest[K_SCALE] = float("nan")
    reply = refused(server, calibrate(), CalibrationError, f"at 1 place.*{K_SCALE}")
    assert (reply.is_dirty, cache.held, live_bytes(model)) == (False, {K_SCALE: 1.0, V_SCALE: 1.0}, before)
    cache.on_pass = lambda: 1 / 0
    assert not refused(server, calibrate(), RankFailedError, "ZeroDivisionError").is_dirty
    cache.on_pass, cache.largest[K_SCALE] = (lambda: None), 448.0
    assert do(server, calibrate()).kv.scales == {K_SCALE: 1.0, V_SCALE: 2.0}


def test_scales_are_set_when_parts_are_written(server, cache, model, bucket):
    policy = make_policy(model, seed=1)
    config = RefitConfig(kv=KvConfig(margin=1.0))
    do(server, messages.Prepare(refit="a", job=Job(config=config, kv=BATCH), source=pushed(policy)))
    do(server, messages.RefitStep(step="begin", refit="a"))
    do(server, push("a", policy, bucket))
    assert cache.batches == []
    (report,) = do(server, messages.RefitStep(step="finish", refit="a")).reports
    assert report.kv.scales == cache.held == {K_SCALE: 2.0, V_SCALE: 2.0}
    assert_holds(model, policy)
    do(server, prepare("b", pushed(policy)))
    do(server, messages.RefitStep(step="begin", refit="b"))
    do(server, push("b", policy, bucket))
    (report,) = do(server, messages.RefitStep(step="finish", refit="b")).reports
    assert report.kv is None, "an order is one refit's"
    assert len(cache.batches) == 1


def test_a_rank_that_failed_in_its_scales_is_not_calibrated_but_refitted(server, cache, model, tmp_path):
    cache.on_pass = lambda: 1 / 0
    source = files(make_policy(model, seed=1), tmp_path)
    do(server, messages.Prepare(refit="a", job=Job(kv=BATCH), source=source))
    reply = refused(server, written("a"), RankFailedError, "ZeroDivisionError")
    assert (reply.is_dirty, reply.version) == (True, 0)
    cache.on_pass = lambda: None
    assert refused(server, calibrate(), EngineDirtyError, "weights are incomplete").is_dirty
    refused(server, written("a"), RankFailedError, "nothing is prepared|follows")
    refit(server, model, tmp_path)
    do(server, calibrate())


def test_a_calibration_gives_up_what_was_prepared_before_it(server, cache, model, tmp_path):
    before = live_bytes(model)
    do(server, prepare("a", files(make_policy(model, seed=1), tmp_path)))
    do(server, calibrate())
    refused(server, written("a"), RankFailedError, "nothing is prepared|follows")
    assert live_bytes(model) == before
    refit(server, model, tmp_path)


# Buckets.


def mapped_segments() -> set[str]:
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split("/memfd:")[1].split(" ")[0] for line in lines if "/memfd:memfd-" in line}


def test_a_bucket_that_was_replaced_is_unmapped(server, model):
    before = mapped_segments()
    policy = make_policy(model, seed=1)
    do(server, prepare("a", pushed(policy)))
    do(server, messages.RefitStep(step="begin", refit="a"))
    buckets = [Bucket(1 << 20) for _ in policy]
    segments = [bucket.segment.id for bucket in buckets]
    for bucket, (name, tensor) in zip(buckets, policy.items(), strict=True):
        do(server, push("a", {name: tensor}, bucket))
        bucket.close()
    assert mapped_segments() - before == {segments[-1]}
    do(server, messages.RefitStep(step="finish", refit="a"))
    assert_holds(model, policy)
    do(server, messages.Do(step="close"))
    assert not mapped_segments() - before


def test_a_bucket_that_is_gone_is_an_error_and_the_next_refit_heals(server, model, bucket, tmp_path):
    policy = make_policy(model, seed=1)
    do(server, prepare("a", pushed(policy)))
    do(server, messages.RefitStep(step="begin", refit="a"))
    order = push("a", policy, bucket)
    bucket.close()
    assert refused(server, order, TransportError, "has freed segment").is_dirty
    refit(server, model, tmp_path)


# Tensors in the trainer's memory.


def on_the_gpu(policy, driver: FakeDriver):
    """The same tensors in memory that the driver shares, in one segment."""
    segment = driver.segment(sum(-(-tensor.nbytes // 256) * 256 for tensor in policy.values()))
    moved, start = {}, 0
    for name, tensor in policy.items():
        moved[name] = segment[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += -(-tensor.nbytes // 256) * 256
    return moved


def exporter_of(driver: FakeDriver) -> Exporter:
    """An exporter of another process."""
    exporter = Exporter(driver=driver)
    exporter._process = Process.current().model_copy(update={"started": 1})
    return exporter


def mapped(export, **fields) -> messages.MappedTensors:
    return messages.MappedTensors(digest=export.digest, segments=export.segments, refs=export.refs, **fields)


def write(server: RankServer, name: str, source) -> None:
    do(server, prepare(name, source, keeps=("tensors",)))
    do(server, written(name))


def test_tensors_are_read_where_they_are_and_mapped_once(server, model, driver):
    policy = on_the_gpu(make_policy(model, seed=1), driver)
    export = exporter_of(driver).export(policy)
    write(server, "a", mapped(export))
    assert_holds(model, policy)
    for tensor, new in zip(policy.values(), make_policy(model, seed=2).values(), strict=True):
        tensor.copy_(new)
    write(server, "b", messages.MappedTensors(digest=export.digest))
    assert_holds(model, policy)
    assert driver.events.count("open_ipc") == 1
    do(server, messages.Do(step="close"))
    assert [event for event in driver.events if event.startswith("close_ipc")] == ["close_ipc 1"]


def test_tensors_that_this_rank_does_not_know_are_asked_for_again(server, model, driver):
    policy = on_the_gpu(make_policy(model, seed=1), driver)
    export = exporter_of(driver).export(policy)
    known = messages.MappedTensors(digest=export.digest)
    refused(
        server, prepare("a", known), TensorsForgottenError, "no longer has the tensors of the last refit; refit again"
    )
    write(server, "b", mapped(export))
    do(server, messages.Do(step="close"))
    refused(server, prepare("c", known), TensorsForgottenError, "no longer has the tensors")
    refused(
        server, prepare("d", messages.MappedTensors(digest="other")), TensorsForgottenError, "no longer has the tensors"
    )
    write(server, "e", mapped(export))


def test_no_tensor_at_all_is_a_source_too(server, driver):
    refused(server, prepare("a", mapped(exporter_of(driver).export({}))), InvalidSourceError, f"{NORM}: missing")


def test_problems_are_those_of_this_refit(server, model, driver):
    policy = on_the_gpu(make_policy(model, seed=1), driver)
    export = exporter_of(driver).export(policy)
    twice = prepare("a", mapped(export, problems=(f"{NORM}: sent twice",)))
    refused(server, twice, InvalidSourceError, f"{NORM}: sent twice")
    write(server, "b", mapped(export))
    assert_holds(model, policy)


def test_memory_that_the_trainer_left_is_unmapped(server, model, driver):
    exporter = exporter_of(driver)
    first, second = (on_the_gpu(make_policy(model, seed), driver) for seed in (1, 2))
    write(server, "a", mapped(exporter.export(first)))
    write(server, "b", mapped(exporter.export(second)))
    assert "close_ipc 1" in driver.events
    assert_holds(model, second)


@pytest.mark.parametrize(
    "order",
    [written("a"), messages.RefitStep(step="abandon", refit="a"), messages.Do(step="close")],
)
def test_the_trainer_s_memory_is_unmapped_when_it_is_wanted_back(order, server, model, driver):
    export = exporter_of(driver).export(on_the_gpu(make_policy(model, seed=1), driver))
    do(server, prepare("a", mapped(export)))
    do(server, order)
    assert "close_ipc 1" in driver.events
    write(server, "b", mapped(export))
    assert driver.events.count("close_ipc 1") == 1


@pytest.mark.parametrize("keeps", [(), ("tensors",), ("buckets",), ("tensors", "buckets")])
@pytest.mark.parametrize("then", ["files", "pushed"])
def test_other_sources_leave_mapped_what_the_driver_says(then, keeps, server, model, driver, bucket, tmp_path):
    policy = make_policy(model, seed=2)
    first = on_the_gpu(make_policy(model, seed=1), driver)
    export = exporter_of(driver).export(first)

    def stream(name, keeps):
        bucket.clear()
        do(server, prepare(name, pushed(policy), keeps=keeps))
        do(server, messages.RefitStep(step="begin", refit=name))
        do(server, push(name, policy, bucket))
        do(server, messages.RefitStep(step="finish", refit=name))

    stream("0", ())
    do(server, prepare("a", mapped(export), keeps=("tensors", "buckets")))
    do(server, written("a"))
    if then == "files":
        do(server, prepare("b", files(policy, tmp_path), keeps=keeps))
        do(server, written("b"))
    else:
        stream("b", keeps)
    assert ("close_ipc 1" in driver.events) == ("tensors" not in keeps)
    assert (bucket.segment.id in server.orders.streams._importer.mapped) == (then == "pushed" or "buckets" in keeps)
    assert_holds(model, policy)
    if "tensors" in keeps:
        do(server, prepare("c", messages.MappedTensors(digest=export.digest), keeps=("tensors", "buckets")))
        do(server, written("c"))
        assert_holds(model, first)
        assert driver.events.count("open_ipc") == 1
    do(server, messages.Do(step="close"))
    assert "close_ipc 1" in driver.events
    assert not server.orders.streams._importer.mapped


def test_memory_that_cannot_be_mapped_leaves_the_engine_as_it_was(server, model, driver):
    export = exporter_of(driver).export(on_the_gpu(make_policy(model, seed=1), driver))
    driver.fails = "CUDA_ERROR_INVALID_VALUE"
    before = live_bytes(model)
    refused(server, prepare("a", mapped(export)), TransportError, "is gone: start the trainer again")
    assert live_bytes(model) == before
    driver.fails = None
    write(server, "b", mapped(export))


def test_nothing_grows_over_twenty_refits(server, model, bucket):
    policy, held = make_policy(model, seed=1), []
    for number in range(1, 21):
        do(server, prepare(f"{number}", pushed(policy), bucket_bytes=1 << 20))
        do(server, messages.RefitStep(step="begin", refit=f"{number}"))
        do(server, push(f"{number}", policy, bucket))
        assert do(server, messages.RefitStep(step="finish", refit=f"{number}")).version == number
        if number in (2, 20):
            held.append((mapped_segments(), len(os.listdir("/proc/self/fd"))))
    (segments, num_descriptors), (segments_later, num_descriptors_later) = held
    assert not segments_later - segments
    # Threads of earlier tests may still let go of some.
    assert num_descriptors_later <= num_descriptors


def test_requests_hold_no_tensor_and_nothing_but_json():
    request = Request(
        id="1", order=prepare("a", messages.Files(path="/x", stamps=()), validate="strict", timeout_s=3.0)
    )
    assert json.loads(request.encode())["order"]["job"]["config"]["validate"] == "strict"
