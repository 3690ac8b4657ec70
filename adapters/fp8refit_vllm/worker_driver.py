"""Drives a single vLLM worker from inside. It cannot reach the scheduler, so it uses the worker's flag instead."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from fp8refit.config import RefitConfig
from fp8refit.driver.engine import Driver
from fp8refit.errors import UnsupportedEngineError
from fp8refit_vllm.worker import flag_of


class WorkerDriver(Driver):
    """Drives one worker.

    Args:
        worker: A vLLM worker whose model is loaded.
    """

    is_asynchronous = False

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._flag = flag_of(worker)

    @override
    async def check_ready(self) -> None:
        """Check that somebody reads the flag.

        Raises:
            UnsupportedEngineError: The engine core does not read it.
        """
        if not self._flag.is_read:
            raise UnsupportedEngineError(
                "the engine core of this worker does not know about updates and would keep old caches: install "
                "fp8refit where the core runs, on the same host (a path alone has no entry points), and leave it in "
                "VLLM_PLUGINS. An engine that is still booting cannot be updated"
            )

    @override
    async def pause(self, config: RefitConfig) -> int:
        """Raise the flag. KV of running requests will be recomputed."""
        await self.refuse("an update is under way")
        return 0

    @override
    async def resume(self) -> None:
        self._flag.is_raised = False

    @override
    async def refuse(self, reason: str) -> None:
        self._flag.reason, self._flag.is_raised = reason, True

    @override
    async def flush_caches(self) -> None:
        """Ask the core to drop its caches before its next step."""
        self._flag.num_drops += 1

    @override
    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        raise UnsupportedEngineError("calibration: a worker has no tokenizer; pass token ids instead of prompts")

    @override
    async def publish_version(self, version: int) -> None:
        """Ask the core to publish the version once the caches are dropped."""
        self._flag.version = version
