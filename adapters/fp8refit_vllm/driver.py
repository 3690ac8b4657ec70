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
from fp8refit.remote.channel import Channel
from fp8refit.remote.message_pairs import PairAnswers, Pairs, call_in_turn
from fp8refit_vllm.compat import token_ids
from fp8refit_vllm.core import CORE_METHOD, Outcome
from fp8refit_vllm.core_compat import (
    begin_in_workers,
    call_in_time,
    core_beginner,
    core_caller,
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


def pair_caller(
    engine: Any,
    method: str,
    *,
    keeps_requests: bool,
    reach: Callable[[Any], Callable[..., Any] | None] = core_caller,
) -> Callable[..., Any] | None:
    """A function that sends two messages to the engine core in one exchange and returns an `Outcome`.

    None if the core lacks our method, or if the model is multimodal: then not all caches are in the core.

    Args:
        engine: See `fp8refit_vllm.core_compat.core_caller`.
        method: Name of the worker method that takes our messages.
        keeps_requests: Whether running requests were kept, so that their KV must be recomputed.
        reach: How to call the core: `core_caller`, or `core_beginner` for a function that waits for the outcome.
    """
    call_core, config = reach(engine), engine.vllm_config
    if call_core is None or method != PLUGIN_METHOD or config.model_config.is_multimodal_model:
        return None
    has_connector = config.kv_transfer_config is not None
    return lambda *pair: call_core(CORE_METHOD, method, *pair, has_connector, keeps_requests)


def pair_answers(outcome: Outcome) -> PairAnswers:
    """Turn the outcome of a two-message exchange into answers.

    Raises:
        CacheFlushError: Caches could not be dropped; nothing was written.
        EngineLostError: Caches could not be dropped although new weights were written.
    """
    if outcome.ended == "stale":
        raise EngineLostError(
            f"vLLM kept an unused prefix cache ({outcome.said or 'it says that blocks are in use'}) while new weights "
            "were written, so the cache belongs to the old policy. Restart the engine"
        )
    if outcome.ended == "kept":
        raise kept(outcome.said)
    return PairAnswers(answers=outcome.answers, is_refused=outcome.ended == "refused", flush_s=outcome.flush_s)


class SyncDriver(Driver, Channel, Pairs):
    """Drives a `vllm.LLM`, wherever its engine core and its workers run.

    Args:
        llm: The LLM.
        method: Name of the worker method that `call` invokes.
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
        has_connector = self.config.kv_transfer_config is not None
        if not self._ask(lambda: self._engine.reset_prefix_cache(False, has_connector)):
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

    @override
    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        self._published = None
        try:
            return self._ask(
                lambda: self._engine.collective_rpc(self._method, timeout_s, (message,)), timeout_s=timeout_s
            )
        except RankFailedError as error:
            raise channel_lost(error) from error

    @override
    async def begin(self, message: str, *, timeout_s: float) -> Awaitable[Sequence[str]] | None:
        with _errors_of_channel():
            wait = begin_in_workers(self._engine, self._method, timeout_s, message)
        return self._wait(wait, timeout_s) if wait is not None else None

    async def _wait(self, wait: Callable[[float], Sequence[str]], timeout_s: float) -> Sequence[str]:
        with _errors_of_channel():
            return wait(timeout_s)

    @override
    async def call_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> PairAnswers:
        """Send both messages in one exchange. The core publishes the version once every rank has committed it."""
        call_core = pair_caller(self._engine, self._method, keeps_requests=False)
        if call_core is None:
            return await call_in_turn(self.call, self.flush_caches, first, second, timeouts_s=timeouts_s)
        self._published = None
        timeout_s = sum(timeouts_s) + self._timeout_s
        try:
            outcome = Outcome(*self._ask(lambda: call_core(first, second, timeouts_s), timeout_s=timeout_s))
        except RankFailedError as error:
            raise channel_lost(error) from error
        return self._hear(outcome)

    @property
    @override
    def can_begin(self) -> bool:
        return self._pair_beginner() is not None

    @override
    async def begin_pair(self, first: str, second: str, *, timeouts_s: tuple[float, float]) -> Awaitable[PairAnswers]:
        begin = self._pair_beginner()
        assert begin is not None, "can_begin says so"
        self._published = None
        with _errors_of_channel():
            wait = begin(first, second, timeouts_s)
        return self._wait_for_pair(wait, sum(timeouts_s) + self._timeout_s)

    def _pair_beginner(self) -> Callable[..., Any] | None:
        return pair_caller(self._engine, self._method, keeps_requests=False, reach=core_beginner)

    async def _wait_for_pair(self, wait: Callable[[float], Sequence[Any]], timeout_s: float) -> PairAnswers:
        with _errors_of_channel():
            outcome = Outcome(*wait(timeout_s))
        return self._hear(outcome)

    def _hear(self, outcome: Outcome) -> PairAnswers:
        self._published = outcome.version or None
        return pair_answers(outcome)

    def _ask(self, call: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Call vLLM, with a time limit if its engine core is in another process.

        Raises:
            EngineLostError: The core is dead or stuck.
            RankFailedError: It raised something.
        """
        try:
            if self._executor is not None:
                return call()
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            return call_in_time(call, timeout_s, partial(is_core_dead, self._engine))
        except Exception as error:  # see `error_of`
            raise error_of(error) from error


@contextmanager
def _errors_of_channel() -> Iterator[None]:
    """Translate the errors of a call to the workers.

    Raises:
        EngineLostError: The core is dead or stuck, or the channel broke.
    """
    try:
        yield
    except Exception as error:  # see `error_of`
        lost = error_of(error)
        raise (channel_lost(lost) if isinstance(lost, RankFailedError) else lost) from error
