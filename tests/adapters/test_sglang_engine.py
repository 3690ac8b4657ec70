"""A refit of an SGLang engine from end to end, with fakes instead of SGLang. Real engines: `tests/sglang/`."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fp8refit_sglang import SglangEngine, worker
from fp8refit_sglang import controls as controls_module
from fp8refit_sglang.compat import call_for, num_replicas
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.gate import TokenizerGate
from fp8refit_sglang.live_scheduler import Scheduler
from fp8refit_sglang.worker import FLUSH

from fp8refit import (
    CacheFlushError,
    EngineAsleepError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    NonFiniteError,
    RankFailedError,
    RefitConfig,
    Refitter,
    UnsupportedEngineError,
)
from fp8refit.transport.loopback import Switchboard
from tests.adapters import fake_sglang
from tests.adapters.fake_sglang import (
    Engine,
    HeldWrite,
    HookRegistry,
    PauseGenerationReqInput,
    TokenizerManager,
    TokenizerManager23,
)
from tests.fake_ranks import Q_PROJ


@pytest.fixture(autouse=True)
def sglang(monkeypatch):
    fake_sglang.install(monkeypatch)


def run(engine: Engine, steps):
    """Run steps in the loop that drives the engine."""

    async def in_time():
        async with asyncio.timeout(20):
            return await steps

    return engine.loop.run_until_complete(in_time())


def spoilt(policy):
    """The policy with a NaN, which is found while it is written."""
    return policy | {Q_PROJ: torch.full_like(policy[Q_PROJ], torch.nan)}


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def begin(engine: Engine, rid: str, *, is_long: bool = False) -> asyncio.Task:
    """A request that has come as far as it can."""
    task = asyncio.create_task(engine.async_generate(rid, is_long=is_long))
    for _ in range(10):
        await asyncio.sleep(0)
    return task


def assert_serves(engine: Engine) -> None:
    """Requests run, and nothing is left of a refit."""
    assert engine.hidden() == set()
    assert engine.is_running()
    assert engine.generate("after") == "stop"
    assert engine.tokenizer_manager.rid_to_state == {}


def assert_nothing_written(engine: Engine, error: type[Exception], match: str, **options) -> Refitter:
    """Check that a refit is refused before the first byte, and that the engine serves on."""
    before, refitter = engine.live_bytes(), Refitter(engine, **options)
    with pytest.raises(error, match=match):
        refitter.refit(engine.make_policy(1))
    assert engine.live_bytes() == before
    assert (refitter.version, refitter.is_dirty) == (0, False)
    return refitter


# Policies.


def test_every_rank_holds_the_policy(engine):
    refitter = Refitter(engine)
    for version in (1, 2):
        policy = engine.make_policy(version)
        report = refitter.refit(policy)
        engine.assert_holds(policy)
        assert (report.version, report.engine, len(report.ranks)) == (version, "sglang", len(engine.schedulers))
        assert engine.tokenizer_manager.weight_version == str(version)
        assert [scheduler.events for scheduler in engine.schedulers] == [["flushed"] * version] * len(engine.schedulers)
        assert_serves(engine)
    assert refitter.layout().slots
    refitter.close()


def test_a_refit_within_a_running_loop_is_awaited(solo):
    async def refit():
        with pytest.raises(UnsupportedEngineError, match="call refit_async"):
            Refitter(solo).refit(solo.make_policy(1))

    run(solo, refit())


@pytest.mark.parametrize("manager", [TokenizerManager, TokenizerManager23])
def test_the_version_is_published_as_the_manager_can(manager, make_engine):
    engine = make_engine(2, manager)
    Refitter(engine).refit(engine.make_policy(1))
    assert engine.tokenizer_manager.weight_version == "1"
    told = [event for scheduler in engine.schedulers for event in scheduler.events if event.startswith("version")]
    assert told == (["version 1"] * 2 if manager is TokenizerManager23 else [])


# Requests meanwhile.


def test_requests_wait_for_the_end_of_an_asynchronous_refit(engine):
    async def steps():
        held = HeldWrite(engine)
        refit = asyncio.create_task(Refitter(engine).refit_async(engine.make_policy(1)))
        await held.reached()
        waiting = await begin(engine, "early")
        assert not waiting.done()
        assert engine.tokenizer_manager.rid_to_state == {}
        held.end()
        assert (await refit).version == 1
        assert await waiting == "stop"

    run(engine, steps())
    assert_serves(engine)


def test_a_refit_that_fails_part_way_refuses_every_request_until_the_next_one(engine):
    async def steps():
        refitter, policy = Refitter(engine, in_flight="keep"), engine.make_policy(2)
        running = await begin(engine, "running", is_long=True)
        engine.tokenizer_manager.is_pause = True
        past_the_gate = await begin(engine, "past the gate")
        held = HeldWrite(engine)
        refit = asyncio.create_task(refitter.refit_async(engine.make_policy(1)))
        await held.reached()
        at_the_gate = await begin(engine, "at the gate")
        assert not any(task.done() for task in (running, past_the_gate, at_the_gate))
        held.end(RuntimeError("boom"))
        with pytest.raises(RankFailedError, match="boom"):
            await refit
        for refused in (past_the_gate, at_the_gate, await begin(engine, "new")):
            with pytest.raises(EngineDirtyError, match=r"failed part way \(RankFailedError.*boom"):
                await refused
        assert await running == "abort"
        assert engine.tokenizer_manager.rid_to_state == {}
        assert refitter.is_dirty
        await engine.tokenizer_manager.continue_generation(None)
        assert (await refitter.refit_async(policy)).version == 1
        engine.assert_holds(policy)

    run(engine, steps())
    assert_serves(engine)


def test_a_dirty_engine_that_was_paused_is_paused_when_it_is_healed(solo):
    async def steps():
        refitter = Refitter(solo)
        await solo.tokenizer_manager.pause_generation(PauseGenerationReqInput("retract"))
        with pytest.raises(NonFiniteError):
            await refitter.refit_async(spoilt(solo.make_policy(1)))
        await refitter.refit_async(solo.make_policy(2))
        assert (solo.tokenizer_manager.is_pause, solo.schedulers[0].is_paused) == (True, True)

    run(solo, steps())
    assert solo.hidden() == set()


def test_a_refit_of_a_dirty_engine_that_waits_too_long_leaves_it_refusing(solo):
    async def steps():
        refitter = Refitter(solo, timeout_s=0.05)
        with pytest.raises(NonFiniteError):
            await refitter.refit_async(spoilt(solo.make_policy(1)))
        solo.tokenizer_manager.may_dispatch.clear()
        with pytest.raises(EngineBusyError):
            await refitter.refit_async(solo.make_policy(2))
        solo.tokenizer_manager.may_dispatch.set()
        with pytest.raises(EngineDirtyError, match="failed part way"):
            await solo.async_generate("new")
        await refitter.refit_async(solo.make_policy(3))

    run(solo, steps())
    assert_serves(solo)


def test_a_synchronous_engine_refuses_requests_during_a_refit(solo):
    policy, refused = solo.make_policy(1), []

    def read():
        for name, tensor in policy.items():
            if solo.tokenizer_manager.is_pause and not refused:
                with pytest.raises(EngineDirtyError, match="a refit is under way") as caught:
                    solo.generate("during")
                refused.append(caught.value)
            yield name, tensor

    Refitter(solo).refit(read)
    assert refused
    assert_serves(solo)


def test_a_synchronous_engine_with_unfinished_requests_is_busy(solo):
    task = run(solo, begin(solo, "running", is_long=True))
    assert_nothing_written(solo, EngineBusyError, "a synchronous SGLang engine cannot drain them")
    solo.tokenizer_manager.finish("running")
    assert run(solo, task) == "stop"
    assert Refitter(solo).refit(solo.make_policy(1)).version == 1


def test_requests_that_run_are_waited_for(engine):
    async def steps():
        running = await begin(engine, "running", is_long=True)
        refit = asyncio.create_task(Refitter(engine, in_flight="wait").refit_async(engine.make_policy(1)))
        await until(engine.hidden)
        await asyncio.sleep(0.02)
        assert not engine.tokenizer_manager.is_pause, "it runs on"
        late = await begin(engine, "late")
        engine.tokenizer_manager.finish("running")
        assert (await refit).num_interrupted == 0
        assert (await running, await late) == ("stop", "stop")

    run(engine, steps())
    assert_serves(engine)


def test_requests_that_run_too_long_go_on(solo):
    async def steps():
        before = solo.live_bytes()
        running = await begin(solo, "running", is_long=True)
        with pytest.raises(EngineBusyError, match=r"1 request\(s\) did not finish within 0\.05 s"):
            await Refitter(solo, timeout_s=0.05).refit_async(solo.make_policy(1))
        assert solo.live_bytes() == before
        assert (solo.hidden(), solo.is_running()) == (set(), True)
        assert await solo.async_generate("new") == "stop"
        solo.tokenizer_manager.finish("running")
        assert await running == "stop"

    run(solo, steps())


def test_requests_that_run_are_aborted(engine):
    async def steps():
        running = await begin(engine, "running", is_long=True)
        report = await Refitter(engine, in_flight="abort").refit_async(engine.make_policy(1))
        assert report.num_interrupted == 1
        assert await running == "abort"

    run(engine, steps())
    assert_serves(engine)


@pytest.mark.parametrize(("in_flight", "events"), [("keep", ["flushed"]), ("continue", [])])
def test_requests_that_are_kept_go_on_under_the_new_policy(in_flight, events, engine):
    async def steps():
        running = await begin(engine, "running", is_long=True)
        report = await Refitter(engine, in_flight=in_flight).refit_async(engine.make_policy(1))
        assert report.num_interrupted == 1
        assert [scheduler.running for scheduler in engine.schedulers] == [["running"]] * len(engine.schedulers)
        assert [scheduler.events for scheduler in engine.schedulers] == [events] * len(engine.schedulers)
        engine.tokenizer_manager.finish("running")
        assert await running == "stop"

    run(engine, steps())
    assert_serves(engine)


def test_a_refit_that_fails_ends_requests_that_would_have_gone_on_with_their_cache(solo):
    async def steps():
        running = await begin(solo, "running", is_long=True)
        refitter = Refitter(solo, in_flight="continue")
        with pytest.raises(NonFiniteError):
            await refitter.refit_async(spoilt(solo.make_policy(1)))
        assert await running == "abort"
        await Refitter(solo).refit_async(solo.make_policy(1))

    run(solo, steps())
    assert_serves(solo)


@pytest.mark.parametrize(
    "name", ["enable_hierarchical_cache", "is_embedding", "radix_cache_backend", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"]
)
def test_an_engine_whose_requests_cannot_go_on_with_their_cache_says_why(name, solo, monkeypatch):
    if name.isupper():
        monkeypatch.setenv(name, "1")
    else:
        setattr(solo.tokenizer_manager.server_args, name, True)
    why = f"with {name}, later requests (may )?share KV of the old policy"

    async def steps():
        before = solo.live_bytes()
        with pytest.raises(UnsupportedEngineError, match=f'in_flight="continue": {why}.*choose "keep"'):
            await Refitter(solo, in_flight="continue").refit_async(solo.make_policy(1))
        assert solo.live_bytes() == before
        assert await solo.async_generate("new") == "stop"

    run(solo, steps())


def test_an_interrupt_while_requests_are_let_in_again_leaves_none_waiting(solo, monkeypatch):
    opened, original = [], TokenizerGate.open

    def interrupt(gate):
        opened.append(gate)
        if len(opened) == 1:
            raise MemoryError
        original(gate)

    monkeypatch.setattr(TokenizerGate, "open", interrupt)

    async def steps():
        with pytest.raises(MemoryError):
            await Refitter(solo).refit_async(solo.make_policy(1))

    run(solo, steps())
    assert len(opened) == 2
    assert_serves(solo)


# Pauses by others.


def test_generation_that_was_paused_stays_paused(solo):
    async def steps():
        manager = solo.tokenizer_manager
        await manager.pause_generation(PauseGenerationReqInput("retract"))
        waiting = await begin(solo, "waiting")
        await Refitter(solo).refit_async(solo.make_policy(1))
        assert (manager.is_pause, solo.hidden(), waiting.done()) == (True, set(), False)
        await manager.continue_generation(None)
        assert await waiting == "stop"

    run(solo, steps())


def test_whoever_lets_generation_go_on_during_a_refit_does_so_afterwards(solo):
    async def steps():
        manager, held = solo.tokenizer_manager, HeldWrite(solo)
        await manager.pause_generation(PauseGenerationReqInput("retract"))
        refit = asyncio.create_task(Refitter(solo).refit_async(solo.make_policy(1)))
        await held.reached()
        await manager.continue_generation(None)
        assert solo.schedulers[0].is_paused
        held.end()
        await refit

    run(solo, steps())
    assert_serves(solo)


def test_whoever_pauses_generation_during_a_refit_does_so_afterwards(solo):
    async def steps():
        manager, held = solo.tokenizer_manager, HeldWrite(solo)
        refit = asyncio.create_task(Refitter(solo).refit_async(solo.make_policy(1)))
        await held.reached()
        await manager.pause_generation(PauseGenerationReqInput("abort"))
        held.end()
        await refit
        assert (manager.is_pause, solo.schedulers[0].is_paused, solo.hidden()) == (True, True, set())

    run(solo, steps())


@pytest.mark.parametrize("is_paused", [False, True])
def test_what_was_asked_for_during_a_wait_in_vain_is_done(is_paused, solo):
    async def steps():
        manager = solo.tokenizer_manager
        running = await begin(solo, "running", is_long=True)
        if not is_paused:
            manager.is_pause = True
        refit = asyncio.create_task(Refitter(solo, timeout_s=0.1).refit_async(solo.make_policy(1)))
        await until(solo.hidden)
        if is_paused:
            await manager.pause_generation(PauseGenerationReqInput("retract"))
        else:
            await manager.continue_generation(None)
        with pytest.raises(EngineBusyError):
            await refit
        assert (manager.is_pause, solo.schedulers[0].is_paused, solo.hidden()) == (is_paused, is_paused, set())
        manager.finish("running")
        await running

    run(solo, steps())


# Callers that are cancelled.


def test_a_wait_that_is_cancelled_lets_requests_in_again(solo):
    async def steps():
        running = await begin(solo, "running", is_long=True)
        refit = asyncio.create_task(Refitter(solo).refit_async(solo.make_policy(1)))
        await until(solo.hidden)
        waiting = await begin(solo, "waiting")
        refit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await refit
        assert await waiting == "stop"
        solo.tokenizer_manager.finish("running")
        await running

    run(solo, steps())
    assert_serves(solo)


def test_a_pause_that_is_cancelled_while_the_schedulers_are_told_does_not_stay(solo):
    async def steps():
        manager = solo.tokenizer_manager
        manager.may_dispatch.clear()
        refit = asyncio.create_task(Refitter(solo).refit_async(solo.make_policy(1)))
        await until(lambda: manager.is_pause)
        refit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await refit
        manager.may_dispatch.set()

    run(solo, steps())
    assert_serves(solo)


@pytest.mark.parametrize("step", ["_check_kept", "check_ready", "finish"])
def test_a_refit_that_is_cancelled_while_ranks_answer_can_be_followed_by_another(step, engine):
    rank, policy = engine.schedulers[0], engine.make_policy(2)

    async def steps():
        refitter = Refitter(engine)
        await refitter.refit_async(engine.make_policy(1))
        target = rank._fp8refit_server.orders.rank.target
        original, loop = getattr(target, step), asyncio.get_running_loop()
        refit = asyncio.create_task(refitter.refit_async(engine.make_policy(3)))

        def cancel_and_go_on(*args, **kwargs):
            loop.call_soon_threadsafe(refit.cancel)
            delattr(target, step)
            for _ in range(1000):
                if refit.cancelling():
                    break
                time.sleep(0.005)
            return original(*args, **kwargs)

        setattr(target, step, cancel_and_go_on)
        with pytest.raises(asyncio.CancelledError):
            await refit
        await refitter.refit_async(policy)

    run(engine, steps())
    engine.assert_holds(policy)
    assert_serves(engine)


@pytest.fixture
def told(monkeypatch):
    """What the ranks were told, and whether they then went back to their own work."""
    told, tell = [], Switchboard._tell

    async def note(board, message, **options):
        step = message if message == FLUSH else json.loads(message)["order"]["step"]
        told.append((step, options["is_last"]))
        return await tell(board, message, **options)

    monkeypatch.setattr(Switchboard, "_tell", note)
    for patience in ("_LINGERING_S", "_FOLLOWING_S"):  # a rank that leaves a stream early is told of it again
        monkeypatch.setattr(f"fp8refit.remote.host.stream_reader.{patience}", 10.0)
    return told


def test_ranks_are_told_no_more_of_a_refit_that_was_cancelled(solo, told):
    policy, at_work, may_go_on = solo.make_policy(1), threading.Event(), threading.Event()

    async def steps():
        refitter = Refitter(solo)
        for _ in range(2):
            told.clear()
            await refitter.refit_async(iter(policy.items()))
        assert told == [("prepare", False), (FLUSH, False), ("stream", True)]
        target = solo.schedulers[0]._fp8refit_server.orders.rank.target
        check = target._check_kept

        def check_slowly(prepared):
            at_work.set()
            assert may_go_on.wait(10)
            return check(prepared)

        target._check_kept = check_slowly
        told.clear()
        refit = asyncio.create_task(refitter.refit_async(iter(policy.items())))
        await until(at_work.is_set)
        refit.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await refit
        assert told == [("prepare", False), ("abandon", True)]
        assert (refitter.version, refitter.is_dirty) == (2, False)
        target._check_kept = check
        await refitter.refit_async(iter(policy.items()))

    run(solo, steps())
    assert_serves(solo)


def test_a_source_is_read_while_the_ranks_write(solo):
    """The caller goes on as soon as the ranks have both messages."""
    policy, is_writing, is_read = solo.make_policy(1), threading.Event(), threading.Event()

    def read():
        yield from list(policy.items())[:-1]
        assert is_writing.wait(10)
        yield list(policy.items())[-1]
        is_read.set()

    async def steps():
        refitter = Refitter(solo)
        await refitter.refit_async(iter(policy.items()))
        orders = solo.schedulers[0]._fp8refit_server.orders
        execute = orders.execute

        def note(order):
            if order.step == "stream":
                is_writing.set()
                assert is_read.wait(10), "the source is not read meanwhile"
            return execute(order)

        orders.execute = note
        await refitter.refit_async(read())

    run(solo, steps())
    solo.assert_holds(policy)
    assert_serves(solo)


# Refusals.


def test_sleeping_weights_are_refused(engine):
    engine.schedulers[-1].weight_updater.offload_tags.add("weights")
    refitter = assert_nothing_written(engine, EngineAsleepError, r"resume_memory_occupation\(tags=\[\"weights\"\]\)")
    assert_serves(engine)
    engine.schedulers[-1].weight_updater.offload_tags = {"kv_cache"}
    assert refitter.refit(engine.make_policy(1)).version == 1


def test_an_update_of_weights_by_sglang_itself_is_waited_for_by_the_caller(engine):
    engine.schedulers[-1].weight_updater._session = object()
    refitter = assert_nothing_written(engine, EngineBusyError, r"end_weight_update\(\), then refit")
    assert_serves(engine)
    engine.schedulers[-1].weight_updater._session = None
    assert refitter.refit(engine.make_policy(1)).version == 1


def test_a_cache_that_is_kept_keeps_the_old_policy(engine, monkeypatch):
    monkeypatch.setattr("fp8refit_sglang.driver._SETTLING_S", 0.05)
    engine.schedulers[-1].num_flushes_to_fail = 10
    assert_nothing_written(engine, CacheFlushError, "SGLang kept its radix cache.*nothing was written")
    assert_serves(engine)


def test_a_cache_that_is_kept_at_a_refit_like_the_last_is_asked_for_again_before_anything_is_written(
    engine, monkeypatch
):
    refitter = Refitter(engine)
    for version in (1, 2):
        engine.schedulers[-1].num_flushes_to_fail = 5 * (version - 1)
        policy = engine.make_policy(version)
        assert refitter.refit(policy).version == version
        engine.assert_holds(policy)
    monkeypatch.setattr("fp8refit_sglang.driver._SETTLING_S", 0.05)
    engine.schedulers[-1].num_flushes_to_fail = 20
    with pytest.raises(CacheFlushError, match=r"SGLang kept its radix cache.*nothing was written"):
        refitter.refit(engine.make_policy(3))
    engine.assert_holds(policy)
    assert (refitter.version, refitter.is_dirty) == (2, False)
    engine.schedulers[-1].num_flushes_to_fail = 0
    assert refitter.refit(engine.make_policy(3)).version == 3
    assert_serves(engine)


@pytest.mark.parametrize("is_registered", [False, True])
def test_an_engine_whose_processes_do_not_load_the_plugin_is_refused(is_registered, solo, monkeypatch):
    monkeypatch.setattr(HookRegistry, "_patched", set())
    if not is_registered:
        monkeypatch.setattr(HookRegistry, "_hooks", {})
    with pytest.raises(UnsupportedEngineError, match="does not load fp8refit's plugin"):
        Refitter(solo)


def test_a_scheduler_that_does_not_know_us_is_told_with_what_sglang_says(solo, monkeypatch):
    refitter = Refitter(solo)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    with pytest.raises(UnsupportedEngineError, match=r"does not load fp8refit's plugin.*no ZMQ socket in"):
        refitter.refit(solo.make_policy(1))
    assert_serves(solo)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (
            {"enable_dp_attention_local_control_broadcast": True, "attn_dp_size": 2},
            "leave out enable_dp_attention_local_control_broadcast",
        ),
        (
            {"enable_dp_attention_local_control_broadcast": True, "enable_dp_attention": True, "dp_size": 2},
            "leave out enable_dp_attention_local_control_broadcast",
        ),
        ({"nnodes": 2}, "start one engine per host"),
        ({"tokenizer_worker_num": 2}, "leave out tokenizer_worker_num"),
        ({"disaggregation_mode": "prefill"}, "leave out disaggregation_mode"),
        ({"hicache_storage_backend": "file"}, "leave out hicache_storage_backend"),
        ({"weight_cache_mode": "client"}, 'weight_cache_mode="off"'),
        ({"enable_eplb": True}, "leave out enable_eplb"),
        ({"elastic_ep_backend": "mooncake"}, "leave out enable_eplb and elastic_ep_backend"),
        ({"enable_cp_decode_attn_tp": True}, "leave out enable_cp_decode_attn_tp"),
    ],
    ids=str,
)
def test_an_engine_laid_out_otherwise_is_refused(arguments, remedy, make_engine):
    with pytest.raises(UnsupportedEngineError, match=f"this engine cannot be refitted: .*{remedy}"):
        Refitter(make_engine(**arguments))


@pytest.mark.parametrize("in_flight", ["keep", "continue"])
def test_stages_of_a_pipeline_are_drained(in_flight, make_engine):
    engine = make_engine(pp_size=2)
    controls = TokenizerControls(engine.tokenizer_manager)
    with pytest.raises(UnsupportedEngineError, match="choose 'wait' or 'abort'"):
        run(engine, controls.pause(RefitConfig(in_flight=in_flight), may_wait=True))
    assert engine.hidden() == set()


def test_each_stage_of_a_pipeline_makes_one_step_more_than_the_next_before_it_answers(monkeypatch):
    answered = []
    monkeypatch.setattr(
        worker, "_answer", lambda scheduler, _: answered.append(scheduler.itself.pp_group.rank_in_group)
    )
    monkeypatch.setattr(worker, "send_to_manager", lambda *_: None)
    arguments = SimpleNamespace(pp_size=3)
    stages = [SimpleNamespace(server_args=arguments, pp_group=SimpleNamespace(rank_in_group=rank)) for rank in range(3)]
    for stage in stages:
        worker.serve(lambda *_: None, SimpleNamespace(scheduler=stage), call_for("an address"))
    steps = [list(answered)]
    for _ in range(3):
        for stage in stages:
            worker.answer_late(stage)
        steps.append(list(answered))
    assert steps == [[2], [2, 1], [2, 1, 0], [2, 1, 0]]


def test_a_stage_of_a_pipeline_is_not_updated_from_its_scheduler():
    scheduler = SimpleNamespace(tp_worker=None, server_args=SimpleNamespace(pp_size=2))
    with pytest.raises(UnsupportedEngineError, match="refit the engine or the server"):
        SglangEngine(scheduler)


def test_arguments_at_their_defaults_are_taken(make_engine):
    engine = make_engine(
        dp_size=1,
        enable_dp_attention=False,
        enable_dp_attention_local_control_broadcast=True,  # which then says nothing
        attn_dp_size=None,
        pp_size=1,
        nnodes=1,
        tokenizer_worker_num=1,
        disaggregation_mode="null",
        hicache_storage_backend=None,
        enable_eplb=False,
        elastic_ep_backend=None,
        enable_cp_decode_attn_tp=False,
        weight_cache_mode="off",
    )
    assert Refitter(engine).version == 0


@pytest.mark.parametrize("asked", [{"enable_dp_attention": True}, {"attn_dp_size": 2}], ids=str)
def test_replicas_of_attention_are_ranks_of_one_group_and_step_together(asked):
    arguments = SimpleNamespace(dp_size=2, tp_size=2, **asked)
    assert num_replicas(arguments) == 1
    assert Scheduler(SimpleNamespace(server_args=arguments)).steps_in_parts


def test_what_died_before_an_engine_was_driven_is_not_taken_for_one_of_its_replicas(make_engine, monkeypatch):
    dead = {7: "sglang::scheduler_DP0"}
    monkeypatch.setattr(controls_module, "dead_processes", lambda: dict(dead))
    monkeypatch.setattr(controls_module, "_LOOK_S", 0.01)

    async def wait(controls):
        await controls._while_all_live(asyncio.sleep(0.1))

    alone, several = (TokenizerControls(make_engine(dp_size=size).tokenizer_manager) for size in (1, 2))
    for controls in (alone, several):
        asyncio.run(wait(controls))
    dead[8] = "sglang::scheduler_DP1"
    asyncio.run(wait(alone))
    with pytest.raises(EngineLostError, match=r"sglang::scheduler_DP1 \(PID 8\) died"):
        asyncio.run(wait(several))


def test_something_else_of_sglang_s_is_refused():
    runtime = type("Runtime", (), {"__module__": "sglang.lang.backend"})()
    with pytest.raises(UnsupportedEngineError, match=r"Runtime is not an sglang\.Engine; pass the engine itself"):
        Refitter(runtime)


def test_a_draft_that_may_keep_copies_is_refused(engine):
    engine.schedulers[-1].spec_algorithm.name = "DFLASH"
    why = r"(?s)draft model: drafts tokens by DFLASH.*Boot with .* or without speculative_algorithm"
    assert_nothing_written(engine, UnsupportedEngineError, why)
    assert_serves(engine)


def test_drafting_without_a_model_changes_nothing(engine):
    for scheduler in engine.schedulers:
        scheduler.spec_algorithm.name, scheduler.draft_worker = "NGRAM", object()
    Refitter(engine).refit(engine.make_policy(1))
    engine.assert_holds(engine.make_policy(1))


def test_a_multimodal_model_is_refused(engine):
    engine.schedulers[-1].model_config.is_multimodal = True
    assert_nothing_written(engine, UnsupportedEngineError, "(?s)multimodal model.*Boot with enable_multimodal=False")
    assert_serves(engine)


def test_kv_scales_of_a_dummy_boot_are_those_of_a_boot_from_a_checkpoint(engine):
    for scheduler in engine.schedulers:
        scheduler.server_args.load_format = "dummy"
    refitter = Refitter(engine)
    refitter.refit(engine.make_policy(1))
    for scheduler in engine.schedulers:
        attention = scheduler.network.attention
        assert (attention.k_scale.item(), attention.v_scale.item()) == (1.0, 1.0)
        assert (attention.k_scale_float, attention.v_scale_float) == (1.0, 1.0)
        attention.k_scale_float = 0.5
    refitter.refit(engine.make_policy(2))
    for scheduler in engine.schedulers:
        attention = scheduler.network.attention
        assert (attention.k_scale.item(), attention.v_scale.item()) == (0.5, 1.0), "noise is forgotten once"


def test_kv_scales_of_a_checkpoint_come_back_after_sleep(engine):
    for scheduler in engine.schedulers:
        scheduler.network.attention.k_scale.fill_(torch.nan)
    Refitter(engine).refit(engine.make_policy(1))
    assert {scheduler.network.attention.k_scale.item() for scheduler in engine.schedulers} == {0.25}


# Engines that are lost.


def test_a_rank_that_hangs_up_is_lost_and_requests_are_refused(engine, monkeypatch):
    refitter = Refitter(engine)
    refitter.refit(engine.make_policy(1))

    def fail(message):
        raise ValueError("no answer to this")

    monkeypatch.setattr(engine.schedulers[-1]._fp8refit_server, "handle", fail)
    with pytest.raises(EngineLostError, match="restart the engine"):
        refitter.refit(engine.make_policy(2))
    with pytest.raises(EngineDirtyError, match="the engine is lost"):
        engine.generate("new")


def test_a_refit_in_a_loop_that_does_not_drive_the_engine_is_refused(engine):
    refitter = Refitter(engine)
    refitter.refit(engine.make_policy(1))  # from here on its manager is bound to the engine's own loop
    with pytest.raises(UnsupportedEngineError, match="bound to another event loop"):
        asyncio.run(refitter.refit_async(engine.make_policy(2)))
    refitter.refit(engine.make_policy(2))
    assert refitter.version == 2
