"""The order of a refit, who may call it when, and what it leaves behind."""

import asyncio
import copy
import gc
import json
import logging
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from unittest.mock import Mock

import pytest
import torch

from fp8refit import (
    CacheFlushError,
    CalibrationError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    InvalidCalibrationError,
    InvalidSourceError,
    KvConfig,
    NonFiniteError,
    RefitConfig,
    RefitReport,
    Refitter,
    UnsupportedEngineError,
    refit,
)
from fp8refit.driver.attach import Turn
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.errors import WRITTEN_IN_PART
from fp8refit.kernels.reference_table import ReferenceTable
from fp8refit.report import RankReport
from tests.fake_kv import K_SCALE, V_SCALE, FakeKvCache
from tests.fakes import FakeEngine, FakeEntryPoint, FakeModel, assert_holds, live_bytes, make_policy, unchanged

NORM = "model.layers.0.input_layernorm.weight"
GOOD = ["check_ready", "prepare", "pause", "flush", "write", "version 1", "resume"]


def policy_with_nan(model: FakeModel) -> dict[str, torch.Tensor]:
    policy = make_policy(model, seed=5)
    policy[NORM][3] = float("nan")
    return policy


def assert_dirty_until_refitted(refitter: Refitter, model: FakeModel, reason: str) -> None:
    assert refitter.is_dirty
    assert reason in model.blocked
    policy = make_policy(model, seed=9)
    refitter.refit(policy)
    assert not refitter.is_dirty and model.blocked is None
    assert_holds(model, policy)


def test_the_steps_of_a_refit_come_in_this_order(model):
    refitter = Refitter(model)
    policy = make_policy(model, seed=1)
    refitter.refit(policy)
    assert model.events == GOOD
    assert_holds(model, policy)


def test_a_compiler_that_fails_leaves_the_engine_as_it_was(model, monkeypatch):
    """It has no room on its disk, or is not there."""
    refitter = Refitter(model)
    refitter.refit(make_policy(model, seed=1))
    with unchanged(model), monkeypatch.context() as patched, pytest.raises(OSError, match="No space left on device"):
        patched.setattr(ReferenceTable, "compile", Mock(side_effect=OSError("No space left on device")))
        refitter.refit(make_policy(model, seed=2))
    assert not refitter.is_dirty and model.blocked is None
    refitter.refit(policy := make_policy(model, seed=3))
    assert_holds(model, policy)


def test_requests_are_refused_while_weights_are_written(model):
    blocked = []
    model.on_refresh = lambda: blocked.append(model.blocked)
    Refitter(model).refit(make_policy(model, seed=1))
    assert blocked == ["a refit is under way"]
    assert model.blocked is None


def test_a_busy_engine_is_left_alone(model):
    refitter = Refitter(model)
    model.is_busy = True
    with unchanged(model), pytest.raises(EngineBusyError, match="unfinished"):
        refitter.refit(make_policy(model, seed=1))
    assert model.events == ["check_ready", "prepare"]


def test_a_source_that_does_not_fit_leaves_the_engine_serving(model):
    refitter = Refitter(model)
    with unchanged(model), pytest.raises(InvalidSourceError):
        refitter.refit({})
    assert model.events == ["check_ready", "prepare"]
    assert not refitter.is_dirty


def test_a_caller_s_mistake_is_a_value_error(model):
    with pytest.raises(ValueError, match="missing"):
        Refitter(model).refit({})


def test_a_bad_value_leaves_the_engine_refusing_requests(model):
    refitter = Refitter(model)
    with pytest.raises(NonFiniteError, match=r'refit\. With validate="strict", .* is checked before anything'):
        refitter.refit(policy_with_nan(model))
    assert model.events == ["check_ready", "prepare", "pause", "flush", "write", "refuse"]
    assert refitter.version == 0
    assert_dirty_until_refitted(refitter, model, "the last refit failed part way (NonFiniteError")


def test_a_failing_flush_leaves_the_engine_serving_the_old_policy(model):
    refitter, policy = Refitter(model), make_policy(model, seed=1)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    model.flush_fails = True
    with unchanged(model), pytest.raises(CacheFlushError):
        refitter.refit(policy)
    assert model.events == ["check_ready", "prepare", "pause", "flush", "write", "resume"]
    assert (refitter.version, refitter.is_dirty) == (0, False)
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    model.flush_fails = False
    refitter.refit(make_policy(model, seed=2))
    assert refitter.version == 1
    assert_holds(model, make_policy(model, seed=2))


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("step", ["check_ready", "flush_caches"])
def test_whatever_stops_the_engine_s_side_before_the_write_leaves_it_serving(step, error, model, monkeypatch):
    async def fail(self):
        raise error

    refitter = Refitter(model)
    monkeypatch.setattr(FakeEngine, step, fail)
    with unchanged(model), pytest.raises(type(error)) as caught:
        refitter.refit(make_policy(model, seed=1))
    assert caught.value is error
    assert (refitter.version, refitter.is_dirty) == (0, False)
    monkeypatch.undo()
    assert model._fp8refit_engine.engine.ranks._prepared is None


def test_a_failing_flush_does_not_open_a_dirty_engine(model):
    refitter = Refitter(model)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    before = live_bytes(model)
    model.flush_fails = True
    with pytest.raises(CacheFlushError):
        refitter.refit(make_policy(model, seed=1))
    assert live_bytes(model) == before
    model.flush_fails = False
    assert_dirty_until_refitted(refitter, model, "CacheFlushError")


def test_an_interrupt_leaves_the_engine_refusing_requests(model):
    refitter = Refitter(model)

    def gather():
        yield from list(make_policy(model, seed=1).items())[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refitter.refit(gather())
    assert_dirty_until_refitted(refitter, model, "KeyboardInterrupt")


def test_a_refused_source_does_not_open_a_dirty_engine(model):
    refitter = Refitter(model)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    with unchanged(model), pytest.raises(InvalidSourceError):
        refitter.refit({})
    assert_dirty_until_refitted(refitter, model, "NonFiniteError")


def test_strict_leaves_the_engine_serving(model):
    refitter = Refitter(model, validate="strict")
    with unchanged(model), pytest.raises(NonFiniteError, match=r"Nothing was written\.$"):
        refitter.refit(policy_with_nan(model))
    assert not refitter.is_dirty


def test_one_refit_at_a_time(model):
    refitter, policy = Refitter(model), make_policy(model, seed=1)
    reached, proceed = threading.Event(), threading.Event()

    def gather():
        for name, tensor in policy.items():
            reached.set()
            assert proceed.wait(60)
            yield name, tensor

    thread = threading.Thread(target=refitter.refit, args=(gather(),))
    thread.start()
    try:
        assert reached.wait(60)
        with pytest.raises(EngineBusyError, match="another refit"):
            Refitter(model).refit(make_policy(model, seed=2))
        with pytest.raises(EngineBusyError, match="under way"):
            refitter.close()
    finally:
        proceed.set()
        thread.join(60)
    assert (refitter.version, refitter.is_dirty) == (1, False)
    assert_holds(model, policy)


def test_a_failed_refit_does_not_keep_the_next_one_out(model):
    refitter = Refitter(model)
    for _ in range(2):
        with pytest.raises(InvalidSourceError):
            refitter.refit({})


def test_versions_are_counted_per_engine(model):
    assert Refitter(model).version == 0
    for version in (1, 2):
        assert Refitter(model).refit(make_policy(model, seed=version)).version == version
    assert Refitter(model).version == 2


def test_the_one_line_form_keeps_the_plan(model):
    first, second = (refit(model, make_policy(model, seed=seed)) for seed in (1, 2))
    assert (first.version, first.is_first) == (1, True)
    assert (second.version, second.is_first) == (2, False)
    assert model.num_inventories == 1
    assert_holds(model, make_policy(model, seed=2))


def test_the_one_line_form_takes_options_and_a_manifest(model):
    policy = make_policy(model, seed=1, dtype=torch.float32)
    manifest = {name: (tensor.shape, tensor.dtype) for name, tensor in policy.items()}
    refit(model, iter(policy.items()), manifest=manifest, fp32_sources="exact")
    exact = live_bytes(model)
    refit(model, policy)
    assert live_bytes(model) != exact
    assert_holds(model, policy)


def test_the_report_says_what_was_done(model):
    policy = make_policy(model, seed=1)
    report = Refitter(model).refit({**policy, "lm_head.weight": policy["model.embed_tokens.weight"]})
    assert report.engine == "fake"
    assert report.num_tensors == len(policy)
    assert report.ignored == ("lm_head.weight",)
    assert report.bytes_read == sum(2 * slot.weight.numel() for slot in model.slots())
    assert report.bytes_written == sum(
        tensor.numel() * tensor.element_size()
        for slot in model.slots()
        for tensor in (slot.weight, slot.scale)
        if tensor is not None
    )
    assert list(report.phases_s) == ["plan", "pause", "flush", "transfer", "fill", "verify", "resume"]
    assert report.total_s == sum(report.phases_s.values()) > 0
    assert report.fill_device_s is None
    assert json.loads(report.model_dump_json())["version"] == 1
    for word in ("version", "plan", "fill", "flush", "total"):
        assert word in str(report)


def test_one_line_is_logged_for_a_refit(model, caplog):
    with caplog.at_level(logging.INFO, logger="fp8refit"):
        Refitter(model).refit(make_policy(model, seed=1))
    (record,) = caplog.records
    assert "refit fake to version 1: 9 tensors" in record.getMessage()


def test_layout_is_the_engine_s(model):
    assert [slot.name for slot in Refitter(model).layout().slots] == [slot.name for slot in model.slots()]


def test_closing_drops_the_plan_and_keeps_version_and_state(model):
    other = Refitter(model)
    with Refitter(model) as refitter:
        refitter.refit(make_policy(model, seed=1))
    assert Refitter(model).version == 1
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    assert model.num_inventories == 2
    assert Refitter(model).is_dirty and other.is_dirty
    assert_dirty_until_refitted(Refitter(model), model, "failed part way")


def test_closing_a_dirty_engine_keeps_it_dirty(model):
    with pytest.raises(NonFiniteError), Refitter(model) as refitter:
        refitter.refit(policy_with_nan(model))
    assert Refitter(model).is_dirty
    assert_dirty_until_refitted(Refitter(model), model, "NonFiniteError")


def close_with(context, model, error: Exception | None) -> None:
    """Leave `Refitter`'s context, with an error or without."""
    if context == "with":
        with Refitter(model):
            if error is not None:
                raise error
        return

    async def steps():
        async with Refitter(model):
            if error is not None:
                raise error

    asyncio.run(steps())


@pytest.mark.parametrize("context", ["with", "async with"])
def test_leaving_the_context_closes_the_engine_and_hides_no_error(context, model, monkeypatch):
    closed = []

    async def fail(self):
        closed.append(self)
        raise EngineLostError("the engine core died")

    Refitter(model).refit(make_policy(model, seed=1))
    close_with(context, model, None)
    Refitter(model).refit(make_policy(model, seed=1))
    assert model.num_inventories == 2
    error = ConnectionError("the trainer went away")
    with pytest.raises(ConnectionError) as caught:
        close_with(context, model, error)
    assert caught.value is error
    monkeypatch.setattr(LocalRanks, "close", fail)
    with pytest.raises(ConnectionError) as caught:
        close_with(context, model, error)
    assert caught.value is error
    with pytest.raises(EngineLostError, match="core died"):
        close_with(context, model, None)
    assert len(closed) == 2


def test_an_unknown_engine_is_refused(model):
    with pytest.raises(UnsupportedEngineError, match=r"builtins\.dict is not an engine .* \(fake\)"):
        Refitter({})


def test_options_are_checked(model):
    with pytest.raises(ValueError, match="not both"):
        Refitter(model, RefitConfig(), validate="off")
    with pytest.raises(ValueError, match="validate"):
        Refitter(model, validate="sometimes")
    with pytest.raises(ValueError, match="buckets"):
        Refitter(model, buckets=3)
    with pytest.raises(ValueError, match="bucket_bytes"):
        Refitter(model, bucket_bytes=1000)
    with pytest.raises(TypeError, match="config is of type dict; pass a RefitConfig"):
        Refitter(model, {"validate": "off"})


def test_a_copy_of_an_attached_engine_is_an_engine_of_its_own(model):
    policy = make_policy(model, seed=1)
    Refitter(model).refit(policy)
    attached = model._fp8refit_engine
    assert copy.deepcopy(attached) is None
    assert pickle.loads(pickle.dumps(attached)) is None
    assert Refitter(model).version == 1


def test_servers_adapters_need_neither_an_engine_nor_transformers():
    code = """
import sys
for name in ("sglang", "transformers", "vllm"):
    sys.modules[name] = None  # as if it were not installed
from fp8refit.driver.adapters import find_adapters

adapters, broken = find_adapters()
print(*(name for name in sorted(adapters) if hasattr(adapters[name], "server")), *broken, sep="; ")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("sglang; vllm; the adapter transformers cannot be imported: ")


def test_an_adapter_that_cannot_be_imported_stands_in_nobody_s_way(model, monkeypatch):
    class Broken:
        name = "broken"

        def load(self):
            raise ImportError("No module named 'flux'")

    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [Broken(), FakeEntryPoint()])
    Refitter(model).refit(make_policy(model, seed=1))
    with pytest.raises(UnsupportedEngineError, match=r"adapter broken cannot be imported: No module named 'flux'"):
        Refitter({})


def test_an_engine_that_cannot_be_paused_serves_on_and_lets_go_of_the_source(model, monkeypatch):
    async def busy(self, config):
        raise EngineBusyError("2 requests did not finish within 300 s; they go on")

    refitter, policy = Refitter(model), make_policy(model, seed=1)
    kept = [weakref.ref(tensor) for tensor in policy.values()]
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "pause", busy)
        with unchanged(model), pytest.raises(EngineBusyError, match="did not finish"):
            refitter.refit(policy)
    assert not refitter.is_dirty
    del policy
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    refitter.refit(make_policy(model, seed=2))
    assert_holds(model, make_policy(model, seed=2))


def test_an_interrupt_in_the_pause_lets_go_of_what_was_prepared(model, monkeypatch):
    async def interrupted(self, config):
        raise KeyboardInterrupt

    refitter = Refitter(model)
    monkeypatch.setattr(FakeEngine, "pause", interrupted)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        refitter.refit(make_policy(model, seed=1))
    assert model._fp8refit_engine.engine.ranks._prepared is None


def test_a_lost_engine_refuses_requests_for_good(model):
    def fault():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    refitter = Refitter(model)
    model.on_refresh = fault
    with pytest.raises(EngineLostError):
        refitter.refit(make_policy(model, seed=1))
    assert model.blocked.startswith("the engine is lost (EngineLostError: a CUDA fault ended a refit")
    model.on_refresh = lambda: None
    for _ in range(2):
        with unchanged(model), pytest.raises(EngineLostError, match="illegal memory access"):
            refitter.refit(make_policy(model, seed=1))
    assert refitter.is_dirty


def test_an_engine_that_is_lost_before_a_byte_is_written_refuses_requests_too(model):
    refitter = Refitter(model)
    model._fp8refit_engine.engine.ranks.rank.target.live.lost_because = "rank 1 died; restart the engine"
    with pytest.raises(EngineLostError, match="rank 1 died"):
        refitter.refit(make_policy(model, seed=1))
    assert model.blocked == "the engine is lost (EngineLostError: rank 1 died; restart the engine)"


@pytest.mark.parametrize("step", ["publish_version", "resume"])
@pytest.mark.parametrize("error", [RuntimeError("no such route"), KeyboardInterrupt()], ids=repr)
def test_an_engine_that_does_not_go_on_says_that_its_weights_are_whole(error, step, model, monkeypatch):
    async def fail(self, *arguments):
        raise error

    refitter, policy = Refitter(model), make_policy(model, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, step, fail)
        with pytest.raises(type(error)) as caught:
            refitter.refit(policy)
    assert caught.value is error
    assert (refitter.version, refitter.is_dirty) == (1, False)
    blocked = f"version 1 is in place, but the engine did not resume ({type(error).__name__}: {error}); refit again"
    assert model.blocked == blocked
    assert_holds(model, policy)
    with unchanged(model), pytest.raises(InvalidSourceError):
        refitter.refit({})
    assert model.blocked == blocked
    assert refitter.refit(make_policy(model, seed=2)).version == 2
    assert model.blocked is None
    assert_holds(model, make_policy(model, seed=2))


def test_requests_that_were_interrupted_are_counted(model, monkeypatch):
    async def pause(self, config):
        return 3

    assert Refitter(model).refit(make_policy(model, seed=1)).num_interrupted == 0
    monkeypatch.setattr(FakeEngine, "pause", pause)
    assert Refitter(model).refit(make_policy(model, seed=1)).num_interrupted == 3


# Asynchronous engines.


class AsyncEngine(FakeEngine):
    """Suspends in every step."""

    is_asynchronous = True

    async def check_ready(self):
        await asyncio.sleep(0)
        await super().check_ready()

    async def pause(self, config):
        await asyncio.sleep(0)
        return await super().pause(config)

    async def resume(self):
        await asyncio.sleep(0)
        await super().resume()

    async def refuse(self, reason):
        await asyncio.sleep(0)
        await super().refuse(reason)

    async def flush_caches(self):
        await asyncio.sleep(0)
        await super().flush_caches()


@pytest.fixture
def async_model(model, monkeypatch):
    class AsyncEntryPoint(FakeEntryPoint):
        def load(self):
            return AsyncEngine

    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [AsyncEntryPoint()])
    return model


@pytest.mark.parametrize("step", ["check_ready", "pause", "flush_caches", "publish_version", "resume"])
def test_a_synchronous_engine_that_suspends_is_told_and_left_closed(step, model, monkeypatch):
    original, ended = getattr(FakeEngine, step), []

    async def suspend(self, *arguments):
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(step)
        return await original(self, *arguments)

    refitter, before = Refitter(model), live_bytes(model)
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("error")  # a coroutine that was never awaited, or that was closed in vain
        patch.setattr(FakeEngine, step, suspend)
        with pytest.raises(AssertionError, match="fake is synchronous, and suspended"):
            refitter.refit(make_policy(model, seed=1))
        gc.collect()
    assert ended == [step]
    is_written = step in ("publish_version", "resume")
    assert (refitter.version, refitter.is_dirty) == (int(is_written), False)
    assert (live_bytes(model) == before) == (model.blocked is None) == (not is_written)
    assert model._fp8refit_engine.engine.ranks._prepared is None
    refitter.refit(make_policy(model, seed=2))
    assert model.blocked is None
    assert_holds(model, make_policy(model, seed=2))


def test_a_synchronous_engine_may_be_awaited_too(model):
    policy = make_policy(model, seed=1)
    report = asyncio.run(Refitter(model).refit_async(policy))
    assert (report.version, model.events) == (1, GOOD)
    assert_holds(model, policy)


def test_an_asynchronous_engine_is_awaited(async_model):
    async def refit_twice():
        async with Refitter(async_model) as refitter:
            for seed in (1, 2):
                report = await refitter.refit_async(make_policy(async_model, seed=seed))
            return report, await refitter.layout_async()

    report, layout = asyncio.run(refit_twice())
    assert report.version == 2
    assert [slot.name for slot in layout.slots] == [slot.name for slot in async_model.slots()]
    assert async_model.events == [*GOOD, *GOOD[:-2], "version 2", "resume"]
    assert_holds(async_model, make_policy(async_model, seed=2))


@pytest.mark.parametrize("call", ["refit", "layout", "close"])
def test_an_asynchronous_engine_is_not_refitted_without_its_event_loop(call, async_model):
    refitter = Refitter(async_model)
    arguments = [make_policy(async_model, seed=1)] if call == "refit" else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a coroutine that was never awaited
        with (
            unchanged(async_model),
            pytest.raises(UnsupportedEngineError, match=f"is asynchronous; call .*{call}_async"),
        ):
            getattr(refitter, call)(*arguments)
        gc.collect()
    assert async_model.events == []
    asyncio.run(refitter.refit_async(make_policy(async_model, seed=1)))


def test_one_refit_at_a_time_in_one_event_loop(async_model):
    async def refit_at_once():
        refitter, policy = Refitter(async_model), make_policy(async_model, seed=1)
        outcomes = await asyncio.gather(
            refitter.refit_async(policy), refitter.refit_async(policy), refitter.close_async(), return_exceptions=True
        )
        return [type(outcome) for outcome in outcomes]

    assert asyncio.run(refit_at_once()) == [RefitReport, EngineBusyError, EngineBusyError]


@pytest.mark.parametrize("num_steps", range(5))
def test_a_refit_that_is_cancelled_anywhere_is_whole_or_refuses(num_steps, async_model):
    refitter = Refitter(async_model)
    before = live_bytes(async_model)

    async def cancel():
        task = asyncio.create_task(refitter.refit_async(make_policy(async_model, seed=1)))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert (async_model.blocked, refitter.is_dirty) == (None, False), "nothing is written in part here"
    if refitter.version == 0:
        assert live_bytes(async_model) == before
    else:
        assert_holds(async_model, make_policy(async_model, seed=1))
        assert "version 1" in async_model.events
    policy = make_policy(async_model, seed=2)
    asyncio.run(refitter.refit_async(policy))
    assert (refitter.is_dirty, async_model.blocked) == (False, None)
    assert_holds(async_model, policy)


# KV scales.


BATCH = [[1, 2, 3], [4, 5]]
BOOTED, SEEN = {K_SCALE: 1.0, V_SCALE: 1.0}, {K_SCALE: 2.0, V_SCALE: 2.0}
KV = KvConfig(margin=1.0)
"""A scale is the largest value over 448."""
CALIBRATED = ["check_ready", "pause", "flush", "calibrate", "resume"]


@pytest.fixture
def cache(model) -> FakeKvCache:
    model.kv = FakeKvCache(largest=896.0)
    return model.kv


def test_the_steps_of_a_calibration_come_in_this_order(model, cache):
    blocked = []
    cache.on_pass = lambda: blocked.append((model.blocked, model.events[-1]))
    before = live_bytes(model)
    report = Refitter(model, kv=KV).calibrate(BATCH)
    assert model.events == CALIBRATED
    assert blocked == [("a refit is under way", "calibrate")], "flushed, and no request runs"
    assert report.scales == cache.held == SEEN
    assert (model.blocked, Refitter(model).version, live_bytes(model)) == (None, 0, before)


def test_scales_are_measured_when_the_new_policy_is_whole(model, cache):
    policy, held = make_policy(model, seed=1), []
    cache.on_pass = lambda: held.append((live_bytes(model), model.blocked))
    report = Refitter(model, kv=KV).refit(policy, calibration=BATCH)
    assert model.events == GOOD
    assert held == [(live_bytes(model), "a refit is under way")]
    assert_holds(model, policy)
    assert report.kv.scales == cache.held == SEEN
    assert list(report.phases_s) == ["plan", "pause", "flush", "transfer", "fill", "verify", "kv", "resume"]
    assert f"scales   {'2 KV':>14}" in str(report)
    assert Refitter(model).refit(policy).kv is None
    assert cache.held == SEEN


def test_prompts_are_tokenized_by_the_engine_before_anything_else(model, cache):
    Refitter(model, kv=KV).calibrate("abc")
    assert model.events == ["tokenize", *CALIBRATED]
    assert cache.batches == [[[97, 98, 99]]]
    assert cache.held == SEEN


def test_a_dirty_engine_is_not_even_paused_for_a_calibration(model, cache):
    refitter = Refitter(model, kv=KV)
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    model.events.clear()
    blocked = model.blocked
    with pytest.raises(EngineDirtyError, match="weights are incomplete; refit it before calibrating"):
        refitter.calibrate(BATCH)
    assert (model.events, model.blocked, cache.held) == ([], blocked, BOOTED)
    assert_dirty_until_refitted(refitter, model, "NonFiniteError")
    assert refitter.calibrate(BATCH).scales == SEEN


@pytest.mark.parametrize("state", ["is_busy", "flush_fails"])
def test_an_engine_that_cannot_be_calibrated_now_serves_on_under_its_old_scales(state, model, cache):
    refitter = Refitter(model, kv=KV)
    setattr(model, state, True)
    with unchanged(model), pytest.raises((EngineBusyError, CacheFlushError)):
        refitter.calibrate(BATCH)
    assert (cache.held, cache.batches, refitter.is_dirty) == (BOOTED, [], False)
    setattr(model, state, False)
    assert refitter.calibrate(BATCH).scales == cache.held == SEEN


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("step", ["check_ready", "pause", "flush_caches", "pass", "resume"])
def test_whatever_stops_a_calibration_nothing_stays_paused(step, error, model, cache, monkeypatch):
    def fail_now():
        raise error

    async def fail(self, *_):
        raise error

    refitter = Refitter(model, kv=KV)
    with monkeypatch.context() as patch, pytest.raises(type(error)) as caught:
        if step == "pass":
            patch.setattr(cache, "on_pass", fail_now)
        else:
            patch.setattr(FakeEngine, step, fail)
        refitter.calibrate(BATCH)
    assert caught.value is error
    assert not refitter.is_dirty
    if step == "resume":
        assert "is in place, but the engine did not resume" in model.blocked
        assert cache.held == SEEN
        refitter.refit(make_policy(model, seed=1))
    else:
        assert cache.held == BOOTED
    assert model.blocked is None
    assert refitter.calibrate(BATCH).scales == cache.held == SEEN


def test_a_calibration_that_sees_nan_leaves_the_engine_serving_and_a_refit_with_it_does_not(model, cache):
    refitter = Refitter(model, kv=KV)
    cache.largest[V_SCALE] = float("nan")
    with unchanged(model), pytest.raises(CalibrationError, match=V_SCALE):
        refitter.calibrate(BATCH)
    with pytest.raises(CalibrationError, match=V_SCALE):
        refitter.refit(make_policy(model, seed=1), calibration=BATCH)
    assert cache.held == BOOTED
    assert model.events[-1] == "refuse"
    assert_dirty_until_refitted(refitter, model, "the last refit failed part way (CalibrationError")


def test_an_error_of_the_trainer_in_a_stream_says_that_the_engine_is_dirty(model):
    def broken():
        yield from list(make_policy(model, seed=1).items())[:2]
        raise ConnectionError("the trainer is gone")

    refitter = Refitter(model)
    with pytest.raises(ConnectionError) as caught:
        refitter.refit(broken())
    assert caught.value.__notes__ == [f"fp8refit: {WRITTEN_IN_PART}"]
    assert_dirty_until_refitted(refitter, model, "the trainer is gone")


@pytest.mark.parametrize("text", ["Qwen/Qwen3-8B", "localhost:8000", "ftp://localhost"])
def test_a_text_that_is_no_url_is_told(text):
    with pytest.raises(UnsupportedEngineError, match="is no URL of a server; pass one like"):
        Refitter(text)


def test_scales_written_in_part_are_refused_until_the_next_refit(model, cache, monkeypatch):
    def fail():
        raise RuntimeError("boom")

    monkeypatch.setattr(cache, "_count_write", fail)
    refitter = Refitter(model, kv=KV)
    with pytest.raises(RuntimeError, match="boom"):
        refitter.calibrate(BATCH)
    monkeypatch.undo()
    monkeypatch.setattr("fp8refit.driver.adapters.entry_points", lambda group: [FakeEntryPoint()])
    assert cache.held == SEEN
    assert_dirty_until_refitted(refitter, model, "RuntimeError: boom")
    assert cache.held == BOOTED, "a refit without scales goes back to the last whole set"


def test_torn_scales_outlive_a_closed_refitter_and_give_way_to_new_ones(model, cache, monkeypatch):
    refitter = Refitter(model, kv=KV)
    refitter.refit(make_policy(model, seed=1), kv_scales={K_SCALE: 0.5, V_SCALE: 0.25})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(cache, "_count_write", lambda: 1 / 0)
        refitter.calibrate(BATCH)
    refitter.close()
    refitter.refit(make_policy(model, seed=2), kv_scales={K_SCALE: 4.0})
    assert cache.held == {K_SCALE: 4.0, V_SCALE: 0.25}
    refitter.refit(make_policy(model, seed=1))
    assert cache.held == {K_SCALE: 4.0, V_SCALE: 0.25}


def test_a_batch_that_does_not_fit_stops_no_request(model, cache):
    refitter = Refitter(model, kv=KV)
    for batch, match in (([[100]], "outside the vocabulary"), ([], "holds no sequence"), (None, "no batch")):
        model.events.clear()
        with pytest.raises(InvalidCalibrationError, match=match):
            refitter.calibrate(batch)
        assert set(model.events) <= {"check_ready"}
    assert cache.held == BOOTED


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"calibration": [[100]]}, "token id 100 is outside the vocabulary of 100"),
        ({"calibration": [[1] * 17]}, "a sequence has 17 tokens, but the engine takes at most 16"),
        ({"calibration": []}, "holds no sequence"),
        ({"kv_scales": {K_SCALE: 0.0}}, "finite and positive"),
        ({"kv_scales": {"x.k_scale": 1.0}}, "no x.k_scale"),
        ({"kv_scales": {K_SCALE: 1.0}, "calibration": BATCH}, "not both"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_engine_is_paused(arguments, match, model, cache):
    refitter = Refitter(model)
    with unchanged(model), pytest.raises(InvalidCalibrationError, match=match):
        refitter.refit(make_policy(model, seed=1), **arguments)
    assert not {"pause", "write"} & set(model.events)
    assert (cache.held, cache.batches) == (BOOTED, [])


def test_an_engine_without_a_kv_cache_that_is_known_is_refused(model):
    refitter = Refitter(model)
    for attempt in (
        lambda: refitter.calibrate(BATCH),
        lambda: refitter.refit(make_policy(model, seed=1), calibration=BATCH),
    ):
        with unchanged(model), pytest.raises(UnsupportedEngineError, match="fp8refit knows no KV cache of fake"):
            attempt()


def test_a_calibration_and_a_refit_wait_for_nobody(model, cache):
    reached, proceed = threading.Event(), threading.Event()

    def wait():
        reached.set()
        assert proceed.wait(60)

    cache.on_pass = wait
    thread = threading.Thread(target=Refitter(model, kv=KV).calibrate, args=(BATCH,))
    thread.start()
    try:
        assert reached.wait(60)
        for attempt in (lambda: Refitter(model).calibrate(BATCH), lambda: Refitter(model).refit({})):
            with pytest.raises(EngineBusyError, match="another refit"):
                attempt()
    finally:
        proceed.set()
        thread.join(60)
    assert cache.held == SEEN


def test_a_lost_engine_is_not_calibrated_and_refuses(model, cache):
    refitter = Refitter(model)
    model._fp8refit_engine.engine.ranks.rank.target.live.lost_because = "rank 1 died; restart the engine"
    with pytest.raises(EngineLostError, match="rank 1 died"):
        refitter.calibrate(BATCH)
    assert "the engine is lost" in model.blocked


def test_a_fault_of_the_device_in_a_pass_loses_the_engine(model, cache):
    def fault():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    refitter, cache.on_pass = Refitter(model), fault
    with pytest.raises(EngineLostError, match="illegal memory access"):
        refitter.calibrate(BATCH)
    assert "the engine is lost" in model.blocked
    with pytest.raises(EngineLostError):
        refitter.refit(make_policy(model, seed=1))


def test_one_line_is_logged_for_a_calibration(model, cache, caplog):
    with caplog.at_level(logging.INFO, logger="fp8refit"):
        Refitter(model).calibrate(BATCH)
    (record,) = caplog.records
    assert "2 KV scales from 5 tokens" in record.getMessage()


def test_an_asynchronous_engine_is_calibrated_in_its_event_loop(async_model):
    async_model.kv = FakeKvCache(largest=896.0)
    refitter = Refitter(async_model, kv=KV)
    with pytest.raises(UnsupportedEngineError, match=r"is asynchronous; call .*calibrate_async"):
        refitter.calibrate(BATCH)
    assert async_model.events == []
    assert asyncio.run(refitter.calibrate_async(BATCH)).scales == async_model.kv.held == SEEN
    assert async_model.events == CALIBRATED


@pytest.mark.parametrize("num_steps", range(5))
def test_a_calibration_that_is_cancelled_anywhere_is_whole_or_changes_nothing(num_steps, async_model):
    async_model.kv = FakeKvCache(largest=896.0)
    refitter = Refitter(async_model, kv=KV)

    async def cancel():
        task = asyncio.create_task(refitter.calibrate_async(BATCH))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not refitter.is_dirty
    if num_steps < 4:
        assert (async_model.blocked, async_model.kv.held) == (None, BOOTED)
    asyncio.run(refitter.refit_async(make_policy(async_model, seed=2), calibration=BATCH))
    assert (async_model.blocked, async_model.kv.held) == (None, SEEN)


# Reports.


def rank_report(**fields) -> RankReport:
    return RankReport(
        **({"num_tensors": 4, "bytes_read": 10, "bytes_written": 5, "fill_s": 1.0, "verify_s": 0.5} | fields)
    )


def report_of(*ranks: RankReport) -> RefitReport:
    return RefitReport.of(ranks, version=3, engine="fake", phases_s={"fill": 2.0})


def test_bytes_of_ranks_are_summed_and_times_are_the_slowest_rank_s():
    first = rank_report(fill_device_s=0.5, extra_bytes=7)
    second = rank_report(fill_device_s=0.25, extra_bytes=9, bytes_read=20, is_first=True)
    report = report_of(first, second)
    assert (report.bytes_read, report.bytes_written, report.extra_bytes) == (30, 10, 9)
    assert (report.fill_device_s, report.is_first) == (0.5, True)
    assert report.ranks == (first, second)
    assert report.gb_per_s == 40 / 0.5 / 1e9
    assert RefitReport.model_validate_json(report.model_dump_json(exclude={"total_s", "gb_per_s"})) == report
    assert "ranks                 2" in str(report)


def test_a_report_of_one_rank_is_that_rank_s():
    report = report_of(rank_report(ignored=("a",)))
    assert (report.num_tensors, report.ignored, report.fill_device_s) == (4, ("a",), None)
    assert "ranks" not in str(report)


def test_what_no_rank_holds_is_ignored_and_the_rest_is_counted_once():
    report = report_of(
        rank_report(num_tensors=2, ignored=("x", "b")), rank_report(num_tensors=1, ignored=("a", "c", "x"))
    )
    assert (report.num_tensors, report.ignored) == (3, ("x",))


def test_nobody_waits_for_an_engine_that_does_not_go_on_after_a_refit_that_wrote_nothing(model, monkeypatch):
    refitter = Refitter(model)
    model.flush_fails = True

    async def resume(engine):
        raise RuntimeError("the scheduler is gone")

    monkeypatch.setattr(FakeEngine, "resume", resume)
    with pytest.raises(RuntimeError, match="the scheduler is gone"):
        refitter.refit(make_policy(model, seed=1))
    assert "version 0 is in place, but the engine did not resume (RuntimeError: the scheduler is gone)" in model.blocked
    assert not refitter.is_dirty
    monkeypatch.undo()


# Interrupts.


INTERRUPTS = [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError(), MemoryError()]


def interrupt_once(monkeypatch, owner, name, error, *, after):
    """Let the next call of a coroutine function raise: at once, or when all of it is done."""
    original = getattr(owner, name)

    async def interrupted(*arguments, **keywords):
        monkeypatch.setattr(owner, name, original)
        if after:
            await original(*arguments, **keywords)
        raise error

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["pause", "flush_caches", "publish_version", "resume"])
def test_an_interrupt_at_any_step_of_the_engine_leaves_a_whole_policy_serving(step, after, error, model, monkeypatch):
    refitter = Refitter(model)
    before, policy = live_bytes(model), make_policy(model, seed=1)
    interrupt_once(monkeypatch, FakeEngine, step, error, after=after)
    with pytest.raises(type(error)) as caught:
        refitter.refit(policy)
    assert caught.value is error
    assert (model.blocked, refitter.is_dirty) == (None, False)
    if step in ("publish_version", "resume"):
        assert_holds(model, policy)
        assert refitter.version == 1 and "version 1" in model.events
    else:
        assert live_bytes(model) == before and refitter.version == 0
    refitter.refit(make_policy(model, seed=2))


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_an_interrupt_just_after_the_commit_leaves_the_new_policy_serving(error, model, monkeypatch):
    refitter, policy = Refitter(model), make_policy(model, seed=1)
    interrupt_once(monkeypatch, LocalRanks, "write", error, after=True)
    with pytest.raises(type(error)):
        refitter.refit(policy)
    assert (refitter.version, refitter.is_dirty, model.blocked) == (1, False, None)
    assert model.events[-2:] == ["version 1", "resume"]
    assert_holds(model, policy)


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_an_interrupt_just_after_a_calibration_leaves_its_scales_serving(error, model, cache, monkeypatch):
    refitter = Refitter(model, kv=KV)
    interrupt_once(monkeypatch, LocalRanks, "calibrate", error, after=True)
    with pytest.raises(type(error)):
        refitter.calibrate(BATCH)
    assert (refitter.version, refitter.is_dirty, model.blocked, cache.held) == (0, False, None, SEEN)


@pytest.mark.parametrize("step", ["refuse", "resume"])
def test_an_interrupt_while_a_failed_refit_is_seen_to_leaves_the_engine_serving_or_saying_why_not(
    step, model, monkeypatch
):
    refitter = Refitter(model)
    model.flush_fails = step == "resume"
    interrupt_once(monkeypatch, FakeEngine, step, KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        refitter.refit(policy_with_nan(model))
    model.flush_fails = False
    if step == "refuse":
        assert_dirty_until_refitted(refitter, model, "the last refit failed part way (")
    else:
        assert model.blocked.startswith("version 0 is in place, but the engine did not resume (KeyboardInterrupt")
        assert not refitter.is_dirty
        refitter.refit(make_policy(model, seed=1))
        assert model.blocked is None


def test_a_turn_is_one_holder_s_and_ended_by_nobody_else():
    turn = Turn()
    assert turn.take("first") and turn.take("first") and not turn.take("second")
    turn.end("second")
    assert not turn.take("second")
    turn.end("first")
    turn.end("first")
    assert turn.take("second")


def test_each_report_is_handed_over_once_the_policy_is_served(model):
    seen = []
    refitter = Refitter(model, on_refit=lambda report: seen.append((report, list(model.events), threading.get_ident())))
    reports = [refitter.refit(make_policy(model, seed=seed)) for seed in (1, 2)]
    assert [report for report, _, _ in seen] == reports
    assert seen[0][1] == GOOD and {thread for _, _, thread in seen} == {threading.get_ident()}
    with pytest.raises(NonFiniteError):
        refitter.refit(policy_with_nan(model))
    refitter.refit(make_policy(model, seed=3))
    assert refitter.verify(make_policy(model, seed=3))
    assert [report.version for report, _, _ in seen] == [1, 2, 3]


def test_what_the_hook_raises_reaches_the_caller_and_the_policy_is_served(model):
    def fail(report):
        raise KeyError("step")

    policy = make_policy(model, seed=1)
    refitter = Refitter(model, on_refit=fail)
    with pytest.raises(KeyError, match="step"):
        refitter.refit(policy)
    assert (refitter.version, refitter.is_dirty, model.blocked) == (1, False, None)
    assert_holds(model, policy)
