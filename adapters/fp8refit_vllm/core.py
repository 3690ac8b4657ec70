"""Runs in vLLM's engine core: stop requests, prepare on every rank, drop caches, write on every rank, and let requests run
again, all in one exchange.

A round trip to a core in another process costs more than most steps of a refit, and dropping the caches block by block
costs as much again. `worker.register` adds `carry_out` to the core's class.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from fp8refit.remote.protocol.messages import common_version, have_done
from fp8refit_vllm.core_compat import begin_call, is_cache_idle, publish_in_core, set_apart_in_core, stop_requests

logger = logging.getLogger(__name__)

CORE_METHOD = "fp8refit_pair"
SET_APART_METHOD = "fp8refit_set_apart"
FREEZE_METHOD = "fp8refit_freeze"


class Pair(NamedTuple):
    """Two requests to every rank, and how to drop the caches between them. Sent as a list."""

    method: str
    """Name of the worker method that takes our messages."""
    requests: Sequence[str]
    timeouts_s: Sequence[float]
    """Time limit of each request."""
    has_connector: bool
    """Whether a KV connector also keeps KV outside the engine."""
    in_flight: str = ""
    """Of the driver's `RefitConfig`; empty if no request can be running. With `keep`, KV is recomputed. With `continue`, it
    stays, apart from that of later requests."""


class Outcome(NamedTuple):
    """How far the core got. Sent as a list."""

    ended: Literal["busy", "refused", "kept", "stale", "done"]
    """`busy`: requests did not stop in time, and nothing was sent. `refused`: a rank failed the first request. `kept`: the
    caches could not be dropped, and the second request was not sent. `stale`: the second was sent, and the caches could not
    be dropped. `done`: both were sent and the caches are gone."""
    answers: list[str]
    """Each rank's answer to the last request it was sent."""
    flush_s: float = 0.0
    """Seconds that the ranks waited while caches were dropped."""
    version: int = 0
    """Policy version that every rank committed and that the core's outputs now carry; 0 if none."""
    said: str = ""
    """The error that dropping the caches raised, as text."""
    pause_s: float = 0.0
    """Seconds until the step ended that was running when the core stopped requests."""
    still_s: float = 0.0
    """Seconds from then until the core let requests run again; 0 if it has not, or did not stop them."""
    is_stopped: bool = False
    """Whether the core has stopped requests, and they are stopped still."""


def carry_out(core: Any, pair: Sequence[Any], stops_within_s: float = 0.0) -> "list[Any] | Future[list[Any]]":
    """Stop requests if they run, and send a pair. Returns an `Outcome` as a list, or a future of it.

    Args:
        core: vLLM's engine core.
        pair: A `Pair`.
        stops_within_s: Time limit for stopping requests; 0 if none can run. They run again if all ranks have committed a policy
            by the second request.
    """
    asked = Pair(*pair)
    if not stops_within_s:
        return list(_send(core, asked))

    def send_and_go_on(pause_s: float) -> list[Any]:
        start_s, outcome = time.perf_counter(), _send(core, asked)._replace(pause_s=pause_s)
        if not (_is_committed(outcome, asked.requests[-1]) and _resume(core)):
            return list(outcome._replace(is_stopped=True))
        return list(outcome._replace(still_s=time.perf_counter() - start_s))

    return stop_requests(
        core, send_and_go_on, lambda: list(Outcome("busy", [], is_stopped=True)), timeout_s=stops_within_s
    )


def _resume(core: Any) -> bool:
    """Let requests run again. Returns whether that succeeded; otherwise the driver orders it, and hears why not."""
    try:
        core.resume_scheduler()
    except Exception:
        logger.warning("the engine core did not let requests run after a write", exc_info=True)
        return False
    return True


def _send(core: Any, pair: Pair) -> Outcome:
    """Send the first request to every rank. If all succeed, drop the caches and send the second.

    If no request uses the caches, dropping them cannot fail: then workers in other processes get the second at once, and the
    core drops the caches meanwhile. Otherwise the caches are dropped first.
    """
    method, (first, second), timeouts_s, has_connector, in_flight = pair
    answers = core.collective_rpc(method, timeouts_s[0], (first,))
    if not have_done(answers, first):
        return Outcome("refused", answers)
    drop = partial(core.reset_prefix_cache, bool(in_flight), has_connector)
    if in_flight == "continue":
        drop = partial(set_apart_in_core, core)
    is_idle = not has_connector and is_cache_idle(core)
    wait = begin_call(core.model_executor, method, timeouts_s[1], second) if is_idle else None
    if wait is not None:
        is_empty, _, said = _try_to(drop)
        answers = wait()
        if not is_empty:
            return Outcome("stale", answers, said=said)
        return Outcome("done", answers, version=_publish(core, answers, second))
    is_empty, flush_s, said = _try_to(drop)
    if not is_empty:
        return Outcome("kept", [], flush_s, said=said)
    answers = core.collective_rpc(method, timeouts_s[1], (second,))
    return Outcome("done", answers, flush_s, _publish(core, answers, second))


def _is_committed(outcome: Outcome, request: str) -> bool:
    """Whether all ranks have committed one policy by the request, and the caches of the last one are gone."""
    try:
        return outcome.ended == "done" and common_version(outcome.answers, if_written_by=request) is not None
    except ValidationError:  # the driver reads the answers, too, and says so
        return False


def _try_to(drop: Callable[[], bool]) -> tuple[bool, float, str]:
    """Drop the caches; return whether that worked, the seconds it took, and the error as text. Never ends the core."""
    start_s = time.perf_counter()
    try:
        is_empty, said = drop(), ""
    except Exception as error:  # noqa: BLE001 - the driver reports it
        is_empty, said = False, f"{type(error).__name__}: {error}"
    return is_empty, time.perf_counter() - start_s, said


def _publish(core: Any, answers: Sequence[Any], request: str) -> int:
    """Publish the version that every rank holds after the request, and return it; 0 if a rank failed, versions differ, or this
    vLLM publishes none.
    """
    versions = {reply.version for reply in have_done(answers, request) if not reply.is_dirty}
    version = versions.pop() if len(versions) == 1 else 0
    return version if version and publish_in_core(core, version) else 0
