"""Keeps requests that begin after a refit from the KV of those that go on: they get another key in SGLang's radix cache.

With `in_flight="continue"` a scheduler keeps the KV of running requests, which they go on to put into the cache under their
own key. So every request that begins later gets a key with the number of such refits. The cache drops what is under older
keys when it needs the room.
"""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from fp8refit.driver.admission import cannot_continue

_NUM_REFITS = "_fp8refit_num_apart"
_STAMP = re.compile("\0fp8refit [0-9]+\0")
_WITHOUT_KEYS = (
    "dllm_algorithm",
    "enable_hierarchical_cache",
    "enable_streaming_session",
    "enable_unified_cache_external_linker",
    "is_embedding",
    "radix_cache_backend",
)
"""Arguments of SGLang's with which requests or caches have no key, or with which keys were not tested."""
_CPP_TREE = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"


def set_apart(scheduler: Any) -> None:
    """Give requests that have not begun a key of their own, and those that will come."""
    setattr(scheduler, _NUM_REFITS, num_refits(scheduler) + 1)
    stamp(scheduler, queued(scheduler))


def num_refits(scheduler: Any) -> int:
    """How many refits went on with KV."""
    return int(getattr(scheduler, _NUM_REFITS, 0))


def stamp(scheduler: Any, requests: Iterable[Any]) -> None:
    """Give requests the key of now. A user's key, and what SGLang added to it, stay at its end."""
    number = num_refits(scheduler)
    if not number:
        return
    for request in requests:
        if hasattr(request, "extra_key"):
            request.extra_key = f"\0fp8refit {number}\0{_STAMP.sub('', request.extra_key or '')}"


def received(requests: Iterable[Any]) -> Iterator[Any]:
    """What came to a scheduler; batches of requests one by one."""
    for request in requests:
        yield from request if isinstance(request, Iterable) else (request,)


def queued(scheduler: Any) -> Iterator[Any]:
    """The requests of a scheduler that have not begun."""
    yield from scheduler.waiting_queue
    yield from getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())


def check_continues(arguments: Any) -> None:
    """Check, from SGLang's `server_args`, that KV of requests that go on can be kept from others.

    Raises:
        UnsupportedEngineError: It cannot.
    """
    for name in _WITHOUT_KEYS:
        if getattr(arguments, name, None):
            raise cannot_continue(f"with {name}, later requests may share KV of the old policy")
    if os.environ.get(_CPP_TREE, "").lower() not in ("", "0", "false"):
        raise cannot_continue(f"with {_CPP_TREE}, later requests share KV of the old policy")
