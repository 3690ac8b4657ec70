"""The control plane of `fp8refit.engine.Engine` for a scheduler of SGLang, driven from within: it is where requests come in."""

from collections.abc import Callable, Sequence
from typing import Any

from fp8refit.admission import cache_kept
from fp8refit.config import RefitConfig
from fp8refit.engine import hold
from fp8refit.errors import UnsupportedEngineError
from fp8refit_sglang.compat import Scheduler, refuse_requests

_REASON, _IS_HELD = "_fp8refit_refuses", "_fp8refit_is_held"


def admit(original: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
    """Around the method by which a scheduler takes requests in: refuses them while no whole policy is there."""
    if not hasattr(scheduler, _IS_HELD):
        setattr(scheduler, _IS_HELD, True)
        hold(Scheduler(scheduler).model, scheduler)
    reason = getattr(scheduler, _REASON, None)
    return original(scheduler, requests if reason is None else refuse_requests(scheduler, requests, reason))


def admit_again(scheduler: Any) -> None:
    """Requests are served again."""
    scheduler.__dict__.pop(_REASON, None)


class SchedulerDriver:
    """One scheduler. It does nothing else while it is driven.

    Args:
        scheduler: SGLang's, with its model loaded.
    """

    is_asynchronous = False

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    async def check_ready(self) -> None:
        """See `fp8refit.engine.Engine`: its rank knows."""

    async def pause(self, config: RefitConfig) -> int:
        """See `fp8refit.engine.Engine`. Requests that wait have computed nothing yet; those that run keep their cache."""
        await self.refuse("an update is under way")
        return 0

    async def resume(self) -> None:
        """See `fp8refit.engine.Engine`."""
        admit_again(self._scheduler)

    async def refuse(self, reason: str) -> None:
        """See `fp8refit.engine.Engine`."""
        setattr(self._scheduler, _REASON, reason)

    async def flush_caches(self) -> None:
        """See `fp8refit.engine.Engine`."""
        if not Scheduler(self._scheduler).flush():
            raise cache_kept("SGLang kept its radix cache", "requests that still run: pause generation first")

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit.engine.Engine`."""
        raise UnsupportedEngineError(
            "calibration: a scheduler has no tokenizer; pass token ids in the place of prompts"
        )

    async def publish_version(self, version: int) -> None:
        """See `fp8refit.engine.Engine`: what shows one is in another process."""
