"""What an engine core does about updates of its workers, of which it hears through their boards alone.

Before each step it looks at the board of every rank. While one is raised, requests are refused; and before the first step under
another policy the caches of the one before are dropped, and the version is shown. `worker.register` gives this to every core.
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
"""The workers' method that gives their boards."""
_ASKING_S = 60.0
NOT_WHOLE = (
    "no whole policy is in place: an update of its workers is under way, or failed; the next one that succeeds heals it"
)
STAY = "vLLM kept caches of the policy before an update of its workers"


def watch(core: Any) -> None:
    """Have an engine core look at the boards of its workers from now on."""
    try:
        answers = core.collective_rpc(BOARD_METHOD, _ASKING_S)
        boards = [Board.find(Segment.model_validate_json(answer)) for answer in answers]
    except TransportError as error:
        logger.warning("workers of this engine cannot be updated from within: %s", error)
        return
    core.step_fn = Watch(core, boards, core.step_fn).step


class Watch:
    """See `watch`.

    Args:
        core: The engine core.
        boards: Of every rank.
        step: What the core does in each step.
    """

    def __init__(self, core: Any, boards: list[Board], step: Callable[[], StepOutputs]) -> None:
        self._core, self._boards, self._step = core, boards, step
        self._num_drops = [board.num_drops for board in boards]

    def step(self) -> StepOutputs:
        """Instead of the core's own."""
        reason = self._why_not()
        return self._step() if reason is None else refuse_in_core(self._core, self._step, reason)

    def _why_not(self) -> str | None:
        """Why nothing may be computed now."""
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
