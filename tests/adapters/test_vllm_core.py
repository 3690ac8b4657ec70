"""What is added to vLLM's engine core, and the driver that calls it. A real core: `tests/vllm/test_broadcast.py`."""

import asyncio
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest
from fp8refit_vllm.async_driver import AsyncDriver
from fp8refit_vllm.core import CORE_METHOD, Outcome, carry_out
from fp8refit_vllm.driver import SyncDriver
from fp8refit_vllm.worker import EXTENSION_METHOD, PLUGIN_METHOD

from fp8refit import CacheFlushError, EngineLostError
from fp8refit.remote.protocol.messages import Do, Reply, Request
from fp8refit.report import RankReport
from fp8refit.transport.vote import ErrorRecord

FIRST, SECOND = (Request(id=name, order=Do(step="hello")).encode() for name in ("first", "second"))
TIMEOUTS_S = (3.0, 4.0)
BOTH = [("fp8refit_call", 3.0, "first"), ("flush", False, True), ("fp8refit_call", 4.0, "second")]


class Core:
    """An engine core with two ranks."""

    def __init__(self):
        self.events = []
        self.replies = {"first": [{}, {}], "second": [{"version": 5}, {"version": 5}]}
        self.is_empty = True
        self.raises = {}
        self.is_paused, self.input_queue = True, SimpleQueue()
        self.stopped = None
        """What `pause_scheduler` returns: a future, if a step is running."""

    def collective_rpc(self, method, timeout_s, arguments):
        (message,) = arguments
        asked = Request.model_validate_json(message).id
        self.note(method, timeout_s, asked)
        return [
            reply if isinstance(reply, str) else Reply(**{"id": asked} | reply).encode()
            for reply in self.replies[asked]
        ]

    def reset_prefix_cache(self, reset_running_requests, reset_connector):
        self.note("flush", reset_running_requests, reset_connector)
        return self.is_empty

    def set_weight_version(self, version):
        self.note("version", version)

    def pause_scheduler(self, mode, clears_caches):
        self.note("stop", mode, clears_caches)
        return self.stopped

    def resume_scheduler(self):
        self.note("go on")

    def is_scheduler_paused(self):
        return self.is_paused

    def begin_call(self, method, timeout_s, message):
        """As `core_compat.begin_call` does where the workers run in other processes."""
        self.note("begin")
        return partial(self.collective_rpc, method, timeout_s, (message,))

    def note(self, *event):
        self.events.append(event)
        if event[0] in self.raises:
            raise self.raises[event[0]]


class Engine:
    """A vLLM engine whose core is in another process."""

    def __init__(self, core):
        self.vllm_config = SimpleNamespace(
            kv_transfer_config="a connector",
            model_config=SimpleNamespace(is_multimodal_model=False),
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )
        self.core = core
        self.resources, self.results = SimpleNamespace(engine_dead=False), {}
        self.answers = lambda call_id, answer: self.results[call_id].set_result(answer)
        """What becomes of a call, which may be nothing."""
        self.engine_core = SimpleNamespace(
            utility_results=self.results, _send_input=self.send, resources=self.resources
        )
        self.versions = []

    def send(self, kind, request):
        _, call_id, method, arguments = request
        try:
            answer = self.call_utility(method, *arguments)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            self.results[call_id].set_exception(error)
        else:
            self.answers(call_id, answer)

    def call_utility(self, method, *arguments):
        if method == "collective_rpc":
            return self.core.collective_rpc(*arguments[:3])
        assert method == CORE_METHOD
        try:
            return carry_out(self.core, *arguments)
        except RuntimeError as error:
            raise Exception(f"Call to {method} method failed: {error}") from None

    def reset_prefix_cache(self, reset_running_requests, reset_connector):
        return self.core.reset_prefix_cache(reset_running_requests, reset_connector)

    def collective_rpc(self, method, timeout_s, arguments):
        return self.core.collective_rpc(method, timeout_s, arguments)

    def set_weight_version(self, version):
        self.versions.append(version)

    def reset_mm_cache(self):
        self.core.note("multimodal")

    def reset_encoder_cache(self):
        self.core.note("encoder")


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
    engine = SimpleNamespace(EngineCoreRequestType=SimpleNamespace(UTILITY=b"utility", WAKEUP=b"wake up"))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", engine)


class Pool:
    """Blocks of KV, two of them in use, and the null block."""

    num_gpu_blocks = 8

    def get_num_free_blocks(self):
        return self.num_gpu_blocks - 3


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def engine(core):
    return Engine(core)


@pytest.fixture
def driver(engine):
    return SyncDriver(SimpleNamespace(llm_engine=engine), PLUGIN_METHOD)


@pytest.fixture
def idle(core, engine, monkeypatch):
    """Workers in other processes, and a cache of which nothing is in use."""
    engine.vllm_config.kv_transfer_config = None
    core.scheduler, core.model_executor = scheduler_of([7, 7], [3, 3]), core
    monkeypatch.setattr("fp8refit_vllm.core.begin_call", type(core).begin_call)


def scheduler_of(*counts):
    """A scheduler with one pool of blocks for each pair of how many there are and how many are free, without the null block."""
    pools = [
        SimpleNamespace(num_gpu_blocks=1 + blocks, get_num_free_blocks=lambda n=free: n) for blocks, free in counts
    ]
    managers = [SimpleNamespace(block_pool=pool) for pool in pools for _ in range(2)]
    coordinator = SimpleNamespace(single_type_managers=managers)
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator))


def finish(step):
    """Do what never suspends."""
    try:
        step.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("it suspended")


def pair(driver):
    return finish(finish(driver.send((FIRST, SECOND), TIMEOUTS_S, begins=False)))


def ids(answers):
    return [Reply.model_validate_json(answer).id for answer in answers]


def test_both_messages_and_what_comes_between_are_one_call(driver, core):
    answers = pair(driver)
    assert core.events == [*BOTH, ("version", "5")]
    assert (ids(answers.said), answers.is_refused) == (["second"] * 2, False)
    assert 0 < answers.flush_s < 1


@pytest.mark.parametrize(
    "reply",
    [
        {"error": ErrorRecord(kind="EngineAsleepError", message="asleep")},
        {"id": "an earlier one"},
        {"protocol": 1},
        "rubbish",
    ],
)
def test_nothing_comes_after_a_first_that_a_rank_could_not_do(reply, driver, core):
    core.replies["first"][1] = reply
    found = pair(driver)
    assert core.events == BOTH[:1]
    assert found.is_refused and len(found.said) == 2


def test_no_rank_is_asked_to_write_if_nobody_answers(driver, core):
    core.replies["first"] = []
    assert pair(driver).is_refused
    assert core.events == BOTH[:1]


def test_no_rank_is_asked_to_write_while_caches_stay(driver, core):
    core.is_empty = False
    with pytest.raises(CacheFlushError, match="vLLM kept its prefix cache"):
        pair(driver)
    assert core.events == BOTH[:2]


def test_caches_that_cannot_be_dropped_do_not_cost_the_engine(driver, core):
    core.raises["flush"] = ValueError("no such cache")
    with pytest.raises(CacheFlushError, match=r"nothing was written.*ValueError: no such cache"):
        pair(driver)
    assert core.events == BOTH[:2]


@pytest.mark.usefixtures("idle")
def test_caches_that_nothing_uses_are_dropped_while_workers_write(driver, core):
    found = pair(driver)
    assert core.events == [BOTH[0], ("begin",), ("flush", False, False), BOTH[2], ("version", "5")]
    assert (ids(found.said), found.is_refused, found.flush_s) == (["second"] * 2, False, 0.0)


@pytest.mark.usefixtures("idle")
def test_caches_are_kept_if_a_rank_refuses(driver, core):
    core.replies["first"][1] = "rubbish"
    assert pair(driver).is_refused
    assert core.events == BOTH[:1]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    "counts", [[(7, 7), (3, 2)], [(7, 6)], []], ids=["of another pool", "of the only pool", "no pool at all"]
)
def test_caches_that_may_stay_are_dropped_first(counts, driver, core):
    core.scheduler = scheduler_of(*counts)
    pair(driver)
    assert [name for name, *_ in core.events] == ["fp8refit_call", "flush", "fp8refit_call", "version"]


@pytest.mark.usefixtures("idle")
def test_caches_outside_the_engine_are_dropped_first(driver, core, engine):
    engine.vllm_config.kv_transfer_config = "a connector"
    pair(driver)
    assert core.events == [*BOTH, ("version", "5")]


@pytest.mark.usefixtures("idle")
def test_workers_in_the_core_s_own_process_write_after_it(driver, core, monkeypatch):
    monkeypatch.setattr("fp8refit_vllm.core.begin_call", lambda *_: None)
    pair(driver)
    assert [name for name, *_ in core.events] == ["fp8refit_call", "flush", "fp8refit_call", "version"]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("said", ["it says that blocks are in use", "ValueError: no such cache"])
def test_caches_that_stay_beside_new_weights_cost_the_engine(said, driver, core, engine):
    core.is_empty = False
    if "ValueError" in said:
        core.raises["flush"] = ValueError("no such cache")
    with pytest.raises(EngineLostError, match=f"{said}.* it now holds stale KV. Restart the engine"):
        pair(driver)
    assert [name for name, *_ in core.events] == ["fp8refit_call", "begin", "flush", "fp8refit_call"]


def test_a_worker_that_raises_costs_the_engine(driver, core):
    core.raises["fp8refit_call"] = RuntimeError("of a worker")
    with pytest.raises(EngineLostError, match=r"channel to its workers broke .*of a worker"):
        pair(driver)


@pytest.mark.parametrize(
    "reply", [{"version": 4}, {"version": 5, "is_dirty": True}, {"version": 5, "id": "an earlier one"}]
)
def test_a_version_that_not_every_rank_holds_is_not_named(reply, driver, core, engine):
    core.replies["second"] = [reply, {"version": 5}]
    if reply.get("is_dirty"):
        core.replies["second"] = [reply, reply]
    assert not pair(driver).is_refused
    assert core.events == BOTH
    finish(driver.publish_version(5))
    assert engine.versions == ["5"]


def test_a_version_is_named_once(driver, engine):
    pair(driver)
    finish(driver.publish_version(5))
    assert engine.versions == []
    finish(driver.publish_version(5))
    assert engine.versions == ["5"]


def test_another_version_than_the_core_named_is_named(driver, engine):
    pair(driver)
    finish(driver.publish_version(6))
    assert engine.versions == ["6"]


def begun(engine):
    driver = SyncDriver(SimpleNamespace(llm_engine=engine), PLUGIN_METHOD)
    assert driver.num_ahead == 2
    return driver, finish(driver.send((FIRST, SECOND), TIMEOUTS_S, begins=True))


def test_a_pair_that_is_begun_is_answered_when_it_is_awaited(engine, core):
    driver, answers = begun(engine)
    assert core.events == [*BOTH, ("version", "5")]
    found = finish(answers)
    assert (ids(found.said), found.is_refused) == (["second"] * 2, False)
    finish(driver.publish_version(5))
    assert engine.versions == []


def test_caches_that_stay_are_told_when_a_pair_is_awaited(engine, core):
    core.is_empty = False
    _, answers = begun(engine)
    with pytest.raises(CacheFlushError, match="vLLM kept its prefix cache"):
        finish(answers)


def test_what_an_engine_begins_depends_on_its_client_and_its_method(engine, async_engine):
    def num_ahead(method):
        return SyncDriver(SimpleNamespace(llm_engine=engine), method).num_ahead

    assert [num_ahead(method) for method in (PLUGIN_METHOD, EXTENSION_METHOD)] == [2, 1]
    engine.engine_core = SimpleNamespace()
    assert num_ahead(PLUGIN_METHOD) == 0
    assert AsyncDriver(async_engine, PLUGIN_METHOD).num_ahead == 2
    assert AsyncDriver(async_engine, EXTENSION_METHOD).num_ahead == 1


def test_a_core_that_dies_before_it_answers_is_lost_at_once(engine):
    engine.answers = lambda call_id, answer: setattr(engine.resources, "engine_dead", True)
    _, answers = begun(engine)
    start_s = time.monotonic()
    with pytest.raises(EngineLostError, match="left a call unanswered"):
        finish(answers)
    assert time.monotonic() - start_s < TIMEOUTS_S[0]


def test_a_core_that_dies_under_a_call_is_lost_at_once(engine):
    driver, may_end = SyncDriver(SimpleNamespace(llm_engine=engine), PLUGIN_METHOD), threading.Event()

    def die(*_):
        engine.resources.engine_dead = True
        may_end.wait(TIMEOUTS_S[0])

    engine.collective_rpc, engine.engine_core = die, SimpleNamespace(resources=engine.resources)
    start_s = time.monotonic()
    with pytest.raises(EngineLostError, match="left a call unanswered"):
        finish(finish(driver.send((FIRST,), TIMEOUTS_S[:1], begins=False)))
    assert time.monotonic() - start_s < TIMEOUTS_S[0]
    may_end.set()


class AsyncEngine(Engine):
    """The same as an AsyncLLM."""

    errored = False
    pause_generation = output_processor = None

    def __init__(self, core):
        super().__init__(core)
        self.engine_core = SimpleNamespace(call_utility_async=self.call_utility_async)

    async def call_utility_async(self, method, *arguments):
        return self.call_utility(method, *arguments)

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    async def collective_rpc(self, method, timeout_s, arguments):
        return super().collective_rpc(method, timeout_s, arguments)

    async def update_weight_version(self, version):
        self.versions.append(version)

    async def reset_mm_cache(self):
        super().reset_mm_cache()

    async def reset_encoder_cache(self):
        super().reset_encoder_cache()


@pytest.fixture
def async_engine(core):
    return AsyncEngine(core)


def pair_async(engine, method=PLUGIN_METHOD):
    """What comes of a pair, and what is said to the engine's client when version 5 and then 6 are to be named."""

    async def steps():
        driver = AsyncDriver(engine, method)
        found = await (await driver.send((FIRST, SECOND), TIMEOUTS_S, begins=False))
        for version in (5, 6):
            await driver.publish_version(version)
        return found

    return asyncio.run(steps())


def test_an_async_engine_has_the_kv_of_requests_that_are_kept_computed_anew(async_engine, core):
    found = pair_async(async_engine)
    assert core.events == [BOTH[0], ("flush", True, True), BOTH[2], ("version", "5")]
    assert (ids(found.said), found.is_refused, async_engine.versions) == (["second"] * 2, False, ["6"])


@pytest.fixture
def running(core):
    """Requests of the core: one that computes, and one that waits."""
    requests = [SimpleNamespace(num_computed_tokens=count, block_hashes=[b"a" * 32, b"b" * 32]) for count in (40, 0)]
    pool = Pool()
    managers = [SimpleNamespace(block_pool=pool)] * 2
    cache = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    core.scheduler = SimpleNamespace(kv_cache_manager=cache, requests=dict(enumerate(requests)))
    core.pool = pool
    return requests


WRITTEN = {
    "version": 5,
    "reports": (RankReport(num_tensors=1, bytes_read=2, bytes_written=3, fill_s=0.0, verify_s=0.0),),
}
STOPPED = [("stop", "keep", False), *BOTH, ("version", "5")]
PAIR = PLUGIN_METHOD, (FIRST, SECOND), TIMEOUTS_S, True, "keep"


@pytest.fixture
def dropping(core, monkeypatch):
    """Only what comes before and after the drop of caches is looked at."""
    monkeypatch.setattr(core, "reset_prefix_cache", lambda *_: core.note(*BOTH[1]) or core.is_empty)


@pytest.mark.usefixtures("dropping")
def test_a_core_stops_requests_and_lets_them_run_again_with_the_commit(core):
    core.replies["second"] = [WRITTEN, WRITTEN]
    outcome = Outcome(*carry_out(core, PAIR, 5.0))
    assert core.events == [*STOPPED, ("go on",)]
    assert outcome.still_s > outcome.flush_s > 0 and not outcome.is_stopped


@pytest.mark.usefixtures("dropping")
def test_a_core_waits_for_its_step_and_looks_for_work_afterwards(core):
    """vLLM waits for a message after it has called whoever waited for the end of a step."""
    core.stopped, core.replies["second"] = Future(), [WRITTEN, WRITTEN]
    answer = carry_out(core, PAIR, 5.0)
    assert core.events == STOPPED[:1] and not answer.done()
    time.sleep(0.02)
    core.stopped.set_result(None)
    outcome = Outcome(*answer.result(0))
    assert core.events == [*STOPPED, ("go on",)]
    assert outcome.pause_s >= 0.02 and outcome.still_s > 0
    assert core.input_queue.get_nowait() == (b"wake up", None)


@pytest.mark.usefixtures("dropping")
@pytest.mark.parametrize("is_paused", [True, False], ids=["late", "let run again"])
def test_a_core_writes_nothing_for_whoever_has_given_up(is_paused, core):
    core.stopped, core.is_paused = Future(), is_paused
    answer = carry_out(core, PAIR, 0.01 if is_paused else 5.0)
    time.sleep(0.02)
    core.stopped.set_result(None)
    outcome = Outcome(*answer.result(0))
    assert (outcome.ended, core.events) == ("busy", STOPPED[:1])


@pytest.mark.usefixtures("dropping")
@pytest.mark.parametrize(
    "replies",
    [
        [{"version": 5}, {"version": 5}],
        [WRITTEN, WRITTEN | {"version": 4}],
        [WRITTEN, WRITTEN | {"is_dirty": True}],
        [WRITTEN, WRITTEN | {"id": "an earlier one"}],
        [WRITTEN, {"error": ErrorRecord(kind="RankFailedError", message="it failed")}],
        [WRITTEN, "rubbish"],
    ],
    ids=["nothing written", "versions differ", "dirty", "an earlier answer", "failed", "rubbish"],
)
def test_requests_stay_stopped_unless_every_rank_has_committed_one_policy(replies, core):
    core.replies["second"] = replies
    outcome = Outcome(*carry_out(core, PAIR, 5.0))
    assert outcome.is_stopped and outcome.still_s == 0.0
    assert ("go on",) not in core.events


@pytest.mark.usefixtures("dropping")
def test_requests_stay_stopped_while_caches_stay(core):
    core.is_empty = False
    outcome = Outcome(*carry_out(core, PAIR, 5.0))
    assert (outcome.ended, outcome.is_stopped) == ("kept", True)
    assert core.events == STOPPED[:3]


def test_requests_stay_stopped_if_a_rank_refuses(core):
    core.replies["first"][1] = "rubbish"
    outcome = Outcome(*carry_out(core, PAIR, 5.0))
    assert (outcome.ended, outcome.is_stopped) == ("refused", True)
    assert core.events == STOPPED[:2]


@pytest.mark.usefixtures("dropping")
def test_a_scheduler_that_stays_paused_after_a_commit_is_left_to_the_driver(core):
    core.raises["go on"], core.replies["second"] = RuntimeError("of the scheduler"), [WRITTEN, WRITTEN]
    outcome = Outcome(*carry_out(core, PAIR, 5.0))
    assert (outcome.ended, outcome.is_stopped, outcome.still_s) == ("done", True, 0.0)


@pytest.mark.usefixtures("dropping")
@pytest.mark.parametrize("waits", [False, True])
def test_whoever_called_a_core_hears_what_a_worker_raised(waits, core):
    core.raises["fp8refit_call"] = RuntimeError("of a worker")
    core.stopped = Future() if waits else None
    with pytest.raises(RuntimeError, match="of a worker"):
        answer = carry_out(core, PAIR, 5.0)
        core.stopped.set_result(None)
        answer.result(0)


def test_requests_that_go_on_with_their_kv_get_hashes_that_no_other_can_have(core, running):
    core.reset_prefix_cache = lambda *asked: core.note(*asked) or core.pool.get_num_free_blocks() == 7
    found = carry_out(core, (PLUGIN_METHOD, (FIRST, SECOND), TIMEOUTS_S, False, "continue"))
    assert (found[0], core.events[1]) == ("done", (False, False))
    assert core.pool.get_num_free_blocks() == 5
    went_on, waiting = running
    assert waiting.block_hashes == [b"a" * 32, b"b" * 32]
    assert [len(each) for each in went_on.block_hashes] == [32, 32]
    assert not set(went_on.block_hashes) & set(waiting.block_hashes)
    assert len(set(went_on.block_hashes)) == 2
    first = list(went_on.block_hashes)
    carry_out(core, (PLUGIN_METHOD, (FIRST, SECOND), TIMEOUTS_S, False, "continue"))
    assert not set(first) & set(went_on.block_hashes)


def test_a_core_that_cannot_set_kv_apart_keeps_the_old_policy(core, running):
    core.raises["flush"] = RuntimeError("another vLLM")
    found = carry_out(core, (PLUGIN_METHOD, (FIRST, SECOND), TIMEOUTS_S, False, "continue"))
    assert (found[0], found[4]) == ("kept", "RuntimeError: another vLLM")
    assert [name for name, *_ in core.events] == ["fp8refit_call", "flush"]
    assert core.pool.get_num_free_blocks() == 5


def test_an_async_engine_s_caches_that_stay_leave_the_old_policy(async_engine, core):
    core.raises["flush"] = RuntimeError("blocks are not freed")
    with pytest.raises(CacheFlushError, match=r"nothing was written.*blocks are not freed"):
        pair_async(async_engine)
    assert [name for name, *_ in core.events] == ["fp8refit_call", "flush"]


def test_an_async_engine_s_core_that_dies_before_it_answers_is_lost_at_once(async_engine):
    async def never(*_):
        async_engine.errored = True
        await asyncio.sleep(10 * TIMEOUTS_S[0])

    async_engine.engine_core.call_utility_async = never
    start_s = time.monotonic()
    with pytest.raises(EngineLostError, match="left a call unanswered"):
        pair_async(async_engine)
    assert time.monotonic() - start_s < TIMEOUTS_S[0]


def test_an_async_engine_s_core_that_raises_is_lost(async_engine, core):
    core.raises["fp8refit_call"] = ValueError("no such method")
    with pytest.raises(EngineLostError, match="channel to its workers broke"):
        pair_async(async_engine)


@pytest.mark.parametrize("what", ["an extension's method", "more than text", "another kind of client"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_core_that_does_not_take_two_messages_is_given_one_after_the_other(
    is_async, what, engine, async_engine, core
):
    engine = async_engine if is_async else engine
    if what == "more than text":
        engine.vllm_config.model_config.is_multimodal_model = True
    elif what == "another kind of client":
        engine.engine_core = SimpleNamespace()
    method = EXTENSION_METHOD if what == "an extension's method" else PLUGIN_METHOD
    found = pair_async(engine, method) if is_async else pair(SyncDriver(SimpleNamespace(llm_engine=engine), method))
    other_caches = [("multimodal",), ("encoder",)] if what == "more than text" else []
    first, second = ((method, *asked) for _, *asked in (BOTH[0], BOTH[2]))
    assert core.events == [first, ("flush", is_async, True), *other_caches, second]
    assert (ids(found.said), found.is_refused) == (["second"] * 2, False)
    assert engine.versions == (["5", "6"] if is_async else [])
    core.events.clear()
    core.replies["first"][1] = "rubbish"
    found = pair_async(engine, method) if is_async else pair(SyncDriver(SimpleNamespace(llm_engine=engine), method))
    assert (core.events, found.is_refused) == ([first], True)
