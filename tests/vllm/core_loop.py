"""vLLM's own loop of an engine core, without an engine: does it look for work after it was told that requests run again?"""

from queue import Queue
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock

from fp8refit_vllm.core_compat import stop_requests
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

WAIT_S = 20.0


class Core(EngineCoreProc):
    """A core with one unfinished request, and a step that is running."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(pause_state=PauseState.UNPAUSED)
        self.scheduler.set_pause_state = lambda state: setattr(self.scheduler, "pause_state", state)
        self.scheduler.has_requests = lambda: self.scheduler.pause_state is not PauseState.PAUSED_ALL
        self.batch_queue: list[str] | None = ["a step"]
        self.input_queue, self.aborts_queue = Queue(), Queue()
        self.engines_running, self.model_executor = False, Mock()
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        self._idle_state_callbacks = []


def run_core_loop() -> dict:
    """The core is told to stop in a step, and lets requests run again as soon as that has ended; nobody tells it more."""
    core = Core()
    resumed = stop_requests(core, lambda _: core.resume_scheduler() or "resumed", lambda: "late", timeout_s=WAIT_S)
    found = {"waits": not resumed.done()}
    core.batch_queue.clear()
    loop = Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    loop.join(WAIT_S)
    return found | {"said": resumed.result(0), "goes_on": not loop.is_alive(), "has_work": bool(core.has_work())}
