"""Drives `vllm.LLM`: drops caches, and sends messages to its workers. Also what both vLLM drivers share."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.admission import cache_kept, refusal, unfinished
from fp8refit.driver.engine import Driver
from fp8refit.errors import (
    CacheFlushError,
    EngineAsleepError,
    EngineLostError,
    RankFailedError,
    RefitError,
    UnsupportedEngineError,
)
from fp8refit.remote.protocol.channel import Answers, Channel, send_in_turn
from fp8refit_vllm.compat import token_ids
from fp8refit_vllm.core import CORE_METHOD, Outcome, Pair
from fp8refit_vllm.core_compat import (
    begin_call,
    call_in_time,
    core_beginner,
    has_queue,
    in_process_executor,
    is_core_dead,
    says_dead,
)
from fp8refit_vllm.worker import PLUGIN_METHOD

T = TypeVar("T")


def kept(said: str = "") -> CacheFlushError:
    """The error for a prefix cache that vLLM would not reset."""
    return cache_kept("vLLM kept its prefix cache", "streaming sessions, transfers of KV", said=said)


def error_of(error: Exception) -> RefitError:
    """Translate what vLLM raised. It wraps any error of its engine core in a bare `Exception`."""
    if isinstance(error, TimeoutError) or says_dead(error):
        return EngineLostError(
            f"the engine did not answer in time, or died ({type(error).__name__}: {error}); restart it. If it is only "
            "slow, as when it reads files, raise timeout_s"
        )
    return RankFailedError(f"vLLM raised {type(error).__name__}: {error}")


def channel_lost(error: RankFailedError) -> EngineLostError:
    """The error for a worker call that raised. Our worker method never raises, so the channel itself is broken."""
    return EngineLostError(f"the engine's channel to its workers broke ({error}); restart the engine")


def tokenized(found: list[list[int]] | None) -> list[list[int]]:
    """Token ids, if the engine has a tokenizer.

    Raises:
        UnsupportedEngineError: It has none.
    """
    if found is None:
        raise UnsupportedEngineError(
            "calibration: this engine was booted with skip_tokenizer_init; pass token ids instead of prompts"
        )
    return found


def has_connector(config: Any) -> bool:
    """Whether KV is also kept outside the engine."""
    return config.kv_transfer_config is not None


def takes_pairs(config: Any, method: str) -> bool:
    """Whether an engine core takes two messages in one exchange.

    Not without our worker method, and not if the model is multimodal: then not all caches are in the core.
    """
    return method == PLUGIN_METHOD and not config.model_config.is_multimodal_model


def to_answers(outcome: Outcome) -> Answers:
    """Turn the outcome of a two-message exchange into answers.

    Raises:
        CacheFlushError: Caches could not be dropped; nothing was written.
        EngineLostError: Caches could not be dropped although new weights were written.
    """
    if outcome.ended == "stale":
        raise EngineLostError(
            f"vLLM failed to drop its prefix cache ({outcome.said or 'it says that blocks are in use'}) while new weights "
            "were written; it now holds stale KV. Restart the engine"
        )
    if outcome.ended == "kept":
        raise kept(outcome.said)
    return Answers(
        said=outcome.answers,
        is_refused=outcome.ended == "refused",
        pause_s=outcome.pause_s,
        flush_s=outcome.flush_s,
        still_s=outcome.still_s,
    )


class SyncDriver(Driver, Channel):
    """Drives a `vllm.LLM`, wherever its engine core and its workers run.

    Args:
        llm: The LLM.
        method: Name of the worker method that takes our messages.
    """

    is_asynchronous = False

    def __init__(self, llm: Any, method: str) -> None:
        self._engine = llm.llm_engine
        self._method = method
        self._executor = in_process_executor(self._engine)
        self._timeout_s = RefitConfig().timeout_s
        self.config = self._engine.vllm_config
        self.worker = getattr(getattr(self._executor, "driver_worker", None), "worker", None)
        self._published: int | None = None

    @override
    async def check_ready(self) -> None:
        if self._engine.has_unfinished_requests():
            raise unfinished("LLM")
        if "weights" in getattr(self._executor, "sleeping_tags", ()):
            raise EngineAsleepError('the weights are asleep; call llm.wake_up(tags=["weights"]) before refit')

    @override
    async def pause(self, config: RefitConfig) -> int:
        self._timeout_s = config.timeout_s
        await self.refuse("a refit is under way")
        return 0

    @override
    async def resume(self) -> None:
        self._engine.__dict__.pop("add_request", None)

    async def refuse(self, reason: str) -> None:
        """Refuse requests to this LLM: every entry point (`generate`, `chat`, `encode`) calls `add_request`."""

        def refuse(*_: Any, **__: Any) -> None:
            raise refusal(reason)

        self._engine.__dict__["add_request"] = refuse

    @override
    async def flush_caches(self) -> None:
        if not self._ask(lambda: self._engine.reset_prefix_cache(False, has_connector(self.config))):
            raise kept()
        if self.config.model_config.is_multimodal_model:
            self._ask(self._engine.reset_mm_cache)
            self._ask(self._engine.reset_encoder_cache)

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        return tokenized(await token_ids(self._engine, prompts))

    @override
    async def publish_version(self, version: int) -> None:
        published, self._published = self._published, None
        if published != version and hasattr(self._engine, "set_weight_version"):
            self._ask(lambda: self._engine.set_weight_version(str(version)))

    @property
    @override
    def num_ahead(self) -> int:
        if core_beginner(self._engine) is None:
            return int(has_queue(self._executor))
        return 2 if takes_pairs(self.config, self._method) else 1

    @override
    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        """Send one message to the workers, or two to the core, which publishes the version once every rank has committed it."""
        self._published = None
        if len(messages) > 1 and self.num_ahead < 2:
            return send_in_turn(self._call, self.flush_caches, messages, timeouts_s)
        with _translated(of_channel=True):
            wait = self._begin(messages, timeouts_s)
        return self._hear(wait, timeouts_s)

    async def _call(self, message: str, timeout_s: float) -> Sequence[str]:
        return (await (await self.send((message,), (timeout_s,), begins=False))).said

    def _begin(self, messages: Sequence[str], timeouts_s: Sequence[float]) -> Callable[[float], Any]:
        """Send messages, and return a function that waits for the outcome with a time limit.

        vLLM's own calls block, so a core in another process is asked through its client's message queue. Where that is
        impossible, it is the returned function that sends.
        """
        begin, method = core_beginner(self._engine), self._method
        if len(messages) > 1:
            assert begin is not None, "num_ahead says so"
            return begin(CORE_METHOD, Pair(method, tuple(messages), tuple(timeouts_s), has_connector(self.config)))
        if begin is not None:
            return begin("collective_rpc", method, timeouts_s[0], tuple(messages), None)
        wait = begin_call(self._executor, method, timeouts_s[0], messages[0])
        if wait is not None:
            return lambda _: wait()
        call = partial(self._engine.collective_rpc, method, timeouts_s[0], tuple(messages))
        return lambda timeout_s: self._in_time(call, timeout_s)

    async def _hear(self, wait: Callable[[float], Any], timeouts_s: Sequence[float]) -> Answers:
        with _translated(of_channel=True):
            if len(timeouts_s) == 1:
                return Answers(said=wait(timeouts_s[0]))
            outcome = Outcome(*wait(sum(timeouts_s) + self._timeout_s))
        self._published = outcome.version or None
        return to_answers(outcome)

    def _ask(self, call: Callable[[], T]) -> T:
        """Call vLLM.

        Raises:
            EngineLostError: The core is dead or stuck.
            RankFailedError: It raised something.
        """
        with _translated():
            return self._in_time(call, self._timeout_s)

    def _in_time(self, call: Callable[[], T], timeout_s: float) -> T:
        """Call vLLM, with a time limit if its engine core is in another process."""
        if self._executor is not None:
            return call()
        return call_in_time(call, timeout_s, partial(is_core_dead, self._engine))


@contextmanager
def _translated(*, of_channel: bool = False) -> Iterator[None]:
    """Translate the errors of a call to vLLM, or of one to its workers, which break the channel to them."""
    try:
        yield
    except Exception as error:  # see `error_of`
        found = error_of(error)
        raise (channel_lost(found) if of_channel and isinstance(found, RankFailedError) else found) from error
