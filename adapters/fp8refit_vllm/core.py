"""What runs in vLLM's engine core: two requests to every rank, and its caches dropped once all could do the first, for one
exchange.

An exchange with a core in another process costs more than most of what a refit does there, and dropping the caches, block by
block, costs as much again. `worker.register` gives this to the core's class.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from fp8refit.remote.messages import have_done
from fp8refit_vllm.compat import begin_call, is_cache_idle, publish_in_core

CORE_METHOD = "fp8refit_pair"


class Outcome(NamedTuple):
    """How far the core came. Travels as a list."""

    ended: Literal["refused", "kept", "stale", "done"]
    """A rank could not do the first; caches stayed before the ranks were given the second, or after; or the ranks were given
    both, and the caches are gone."""
    answers: list[str]
    """Of every rank, to the last that they were given."""
    flush_s: float = 0.0
    """Seconds in which caches were dropped while the ranks waited for it."""
    version: int = 0
    """Of the policy that every rank committed, which the core's outputs show from now on; 0 if none."""
    said: str = ""
    """What dropping the caches raised."""


def carry_out(
    core: Any,
    method: str,
    first: str,
    second: str,
    timeouts_s: Sequence[float],
    has_connector: bool,
    keeps_requests: bool,
) -> list[Any]:
    """Give every rank `first`; if all could do that drop the caches, and give every rank `second`. See `Outcome`.

    Caches that nothing uses are always dropped: workers in other processes are then given `second` at once, and the core
    drops the caches while they do it. Where they might stay, they are dropped first.

    Args:
        core: vLLM's engine core.
        method: The workers' method for us.
        first: A request.
        second: Another.
        timeouts_s: For each.
        has_connector: Whether KV is kept outside the engine too.
        keeps_requests: Whether requests that are kept have theirs computed anew.
    """
    answers = core.collective_rpc(method, timeouts_s[0], (first,))
    if not have_done(answers, first):
        return list(Outcome("refused", answers))
    drop = partial(core.reset_prefix_cache, keeps_requests, has_connector)
    wait = begin_call(core, method, timeouts_s[1], second) if not has_connector and is_cache_idle(core) else None
    if wait is not None:
        is_empty, _, said = _try_to(drop)
        answers = wait()
        if not is_empty:
            return list(Outcome("stale", answers, said=said))
        return list(Outcome("done", answers, version=_publish(core, answers, second)))
    is_empty, flush_s, said = _try_to(drop)
    if not is_empty:
        return list(Outcome("kept", [], flush_s, said=said))
    answers = core.collective_rpc(method, timeouts_s[1], (second,))
    return list(Outcome("done", answers, flush_s, _publish(core, answers, second)))


def _try_to(drop: Callable[[], bool]) -> tuple[bool, float, str]:
    """Whether the caches were dropped, in how many seconds, and what that raised. Not the engine's end, whatever it is."""
    start_s = time.perf_counter()
    try:
        is_empty, said = drop(), ""
    except Exception as error:  # noqa: BLE001 - the driver says it
        is_empty, said = False, f"{type(error).__name__}: {error}"
    return is_empty, time.perf_counter() - start_s, said


def _publish(core: Any, answers: Sequence[Any], request: str) -> int:
    """Have the core name the version that all ranks hold now; 0 if they do not, or vLLM does not."""
    version = _whole_version(answers, request)
    return version if version and publish_in_core(core, version) else 0


def _whole_version(answers: Sequence[Any], request: str) -> int:
    """Of the policy that all ranks hold when they did what was asked for; 0 if they did not, or it is not one."""
    versions = {reply.version for reply in have_done(answers, request) if not reply.is_dirty}
    return versions.pop() if len(versions) == 1 else 0
