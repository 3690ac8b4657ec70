"""Makes an engine core react to updates that its workers carry out on their own.

Before each step the core reads every rank's flag in shared memory. While one is raised it refuses requests.
Before the first step with a new policy it drops the caches and publishes the version. `worker.register` adds this to
every core. If the core has other clients, a driver also decides here whether anybody's requests run, wait or are refused.
"""

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from fp8refit.transport.memory.segment import Segment
from fp8refit.transport.shared_flag import SharedFlag
from fp8refit_vllm.core_compat import (
    StepOutputs,
    check_continues,
    drop_core_caches,
    publish_in_core,
    refuse_in_core,
    skip_unread_replies,
)
from fp8refit_vllm.drop_in import call_and_look, options_of

logger = logging.getLogger(__name__)

FLAG_METHOD = "fp8refit_flag"
"""Name of the worker method that returns a worker's flag."""
ADMIT_METHOD = "fp8refit_admit"
"""Name of the core method that is `admit`."""
_WATCH = "_fp8refit_watch"
_ASKING_S = 60.0
NOT_WHOLE = "the next update by this engine's workers that succeeds heals the engine"
STAY = "vLLM did not drop the caches of the previous policy after an update by its workers"


def watch(core: Any) -> None:
    """Make an engine core read its workers' flags before every step, if it can be refitted at all.

    Raises:
        Exception: It cannot, and the drop-in is asked for.
    """
    skip_unread_replies(core)
    options = options_of(core.vllm_config)
    continues = options.in_flight == "continue"
    if continues:
        check_continues(core.vllm_config)
    flags: list[SharedFlag] = []
    try:
        answers = core.collective_rpc(FLAG_METHOD, _ASKING_S)
        flags = [SharedFlag.find(Segment.model_validate_json(answer)) for answer in answers]
    except Exception as error:  # whatever a worker raises; vLLM wraps it
        if options.is_asked:
            raise
        logger.warning("this engine's workers cannot update it by themselves: %s: %s", type(error).__name__, error)
    watch = Watch(core, flags, core.step_fn, continues=continues)
    setattr(core, _WATCH, watch)
    core.step_fn = watch.step
    if options.drop_in:
        core.collective_rpc = _looking(core.collective_rpc)


def admit(core: Any, refused_because: str | None) -> None:
    """Decide on the requests of an engine core, whichever client they come from, and whoever resumes its scheduler.

    Args:
        core: The engine core.
        refused_because: Why they are refused. If it is empty, they wait; if it is None, they run.
    """
    watch: Watch = getattr(core, _WATCH)
    watch.refused_because = refused_because


def _looking(collective_rpc: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Make workers look for weights written past every loader, after each call to them that is not ours."""

    @wraps(collective_rpc)
    def call(method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        is_ours = isinstance(method, str) and method.startswith("fp8refit")
        return collective_rpc(method if is_ours else partial(call_and_look, method), *args, **kwargs)

    return call


class Watch:
    """Wraps the step function of an engine core; see `watch`.

    Args:
        core: The engine core.
        flags: One flag per rank.
        step: The core's own step function.
        continues: Whether requests go on with their KV.
    """

    def __init__(
        self, core: Any, flags: list[SharedFlag], step: Callable[[], StepOutputs], *, continues: bool = False
    ) -> None:
        self._core, self._flags, self._step, self._continues = core, flags, step, continues
        self._num_drops = [flag.num_drops for flag in flags]
        self.refused_because: str | None = None
        """See `admit`."""

    def step(self) -> StepOutputs:
        """Run one step, or refuse all requests, or do nothing."""
        if self.refused_because == "" and not self._core.is_scheduler_paused():  # by whom else
            return {}, False
        reason = self.refused_because or self._why_not()
        return self._step() if reason is None else refuse_in_core(self._core, self._step, reason)

    def _why_not(self) -> str | None:
        """Why requests are refused now, or None. Drops the caches after an update."""
        if reasons := [flag.reason for flag in self._flags if flag.is_raised]:
            return f"{NOT_WHOLE} ({reasons[0]})"
        num_drops = [flag.num_drops for flag in self._flags]
        if num_drops == self._num_drops:
            return None
        if not drop_core_caches(self._core, continues=self._continues):
            return STAY
        publish_in_core(self._core, self._flags[0].version)
        self._num_drops = num_drops
        return None
