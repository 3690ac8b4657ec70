"""What runs in vLLM's engine core: two requests to every rank, and its caches dropped between them, for one exchange.

An exchange with a core in another process costs more than most of what a refit does there. `worker.register` gives this to the
core's class.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from fp8refit.transport.messages import PROTOCOL, Reply, Request
from fp8refit_vllm.compat import publish_in_core

CORE_METHOD = "fp8refit_pair"


class Outcome(NamedTuple):
    """How far the core came. Travels as a list."""

    ended: Literal["refused", "kept", "failed", "done"]
    """A rank could not do the first, caches stayed, dropping them raised, or the ranks were given the second."""
    answers: list[str]
    """Of every rank, to the last that they were given."""
    flush_s: float = 0.0
    """Seconds in which caches were dropped."""
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
) -> list[Any]:
    """Give every rank `first`; if all could do that drop the caches, and give every rank `second`. See `Outcome`.

    Args:
        core: vLLM's engine core.
        method: The workers' method for us.
        first: A request.
        second: Another.
        timeouts_s: For each.
        has_connector: Whether KV is kept outside the engine too.
    """
    answers = core.collective_rpc(method, timeouts_s[0], (first,))
    if not _have_done(answers, first):
        return list(Outcome("refused", answers))
    start_s = time.perf_counter()
    try:
        is_empty = core.reset_prefix_cache(False, has_connector)
    except Exception as error:  # noqa: BLE001 - the ranks were not asked to write, so this is not the engine's end
        return list(Outcome("failed", [], said=f"{type(error).__name__}: {error}"))
    flush_s = time.perf_counter() - start_s
    if not is_empty:
        return list(Outcome("kept", [], flush_s))
    answers = core.collective_rpc(method, timeouts_s[1], (second,))
    version = _whole_version(answers, second)
    if version and not publish_in_core(core, version):
        version = 0
    return list(Outcome("done", answers, flush_s, version))


def _have_done(answers: Sequence[Any], request: str) -> list[Reply]:
    """What the ranks say, if every one of them did what was asked for; nothing if not, and then the driver says why."""
    asked = Request.model_validate_json(request)
    try:
        replies = [Reply.model_validate_json(answer) for answer in answers]
    except ValidationError:
        return []
    has_done = all(reply.is_to(asked) and reply.error is None and reply.protocol == PROTOCOL for reply in replies)
    return replies if has_done else []


def _whole_version(answers: Sequence[Any], request: str) -> int:
    """Of the policy that all ranks hold when they did what was asked for; 0 if they did not, or it is not one."""
    versions = {reply.version for reply in _have_done(answers, request) if not reply.is_dirty}
    return versions.pop() if len(versions) == 1 else 0
