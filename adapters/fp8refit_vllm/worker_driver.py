"""The control plane of `Engine` for a worker of vLLM, which reaches no scheduler: it writes on its board."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.engine import Driver
from fp8refit.errors import UnsupportedEngineError
from fp8refit_vllm.worker import board_of


class WorkerDriver(Driver):
    """One worker, driven from within.

    Args:
        worker: vLLM's, with its model loaded.
    """

    is_asynchronous = False

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._board = board_of(worker)

    @override
    async def check_ready(self) -> None:
        """See `fp8refit.driver.engine.Engine`.

        Raises:
            UnsupportedEngineError: The engine core does not look at the board.
        """
        if not self._board.is_read:
            raise UnsupportedEngineError(
                "the engine core of this worker does not look at what the worker says, and would go on with old caches: "
                "install fp8refit where the core runs, on the same host (a path alone has no entry points), and leave it in "
                "VLLM_PLUGINS; an engine that is still being made is not updated"
            )

    @override
    async def pause(self, config: RefitConfig) -> int:
        """What a running request has is computed anew."""
        self._board.is_raised = True
        return 0

    @override
    async def resume(self) -> None:
        self._board.is_raised = False

    @override
    async def refuse(self, reason: str) -> None:
        self._board.is_raised = True

    @override
    async def flush_caches(self) -> None:
        """The core does it before anything is computed."""
        self._board.num_drops += 1

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        raise UnsupportedEngineError("calibration: a worker has no tokenizer; pass token ids instead of prompts")

    @override
    async def publish_version(self, version: int) -> None:
        """The core shows it once caches are dropped."""
        self._board.version = version
