"""Which clients of vLLM's an adapter takes, and how it pauses one. Real engines: `tests/vllm/`."""

import asyncio
import sys
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace

import pytest
from fp8refit_vllm import VllmEngine
from fp8refit_vllm.async_driver import AsyncDriver
from fp8refit_vllm.core import CORE_METHOD, Outcome
from fp8refit_vllm.gate import LlmGate
from fp8refit_vllm.watch import ADMIT_METHOD
from fp8refit_vllm.worker import PLUGIN_METHOD

from fp8refit import (
    CacheFlushError,
    EngineBusyError,
    EngineDirtyError,
    EngineLostError,
    RefitConfig,
    UnsupportedEngineError,
)


class GracefulHTTPError(Exception):
    """vLLM's own error with a status."""

    def __init__(self, message, http_status):
        super().__init__(message)
        self.http_status = http_status


@pytest.fixture(autouse=True)
def errors_of_vllm(monkeypatch):
    """What refusals are made of."""
    exceptions = ModuleType("vllm.exceptions")
    exceptions.GracefulHTTPError = GracefulHTTPError
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)


CLIENT = SimpleNamespace(core_engines=[b"one"])
"""Of one engine core."""


def make_config(*, is_moe=False, **parallel):
    settings = {"data_parallel_size": 1, "world_size": 1, "worker_extension_cls": ""} | parallel
    return SimpleNamespace(parallel_config=SimpleNamespace(**settings), model_config=SimpleNamespace(is_moe=is_moe))


def make_llm(config):
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, engine_core=CLIENT))


def make_async_llm(config):
    return SimpleNamespace(vllm_config=config, engine_core=CLIENT, pause_generation=None, output_processor=None)


@pytest.mark.parametrize("make", [make_llm, make_async_llm])
def test_experts_of_which_a_part_is_out_of_reach_are_refused_with_what_to_do(make):
    llm = make(make_config(is_moe=True, data_parallel_size=2))
    with pytest.raises(
        UnsupportedEngineError, match=r"spread over 2 data-parallel replicas, .* boot it as one AsyncLLM"
    ):
        VllmEngine(llm)


def test_an_engine_without_its_client_is_refused():
    with pytest.raises(UnsupportedEngineError, match=r"is not a vllm\.LLM, an AsyncLLM or a worker"):
        VllmEngine(SimpleNamespace(vllm_config=make_config()))


class QuietAsyncLLM:
    """An AsyncLLM that runs nothing. Its input is processed while `may_process` is set."""

    vllm_config = SimpleNamespace(
        kv_transfer_config=None,
        model_config=SimpleNamespace(is_multimodal_model=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )

    def __init__(self):
        self.output_processor = OutputProcessor()
        self.errored = False
        self.is_running = True
        self.may_process = asyncio.Event()
        self.may_process.set()

    async def is_paused(self):
        return not self.is_running

    @property
    def engine_core(self):
        return self

    async def pause_scheduler_async(self, *, mode, clear_cache):
        self.is_running = False

    async def resume_generation(self):
        self.is_running = True

    async def wake_up(self, tags=None):
        self.is_running = True

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        return True

    async def abort(self, requests, *, internal):
        return None

    async def add_request(self):
        await self.may_process.wait()
        self.output_processor.add_request("request")
        return "admitted"


class OutputProcessor:
    """What knows of every request that the core has."""

    def __init__(self):
        self.request_states = {}

    def get_num_unfinished_requests(self):
        return len(self.request_states)

    def add_request(self, request):
        self.request_states[request] = None


class BusyAsyncLLM(QuietAsyncLLM):
    """An AsyncLLM that never gets done with what it runs."""

    async def pause_scheduler_async(self, *, mode, clear_cache):
        self.is_running = False
        await asyncio.Event().wait()


class DyingAsyncLLM(QuietAsyncLLM):
    """An AsyncLLM whose worker was killed: its engine core cancels a call, and is found dead a little later."""

    async def pause_scheduler_async(self, *, mode, clear_cache):
        asyncio.get_running_loop().call_later(0.05, setattr, self, "errored", True)
        raise Exception("Call to pause_scheduler method failed: cancelled")


class StuckAsyncLLM(QuietAsyncLLM):
    """An AsyncLLM whose engine core answers nobody any more."""

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        await asyncio.Event().wait()


class HeldAsyncLLM(QuietAsyncLLM):
    """An AsyncLLM that keeps its caches, and says so by raising."""

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        raise Exception("Failed to reset KV cache")


def test_a_pause_that_is_cancelled_lets_requests_in_again():
    async def steps():
        llm = BusyAsyncLLM()
        pause = asyncio.create_task(AsyncDriver(llm, "method").pause(RefitConfig()))
        while llm.is_running:
            await asyncio.sleep(0)
        pause.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pause
        assert llm.is_running
        assert await asyncio.wait_for(llm.add_request(), 10) == "admitted"

    asyncio.run(steps())


def test_a_pause_that_a_dying_core_cancels_says_that_the_engine_is_lost():
    llm = DyingAsyncLLM()
    with pytest.raises(
        EngineLostError, match=r"the engine core died \(Call to pause_scheduler method failed: cancelled"
    ):
        asyncio.run(AsyncDriver(llm, "method").pause(RefitConfig()))


def test_an_interrupt_while_requests_are_let_in_again_leaves_none_waiting(monkeypatch):
    async def steps():
        llm = QuietAsyncLLM()
        driver = AsyncDriver(llm, "method")
        await driver.pause(RefitConfig())
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(LlmGate, "open", interrupt)
            await driver.resume()
        await driver.resume()
        assert await asyncio.wait_for(llm.add_request(), 10) == "admitted"

    def interrupt(gate):
        raise MemoryError

    asyncio.run(steps())


def test_a_pause_waits_for_outputs_that_are_on_their_way_and_not_longer():
    async def steps():
        llm = QuietAsyncLLM()
        llm.output_processor.add_request("request")
        pause = asyncio.create_task(AsyncDriver(llm, "method").pause(RefitConfig()))
        await asyncio.sleep(0)
        assert not pause.done()
        llm.output_processor.request_states.clear()
        assert await pause == 0
        llm.output_processor.add_request("one that never ends")
        assert await AsyncDriver(llm, "method").pause(RefitConfig()) == 1

    asyncio.run(steps())


def test_a_pause_that_takes_too_long_leaves_a_dirty_engine_refusing():
    async def steps():
        llm = BusyAsyncLLM()
        driver = AsyncDriver(llm, "method")
        await driver.refuse("half written")
        with pytest.raises(EngineBusyError, match=r"did not finish within 0\.01 s"):
            await driver.pause(RefitConfig(timeout_s=0.01))
        assert not llm.is_running
        with pytest.raises(EngineDirtyError, match="half written"):
            await asyncio.wait_for(llm.add_request(), 10)

    asyncio.run(steps())


@pytest.mark.parametrize(
    ("method", "config", "why"),
    [
        (
            PLUGIN_METHOD,
            {"kv_transfer_config": "a connector"},
            "this engine's KV connector gives blocks of the old policy",
        ),
        (
            PLUGIN_METHOD,
            {"aux_output_config": SimpleNamespace(enabled=True)},
            "outputs such as routed experts are kept",
        ),
        ("method", {}, "the engine core has not loaded fp8refit's plugin"),
    ],
)
def test_an_engine_whose_requests_cannot_go_on_with_their_cache_says_why(method, config, why):
    async def steps():
        llm = QuietAsyncLLM()
        llm.vllm_config = SimpleNamespace(**vars(QuietAsyncLLM.vllm_config) | config)
        driver = AsyncDriver(llm, method)
        with pytest.raises(UnsupportedEngineError, match=f'in_flight="continue": {why}.*; choose "keep"'):
            await driver.pause(RefitConfig(in_flight="continue"))
        assert llm.is_running and "add_request" not in vars(llm)

    asyncio.run(steps())


class ServingAsyncLLM(QuietAsyncLLM):
    """An AsyncLLM whose core takes two messages in one exchange. `commits`: whether it lets requests run again then."""

    is_busy = False

    def __init__(self, *, commits=True):
        super().__init__()
        self.commits, self.calls = commits, []

    async def call_utility_async(self, method, *arguments):
        stops = arguments[-1] > 0
        self.calls.append((method, self.is_running, stops))
        if stops:
            self.is_running = self.commits
        ended = "busy" if self.is_busy else "done"
        return list(Outcome(ended, ["first", "second"], is_stopped=stops and not self.commits))

    async def pause_scheduler_async(self, *, mode, clear_cache):
        self.calls.append((mode, self.is_running, None))
        await super().pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self):
        self.calls.append(("resume", self.is_running, None))
        await super().resume_generation()

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        self.calls.append(("flush", self.is_running, None))
        return True


async def pair(driver):
    await (await driver.send(("first", "second"), (1.0, 1.0), begins=False))


def test_frozen_requests_run_until_the_core_stops_them_and_after_it_has_committed():
    async def steps():
        llm = ServingAsyncLLM()
        driver = AsyncDriver(llm, PLUGIN_METHOD)
        await driver.pause(RefitConfig(in_flight="keep"))
        late = asyncio.create_task(llm.add_request())
        await asyncio.sleep(0)
        assert llm.is_running and not late.done()
        await pair(driver)
        await driver.resume()
        assert await asyncio.wait_for(late, 10) == "admitted"
        assert llm.calls == [(CORE_METHOD, True, True)]

    asyncio.run(steps())


def test_a_core_that_has_not_committed_is_told_to_go_on_by_the_driver():
    """A stream has only begun with the second message."""

    async def steps():
        llm = ServingAsyncLLM(commits=False)
        driver = AsyncDriver(llm, PLUGIN_METHOD)
        await driver.pause(RefitConfig(in_flight="continue"))
        await pair(driver)
        await pair(driver)
        await driver.resume()
        assert llm.calls == [(CORE_METHOD, True, True), (CORE_METHOD, False, False), ("resume", False, None)]
        assert llm.is_running

    asyncio.run(steps())


def test_frozen_requests_are_stopped_before_caches_are_dropped_and_before_they_are_refused():
    async def steps():
        llm = ServingAsyncLLM()
        driver = AsyncDriver(llm, PLUGIN_METHOD)
        await driver.pause(RefitConfig(in_flight="keep"))
        await driver.flush_caches()
        await pair(driver)
        assert llm.calls == [("keep", True, None), ("flush", False, None), (CORE_METHOD, False, False)]
        await driver.resume()
        llm.calls.clear()
        await driver.pause(RefitConfig(in_flight="keep"))
        await driver.refuse("half written")
        assert llm.calls == [("keep", True, None)]
        await driver.pause(RefitConfig(in_flight="keep"))  # it is stopped now: again, at once
        await driver.resume()
        assert llm.calls[1:] == [("keep", False, None), ("resume", False, None)]

    asyncio.run(steps())


def test_a_core_that_did_not_stop_requests_in_time_says_so_and_goes_on():
    async def steps():
        llm = ServingAsyncLLM(commits=False)
        llm.is_busy = True
        driver = AsyncDriver(llm, PLUGIN_METHOD)
        await driver.pause(RefitConfig(in_flight="keep"))
        with pytest.raises(EngineBusyError, match="did not finish within"):
            await pair(driver)
        await driver.resume()
        assert llm.is_running

    asyncio.run(steps())


@pytest.mark.parametrize("commits", [True, False])
def test_whoever_pauses_and_resumes_during_a_refit_is_not_left_paused(commits):
    async def steps():
        llm = ServingAsyncLLM(commits=commits)
        driver = AsyncDriver(llm, PLUGIN_METHOD)
        await driver.pause(RefitConfig(in_flight="keep"))
        if commits:
            await pair(driver)
        await llm.pause_scheduler_async(mode="keep", clear_cache=False)
        await llm.resume_generation()
        assert not llm.is_running
        await driver.resume()
        assert llm.is_running

    asyncio.run(steps())


def test_a_scheduler_that_somebody_let_run_after_a_failed_refit_is_stopped_again():
    async def steps():
        llm = ServingAsyncLLM(commits=False)
        driver = AsyncDriver(llm, PLUGIN_METHOD)
        await driver.pause(RefitConfig(in_flight="keep"))
        await pair(driver)
        await driver.refuse("half written")
        llm.is_running = True
        llm.calls.clear()
        await driver.pause(RefitConfig(in_flight="keep"))
        await pair(driver)
        assert llm.calls == [(CORE_METHOD, True, True)]

    asyncio.run(steps())


def test_a_kv_connector_may_take_long_so_requests_are_stopped_first():
    async def steps():
        llm = ServingAsyncLLM()
        llm.vllm_config = SimpleNamespace(**vars(QuietAsyncLLM.vllm_config) | {"kv_transfer_config": "a connector"})
        await AsyncDriver(llm, PLUGIN_METHOD).pause(RefitConfig(in_flight="keep"))
        assert llm.calls == [("keep", True, None)]

    asyncio.run(steps())


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_requests_that_end_are_waited_for_at_once(in_flight):
    async def steps():
        llm = ServingAsyncLLM()
        await AsyncDriver(llm, PLUGIN_METHOD).pause(RefitConfig(in_flight=in_flight))
        assert llm.calls == [(in_flight, True, None)]

    asyncio.run(steps())


def test_whoever_resumes_generation_during_a_refit_resumes_it_afterwards():
    async def steps():
        llm = QuietAsyncLLM()
        driver = AsyncDriver(llm, "method")
        await driver.pause(RefitConfig(in_flight="keep"))
        await llm.resume_generation()
        waking = asyncio.create_task(llm.wake_up())
        await asyncio.sleep(0)
        assert not llm.is_running
        await driver.resume()
        await asyncio.wait_for(waking, 10)
        assert llm.is_running
        assert not {"resume_generation", "wake_up", "add_request"} & vars(llm).keys()

    asyncio.run(steps())


def test_a_scheduler_that_was_paused_stays_paused_unless_somebody_resumes_it():
    async def steps(resumes):
        llm = QuietAsyncLLM()
        driver = AsyncDriver(llm, "method")
        await llm.pause_scheduler_async(mode="keep", clear_cache=False)
        await driver.pause(RefitConfig())
        await driver.refuse("half written")
        if resumes:
            await llm.resume_generation()
        assert not llm.is_running
        await driver.pause(RefitConfig())
        await driver.resume()
        return llm.is_running

    assert asyncio.run(steps(resumes=True))
    assert not asyncio.run(steps(resumes=False))


class SharedAsyncLLM(QuietAsyncLLM):
    """An AsyncLLM of one of two processes that take requests for its core."""

    vllm_config = SimpleNamespace(
        **vars(QuietAsyncLLM.vllm_config)
        | {"parallel_config": SimpleNamespace(data_parallel_size=1, _api_process_count=2)}
    )

    def __init__(self):
        super().__init__()
        self.told = []

    async def call_utility_async(self, method, refused_because):
        assert method == ADMIT_METHOD
        self.told.append((refused_because, self.is_running))


def test_requests_from_other_processes_wait_are_refused_and_run_and_the_users_pause_outlives_that():
    async def steps(is_paused):
        llm = SharedAsyncLLM()
        driver = AsyncDriver(llm, "method")
        if is_paused:
            await llm.pause_scheduler_async(mode="keep", clear_cache=False)
        await driver.pause(RefitConfig())
        await driver.refuse("half written")
        assert llm.is_running  # a core that is paused refuses nothing
        await driver.pause(RefitConfig())
        await driver.resume()
        assert llm.told == [("", False), ("half written", False), ("", False), (None, False)]
        return llm.is_running

    assert asyncio.run(steps(is_paused=False))
    assert not asyncio.run(steps(is_paused=True))


def test_a_request_whose_input_is_processed_when_the_refit_fails_reaches_nobody():
    async def steps():
        llm = QuietAsyncLLM()
        driver = AsyncDriver(llm, "method")
        llm.may_process.clear()
        late = asyncio.create_task(llm.add_request())
        await asyncio.sleep(0)
        await driver.pause(RefitConfig())
        await driver.refuse("half written")
        llm.may_process.set()
        with pytest.raises(EngineDirtyError, match="half written"):
            await asyncio.wait_for(late, 10)
        assert llm.output_processor.request_states == {}
        await driver.pause(RefitConfig())
        await driver.resume()
        assert await asyncio.wait_for(llm.add_request(), 10) == "admitted"
        assert list(llm.output_processor.request_states) == ["request"]

    asyncio.run(steps())


def test_a_core_that_does_not_answer_is_lost_in_time():
    async def steps():
        llm = StuckAsyncLLM()
        driver = AsyncDriver(llm, "method")
        await driver.pause(RefitConfig(timeout_s=0.01))
        with pytest.raises(EngineLostError, match="raise timeout_s"):
            await asyncio.wait_for(driver.flush_caches(), 10)

    asyncio.run(steps())


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_is_in_time_although_the_event_loop_stood_still(answers):
    async def steps():
        llm = QuietAsyncLLM()
        loop = asyncio.get_running_loop()

        async def collective_rpc(method, timeout_s, args):
            answer = loop.create_future()
            if answers:
                threading.Timer(0.05, lambda: loop.call_soon_threadsafe(answer.set_result, ["answer"])).start()
            said = await answer
            await asyncio.sleep(0.01)  # the engine's client needs a few steps to read its socket
            return said

        llm.collective_rpc = collective_rpc
        begun = await AsyncDriver(llm, "method").send(("message",), (0.2,), begins=True)
        time.sleep(0.4)  # the trainer computes the next tensor
        return (await begun).said

    if answers:
        assert asyncio.run(steps()) == ["answer"]
    else:
        with pytest.raises(EngineLostError, match="did not answer"):
            asyncio.run(steps())


def test_caches_that_stay_are_told_with_what_to_do():
    async def steps():
        llm = HeldAsyncLLM()
        with pytest.raises(CacheFlushError, match=r"nothing was written.*streaming sessions.*Failed to reset KV cache"):
            await AsyncDriver(llm, "method").flush_caches()

    asyncio.run(steps())


def test_an_async_engine_is_not_kept_alive():
    llm = QuietAsyncLLM()
    driver = AsyncDriver(llm, "method")
    alive = weakref.ref(llm)
    del llm
    assert alive() is None
    with pytest.raises(EngineLostError, match="is gone"):
        asyncio.run(driver.pause(RefitConfig()))


def test_an_older_version_is_refused_by_name_and_range(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.21.0"))
    with pytest.raises(UnsupportedEngineError, match=r"this is vLLM 0\.21\.0; fp8refit works with vLLM 0\.22 or later"):
        VllmEngine(make_llm(make_config()))
