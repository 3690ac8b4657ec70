"""The driver's side of `vllm.LLM`: the control plane of `fp8refit.driver.engine.Engine`, and the channel to its workers."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
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
from fp8refit_vllm.compat import (
    begin_in_workers,
    call_in_time,
    core_caller,
    in_process_executor,
    says_dead,
    token_ids,
)
from fp8refit_vllm.core import CORE_METHOD, Outcome
from fp8refit_vllm.worker import PLUGIN_METHOD

T = TypeVar("T")


def kept(said: str = "") -> CacheFlushError:
    """What it means that vLLM did not reset its prefix cache."""
    return cache_kept("vLLM kept its prefix cache", "streaming sessions, transfers of KV", said=said)


def error_of(error: Exception) -> RefitError:
    """The error for what vLLM raised: it passes on whatever its engine core said, as a bare Exception."""
    if isinstance(error, TimeoutError) or says_dead(error):
        return EngineLostError(
            f"the engine did not answer in time, or died ({type(error).__name__}: {error}); start the engine again. If it only "
            "takes longer, as reading files may, raise timeout_s"
        )
    return RankFailedError(f"vLLM raised {type(error).__name__}: {error}")


def channel_lost(error: RankFailedError) -> EngineLostError:
    """What it means that a call to the workers raised, which our method never does."""
    return EngineLostError(f"the engine's channel to its workers broke ({error}); start the engine again")


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


def pair_caller(engine: Any, method: str, *, keeps_requests: bool) -> Callable[..., Any] | None:
    """What gives an engine core two messages and their timeouts at once, for an `Outcome`; None if it does not take them.

    Caches of other input than text are not all in the core.

    Args:
        engine: See `fp8refit_vllm.compat.core_caller`.
        method: The workers' method for us.
        keeps_requests: Whether requests that are kept have their KV computed anew.
    """
    call_core, config = core_caller(engine), engine.vllm_config
    if call_core is None or method != PLUGIN_METHOD or config.model_config.is_multimodal_model:
        return None
    has_connector = config.kv_transfer_config is not None
    return lambda *pair: call_core(CORE_METHOD, method, *pair, has_connector, keeps_requests)


def pair_answers(outcome: Outcome) -> PairAnswers:
    """What came of two messages to an engine core.

    Raises:
        CacheFlushError: Caches stay.
        EngineLostError: They stay beside weights that were written.
    """
    if outcome.ended == "stale":
        raise EngineLostError(
            f"vLLM kept its prefix cache, of which nothing was in use ({outcome.said or 'it says that blocks are'}), while new "
            "weights were written: what it holds is of the policy before. Start the engine again"
        )
    if outcome.ended == "kept":
        raise kept(outcome.said)
    return PairAnswers(answers=outcome.answers, is_refused=outcome.ended == "refused", flush_s=outcome.flush_s)


class SyncDriver(Driver, Channel, Pairs):
    """A `vllm.LLM`, wherever its engine core and its workers run.

    Args:
        llm: The LLM.
        method: Name of the worker's method that `call` calls.
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
            raise EngineAsleepError('the weights sleep; call llm.wake_up(tags=["weights"]) before refit')

    @override
    async def pause(self, config: RefitConfig) -> int:
        self._timeout_s = config.timeout_s
        await self.refuse("a refit is under way")
        return 0

    @override
    async def resume(self) -> None:
        self._engine.__dict__.pop("add_request", None)

    async def refuse(self, reason: str) -> None:
        """Refuse at admission, on this instance alone; every entry (`generate`, `chat`, `encode`) adds requests here."""

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
        """The core names the policy in its outputs too, once every rank has it."""
        call_core = pair_caller(self._engine, self._method, keeps_requests=False)
        if call_core is None:
            return await call_in_turn(self.call, self.flush_caches, first, second, timeouts_s=timeouts_s)
        self._published = None
        timeout_s = sum(timeouts_s) + self._timeout_s
        try:
            outcome = Outcome(*self._ask(lambda: call_core(first, second, timeouts_s), timeout_s=timeout_s))
        except RankFailedError as error:
            raise channel_lost(error) from error
        self._published = outcome.version or None
        return pair_answers(outcome)

    def _ask(self, call: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Call vLLM. What its engine core takes too long for, in another process, is not waited for.

        Raises:
            EngineLostError: The core is dead or stuck.
            RankFailedError: It raised something.
        """
        try:
            if self._executor is not None:
                return call()
            return call_in_time(call, self._timeout_s if timeout_s is None else timeout_s)
        except Exception as error:  # see `error_of`
            raise error_of(error) from error


@contextmanager
def _errors_of_channel() -> Iterator[None]:
    """Around a call to the workers.

    Raises:
        EngineLostError: The core is dead or stuck, or the channel broke.
    """
    try:
        yield
    except Exception as error:  # see `error_of`
        lost = error_of(error)
        raise (channel_lost(lost) if isinstance(lost, RankFailedError) else lost) from error
