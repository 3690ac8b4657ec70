"""The rank's side of the SGLang adapter: whatever a driver does, a scheduler goes on. Fakes instead of SGLang."""

import asyncio

import pytest
from fp8refit_sglang.compat import call_for
from fp8refit_sglang.worker import FLUSH, FLUSHED, KEPT

from fp8refit.errors import EngineLostError
from fp8refit.transport.loopback import Switchboard
from tests.adapters import fake_sglang
from tests.adapters.fake_sglang import Engine, UpdateWeightsFromIPCReqInput


@pytest.fixture
def engine(monkeypatch):
    fake_sglang.install(monkeypatch)
    engine = Engine()
    yield engine
    engine.shutdown()


@pytest.fixture
def scheduler(engine):
    return engine.schedulers[0]


class Driver:
    """A driver of one rank, which may hang up."""

    def __init__(self, scheduler):
        self.board = Switchboard(1)
        self.receipts = []
        self._scheduler = scheduler

    async def _ring(self, address):
        await asyncio.to_thread(self._call, address)

    def _call(self, address):
        self.receipts.append(self._scheduler.weight_updater.update_weights_from_ipc(call_for(address)))

    async def ask(self, message):
        ((answer,),) = await self.board.send((message,), self._ring, timeouts_s=(5,))
        return answer


def test_weights_of_others_are_sglang_s_affair(scheduler):
    request = UpdateWeightsFromIPCReqInput(zmq_handles={"GPU-1": "ipc:///tmp/weights"})
    receipt = scheduler.weight_updater.update_weights_from_ipc(request)
    assert (receipt.success, receipt.message) == (False, "no ZMQ socket in ['GPU-1']")
    assert not hasattr(scheduler, "_fp8refit_server")


def test_a_driver_is_answered_and_sglang_hears_that_all_is_well(scheduler):
    driver = Driver(scheduler)

    async def talk():
        return [await driver.ask(message) for message in (FLUSH, FLUSH)]

    assert asyncio.run(talk()) == [FLUSHED, FLUSHED]
    assert [(receipt.success, receipt.message) for receipt in driver.receipts] == [(True, "")] * 2


def test_a_call_of_ours_asks_sglang_for_no_flush(engine):
    assert not call_for("address").flush_cache


def test_requests_that_wait_stay_in_the_queue_that_is_flushed(scheduler):
    scheduler.waiting_queue = queue = ["retracted"]
    assert asyncio.run(Driver(scheduler).ask(FLUSH)) == FLUSHED
    assert scheduler.waiting_queue is queue
    assert queue == ["retracted"]
    scheduler.running = ["running"]
    assert asyncio.run(Driver(scheduler).ask(FLUSH)) == KEPT
    assert scheduler.waiting_queue is queue


def test_a_driver_that_is_not_there_is_no_error_of_the_scheduler(scheduler, tmp_path):
    receipt = scheduler.weight_updater.update_weights_from_ipc(call_for(str(tmp_path / "nobody")))
    assert not receipt.success
    assert "the driver cannot be reached" in receipt.message


def test_a_driver_that_is_gone_is_no_error_of_the_scheduler_and_the_next_is_answered(scheduler):
    first = Driver(scheduler)

    async def leave():
        await first.ask(FLUSH)
        first.board.close()

    asyncio.run(leave())
    receipt = scheduler.weight_updater.update_weights_from_ipc(call_for(first.board.address))
    assert not receipt.success
    assert "the driver cannot be reached" in receipt.message
    assert asyncio.run(Driver(scheduler).ask(FLUSH)) == FLUSHED


def test_an_error_of_sglang_s_own_does_not_leave_the_scheduler(scheduler):
    def fail(*, empty_cache):
        raise ValueError("no such pool")

    scheduler.flush_cache = fail
    driver = Driver(scheduler)
    with pytest.raises(EngineLostError, match="hung up"):
        asyncio.run(driver.ask(FLUSH))
    assert [(receipt.success, receipt.message) for receipt in driver.receipts] == [(False, "ValueError: no such pool")]
    del scheduler.flush_cache
    assert asyncio.run(Driver(scheduler).ask(FLUSH)) == FLUSHED


def test_what_is_no_request_is_answered_with_a_value(scheduler):
    assert "RankFailedError" in asyncio.run(Driver(scheduler).ask("nonsense"))
