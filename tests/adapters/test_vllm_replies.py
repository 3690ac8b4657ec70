"""Replies that vLLM leaves unread, and requests that its core refuses. Real ones: `tests/vllm/test_dirty_engines.py`."""

import pickle
from collections import deque
from types import SimpleNamespace

import pytest
from fp8refit_vllm.core_compat import raise_refusals, skip_unread_replies

from fp8refit import EngineDirtyError
from tests.adapters.fake_modules import put_modules

NUM_RANKS = 3


class Queue:
    """A worker's replies."""

    def __init__(self):
        self.replies = deque()
        self.name = "of a worker"

    def dequeue(self, timeout=None):
        if not self.replies:
            raise TimeoutError
        return self.replies.popleft()


class Executor:
    """Calls workers and reads their replies as vLLM's `MultiprocExecutor` does."""

    def __init__(self):
        self.queues = [Queue() for _ in range(NUM_RANKS)]
        self.response_mqs = list(self.queues)

    def call(self, number, *, failing=(), late=(), rank=None):
        """What the ranks reply to the call of that number; those that are late do so when `arrive` is called."""
        self.late = [(place, (True, number)) for place in late]
        for place in range(NUM_RANKS) if rank is None else (rank,):
            if place not in late:
                self.queues[place].replies.append((place not in failing, number))
        responses = []
        for mq in self.response_mqs if rank is None else (self.response_mqs[rank],):
            is_good, result = mq.dequeue(timeout=1)
            if not is_good:
                raise RuntimeError(f"Worker failed with error '{result}'")
            responses.append(result)
        return responses

    def arrive(self):
        for place, reply in self.late:
            self.queues[place].replies.append(reply)


@pytest.fixture
def executor():
    executor = Executor()
    skip_unread_replies(SimpleNamespace(model_executor=executor))
    return executor


def test_without_it_vllm_takes_the_unread_replies_for_those_to_the_next_calls():
    executor = Executor()
    with pytest.raises(RuntimeError):
        executor.call(1, failing=[0, 1, 2])
    with pytest.raises(RuntimeError, match="'1'"):
        executor.call(2)


def test_a_worker_never_waits_for_room_however_many_calls_fail(executor):
    """vLLM's queues have room for ten; a worker that waits for room no longer reads calls."""
    for number in range(20):
        with pytest.raises(RuntimeError, match=f"'{number}'"):
            executor.call(number, failing=[0, 1, 2])
    assert max(len(queue.replies) for queue in executor.queues) <= 1
    assert executor.call(20) == [20] * NUM_RANKS


@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_replies_that_an_error_left_unread_are_skipped(failing, executor):
    for number in range(10, 16, 3):
        with pytest.raises(RuntimeError, match=f"'{number}'"):
            executor.call(number, failing=failing)
        with pytest.raises(RuntimeError, match=f"'{number + 1}'"):
            executor.call(number + 1, failing=failing)
        assert executor.call(number + 2, rank=1) == [number + 2]
        assert executor.call(20) == [20] * NUM_RANKS
    assert not any(queue.replies for queue in executor.queues)


@pytest.mark.parametrize("late", [[0], [1], [0, 2], [0, 1, 2]])
def test_replies_that_came_too_late_are_skipped(late, executor):
    with pytest.raises(TimeoutError):
        executor.call(1, late=late)
    executor.arrive()
    assert executor.call(2) == [2] * NUM_RANKS
    assert not any(queue.replies for queue in executor.queues)


def test_queues_are_what_they_were_in_everything_else(executor):
    assert [queue.name for queue in executor.response_mqs] == ["of a worker"] * NUM_RANKS
    assert executor.call(1) == [1] * NUM_RANKS
    alone = SimpleNamespace(model_executor=SimpleNamespace())
    skip_unread_replies(alone)
    assert vars(alone.model_executor) == {}


class GracefulHTTPError(Exception):
    """What vLLM's `AsyncLLM.generate` raises as it is."""

    def __init__(self, message, http_status):
        raise AssertionError("it has arguments of its own")


class Processor:
    """vLLM's `OutputProcessor`."""

    def __init__(self, **states):
        self.request_states = states

    def process_outputs(self, outputs, timestamp=None):
        return [output.request_id for output in outputs]

    def abort_requests(self, names, internal):
        assert internal
        for name in names:
            parts = [
                key
                for key, state in self.request_states.items()
                if getattr(state.parent_req, "request_id", key) == name
            ]
            for key in parts:
                state = self.request_states.pop(key)
                if state.queue is not None:
                    state.queue.put("aborted")


class Collector:
    """vLLM's `RequestOutputCollector`: an error stays."""

    def __init__(self):
        self.output = None

    def put(self, output):
        if self.output is None or isinstance(output, Exception):
            self.output = output


class LLMEngine:
    """vLLM's, whose core gives these outputs."""

    def __init__(self, processor, outputs):
        self.output_processor, self.outputs, self.aborted = processor, outputs, []

    def step(self):
        return self.output_processor.process_outputs(self.outputs, timestamp=1)

    def abort_request(self, names, internal):
        self.aborted += names
        self.output_processor.abort_requests(names, internal=internal)


@pytest.fixture
def vllm(monkeypatch):
    """Classes of vLLM's that raise refusals."""
    modules = put_modules(
        monkeypatch,
        [
            "vllm.exceptions.GracefulHTTPError",
            "vllm.v1.engine.llm_engine.LLMEngine",
            "vllm.v1.engine.output_processor.OutputProcessor",
        ],
    )
    modules["vllm.exceptions"].GracefulHTTPError = GracefulHTTPError
    engine = modules["vllm.v1.engine.llm_engine"].LLMEngine = type("LLMEngine", (LLMEngine,), {"step": LLMEngine.step})
    methods = {"process_outputs": Processor.process_outputs}
    processor = modules["vllm.v1.engine.output_processor"].OutputProcessor = type(
        "OutputProcessor", (Processor,), methods
    )
    for _ in range(2):  # plugins may be loaded again
        raise_refusals()
    return SimpleNamespace(LLMEngine=engine, Processor=processor)


def output(name, stop_reason=None):
    return SimpleNamespace(request_id=name, stop_reason=stop_reason)


def state(queue=None, parent=None):
    return SimpleNamespace(queue=queue, parent_req=SimpleNamespace(request_id=parent) if parent else None)


REFUSED = "fp8refit: half written"


def test_a_refused_request_of_an_async_llm_gets_an_error_and_the_others_their_outputs(vllm):
    refused, other, several = Collector(), Collector(), Collector()
    parts = {"several-0": state(several, "several"), "several-1": state(several, "several")}
    processor = vllm.Processor(refused=state(refused), other=state(other), **parts)
    outputs = [output("refused", REFUSED), output("other", 7), *(output(name, REFUSED) for name in parts)]
    assert processor.process_outputs([*outputs, output("gone", REFUSED), output("word", "stop")]) == ["other", "word"]
    assert list(processor.request_states) == ["other"]
    assert other.output is None
    for collector in (refused, several):
        assert isinstance(collector.output, EngineDirtyError)
        assert isinstance(collector.output, GracefulHTTPError)
        assert collector.output.http_status == 503
        assert str(collector.output) == "this engine refuses requests: half written"
        sent = pickle.loads(pickle.dumps(collector.output))
        assert (type(sent), str(sent)) == (EngineDirtyError, str(collector.output))


def test_a_refused_request_of_an_llm_raises_and_none_is_left(vllm):
    engine = vllm.LLMEngine(vllm.Processor(a=state(), b=state()), [output("a", REFUSED)])
    with pytest.raises(EngineDirtyError, match="this engine refuses requests: half written"):
        engine.step()
    assert engine.aborted == ["a", "b"]
    assert engine.output_processor.request_states == {}
    engine.outputs = [output("b")]
    assert engine.step() == ["b"]
