"""Drives a single SGLang scheduler from inside, where requests arrive."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.admission import cache_kept
from fp8refit.driver.attach import hold
from fp8refit.driver.drop_in import DropInOptions
from fp8refit.driver.engine import Driver
from fp8refit.errors import UnsupportedEngineError
from fp8refit_sglang.apart import check_continues, num_refits, queued, received, stamp
from fp8refit_sglang.compat import refuse_requests
from fp8refit_sglang.live_scheduler import Scheduler

_REASON, _IS_HELD = "_fp8refit_refuses", "_fp8refit_is_held"


def is_known(scheduler: Any) -> bool:
    """Whether a scheduler has received requests before."""
    return hasattr(scheduler, _IS_HELD)


def admit(original: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Wraps the scheduler method that receives requests: refuses them during an update and after a failed one.

    It also gives them their key in the radix cache.
    """
    if not is_known(scheduler):
        setattr(scheduler, _IS_HELD, True)
        with suppress(AttributeError):  # not an engine that could be refitted
            hold(Scheduler(scheduler).model, scheduler)
    reason = getattr(scheduler, _REASON, None)
    if reason is not None:
        return original(scheduler, refuse_requests(scheduler, requests, reason))
    num_before = num_refits(scheduler)
    stamp(scheduler, received(requests))
    answer = original(scheduler, requests)
    if num_refits(scheduler) != num_before:  # some came together with a refit, and after it
        stamp(scheduler, queued(scheduler))
    return answer


def admit_again(scheduler: Any) -> None:
    """Serve requests again."""
    scheduler.__dict__.pop(_REASON, None)


class SchedulerDriver(Driver):
    """Drives one scheduler, which does nothing else in the meantime.

    Args:
        scheduler: An SGLang scheduler whose model is loaded.
    """

    is_asynchronous = False

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    @override
    async def check_ready(self) -> None:
        """Nothing to check: the rank does it."""

    @override
    async def pause(self, config: RefitConfig) -> int:
        """Refuse new requests. Waiting ones have computed nothing yet; running ones keep their cache."""
        await self.refuse("an update is under way")
        return 0

    @override
    async def resume(self) -> None:
        admit_again(self._scheduler)

    @override
    async def refuse(self, reason: str) -> None:
        setattr(self._scheduler, _REASON, reason)

    @override
    async def flush_caches(self) -> None:
        """Drop caches, or set those of paused requests apart if `FP8REFIT_IN_FLIGHT=continue`."""
        scheduler = Scheduler(self._scheduler)
        if scheduler.is_paused and DropInOptions.read(os.environ).in_flight == "continue":
            check_continues(self._scheduler.server_args)
            scheduler.set_apart()
        elif not scheduler.flush():
            raise cache_kept("SGLang kept its radix cache", "requests that still run: pause generation first")

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        raise UnsupportedEngineError("calibration: a scheduler has no tokenizer; pass token ids instead of prompts")

    @override
    async def publish_version(self, version: int) -> None:
        """Nothing to do: another process publishes versions."""
