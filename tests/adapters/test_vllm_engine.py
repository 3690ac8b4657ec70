"""Which clients of vLLM's an adapter takes, and how it pauses one. Real engines: `tests/vllm/`."""

import asyncio
from types import SimpleNamespace

import pytest
from fp8refit_vllm import VllmEngine
from fp8refit_vllm.driver import AsyncDriver

from fp8refit import EngineBusyError, EngineDirtyError, RefitConfig, UnsupportedEngineError


def make_config(**parallel):
    settings = {"data_parallel_size": 1, "world_size": 1, "worker_extension_cls": ""} | parallel
    return SimpleNamespace(parallel_config=SimpleNamespace(**settings))


def make_llm(config):
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


def make_async_llm(config):
    return SimpleNamespace(vllm_config=config, pause_generation=None, output_processor=None)


@pytest.mark.parametrize("make", [make_llm, make_async_llm])
def test_data_parallel_replicas_are_refused_with_what_to_do(make):
    llm = make(make_config(data_parallel_size=2))
    with pytest.raises(UnsupportedEngineError, match=r"2 data-parallel replicas .* start one engine a replica"):
        VllmEngine(llm)


def test_an_engine_without_its_client_is_refused():
    with pytest.raises(UnsupportedEngineError, match=r"neither a vllm\.LLM nor an AsyncLLM; pass the LLM itself"):
        VllmEngine(SimpleNamespace(vllm_config=make_config()))


class BusyAsyncLLM:
    """An AsyncLLM that never gets done with what it runs."""

    vllm_config = None

    def __init__(self):
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 1, request_states={})
        self.errored = False
        self.is_running = True

    async def is_paused(self):
        return not self.is_running

    async def pause_generation(self, *, mode):
        self.is_running = False
        await asyncio.Event().wait()

    async def resume_generation(self):
        self.is_running = True

    async def abort(self, requests, *, internal):
        return None

    async def add_request(self):
        return "admitted"


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
