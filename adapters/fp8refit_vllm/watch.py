"""Makes an engine core react to updates that its workers carry out on their own.

Before each step the core reads every rank's board, a flag in shared memory. While a flag is raised it refuses requests.
Before the first step with a new policy it drops the caches and publishes the version. `worker.register` adds this to
every core.
"""

import logging
from collections.abc import Callable
from typing import Any

from fp8refit.errors import TransportError
from fp8refit.transport.board import Board
from fp8refit.transport.memory.segment import Segment
from fp8refit_vllm.compat import StepOutputs, drop_core_caches, publish_in_core, refuse_in_core

logger = logging.getLogger(__name__)

BOARD_METHOD = "fp8refit_board"
"""Name of the worker method that returns a worker's board."""
_ASKING_S = 60.0
NOT_WHOLE = (
    "an update by this engine's workers is in progress or has failed; the next one that succeeds heals the engine"
)
STAY = "vLLM did not drop the caches of the previous policy after an update by its workers"


def watch(core: Any) -> None:
    """Make an engine core read its workers' boards before every step."""
    try:
        answers = core.collective_rpc(BOARD_METHOD, _ASKING_S)
        boards = [Board.find(Segment.model_validate_json(answer)) for answer in answers]
    except TransportError as error:
        logger.warning("this engine's workers cannot run updates on their own: %s", error)
        return
    core.step_fn = Watch(core, boards, core.step_fn).step


class Watch:
    """Wraps the step function of an engine core; see `watch`.

    Args:
        core: The engine core.
        boards: One board per rank.
        step: The core's own step function.
    """

    def __init__(self, core: Any, boards: list[Board], step: Callable[[], StepOutputs]) -> None:
        self._core, self._boards, self._step = core, boards, step
        self._num_drops = [board.num_drops for board in boards]

    def step(self) -> StepOutputs:
        """Run one step, or refuse all requests."""
        reason = self._why_not()
        return self._step() if reason is None else refuse_in_core(self._core, self._step, reason)

    def _why_not(self) -> str | None:
        """Why requests are refused now, or None. Drops the caches after an update."""
        if any(board.is_raised for board in self._boards):
            return NOT_WHOLE
        num_drops = [board.num_drops for board in self._boards]
        if num_drops == self._num_drops:
            return None
        if not drop_core_caches(self._core):
            return STAY
        publish_in_core(self._core, self._boards[0].version)
        self._num_drops = num_drops
        return None
