"""What an adapter's author says about an engine under test, and how to operate it."""

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from typing_extensions import override

from fp8refit.driver.refitter import Refitter
from fp8refit.live.layout import EngineLayout
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import KvReport, RefitReport
from fp8refit.sources.source import Manifest, StateDict

Result = TypeVar("Result")


class Subject(ABC):
    """One live engine under test, as its adapter's author describes it.

    The engine's ranks may run in other processes; the subject runs in this one. What it reports must come from the engine
    itself: do not use fp8refit here, except in `refit`, `calibrate`, `layout` and `close`. Contexts must clean up in a
    `finally`, since a check may fail inside them.
    """

    engine: Any
    """The object that a user passes to `Refitter`."""

    interrupt: type[BaseException] = KeyboardInterrupt
    """What interrupts a refit. An engine with its event loop in another thread sets `asyncio.CancelledError`."""

    @abstractmethod
    def policy(self, seed: int) -> Mapping[str, Tensor]:
        """Return a trainer's `state_dict()`: equal for equal seeds, and different in every tensor for others."""

    @abstractmethod
    def live_bytes(self) -> Mapping[str, object]:
        """Return the bytes, or a hash of them, of every live parameter and buffer on every rank, by the engine's own
        names.
        """

    @abstractmethod
    def expected_bytes(self, policy: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Return what `live_bytes()` returns while `policy` is served, read from a fresh engine or computed by name.

        `quantize_blockwise` does the arithmetic. `policy` is unquantized, with the names, dtypes and shapes of
        `policy()`.
        """

    @abstractmethod
    def places(self) -> Mapping[str, object]:
        """Return identity, address, shape, stride and dtype of every live parameter and buffer on every rank."""

    @abstractmethod
    def generate(self) -> Any:
        """Return the engine's answers to a fixed set of prompts, comparable with `==`; raise what admission raises.

        Equal weights with equally warm caches must give equal answers, and other policies other answers. At least one
        prompt must be long enough for the engine to cache it.
        """

    @abstractmethod
    def drop_caches(self) -> None:
        """Drop the engine's caches of earlier requests, by its own means. Do nothing if it has none."""

    @abstractmethod
    def num_unfinished(self) -> int:
        """Return the number of waiting and running requests."""

    def refitter(self, **options: Any) -> Refitter:
        """Create a `Refitter` for the engine."""
        return Refitter(self.engine, **options)

    def refit(
        self,
        refitter: Refitter,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport:
        """Run one refit to its end.

        Also called in a second thread while the first is reading its source. It must not wait for the first.
        """
        return refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def calibrate(self, refitter: Refitter, calibration: Calibration) -> KvReport:
        """Run `refitter.calibrate(calibration)`."""
        return refitter.calibrate(calibration)

    def layout(self, refitter: Refitter) -> EngineLayout:
        """Run `refitter.layout()`."""
        return refitter.layout()

    def close(self, refitter: Refitter) -> None:
        """Run `refitter.close()`. Also called in a second thread, like `refit`."""
        refitter.close()

    def traces(self) -> Collection[str] | None:
        """Return what an adapter left on the engine's request path (patches, hooks, flags); None if that cannot be
        seen.
        """
        return None

    def memory_bytes(self) -> int | None:
        """Return the exact number of bytes of tensors in this process and the ranks; None if that cannot be measured."""
        return None

    def busy(self) -> AbstractContextManager[Callable[[], Any]] | None:
        """Give the engine one unfinished request, and yield a function that finishes it and returns the answer.

        None if the engine cannot be held there, or waits for requests instead of refusing the refit.
        """
        return None

    def asleep(self) -> AbstractContextManager[None] | None:
        """Put the weights to sleep, or mark them as asleep, and wake them with their bytes; None if they never sleep."""
        return None

    def unflushable(self) -> AbstractContextManager[None] | None:
        """Make the engine keep its caches, as if blocks were in use; None if that is impossible.

        Meanwhile the engine answers requests.
        """
        return None

    def kv_scales(self) -> Mapping[str, Sequence[float]] | None:
        """Return every scale of the FP8 KV cache, by its name in reports (`model.layers.0.self_attn.k_scale`).

        Each with the values of all its copies on every rank: the tensor that kernels read, numbers, host tensors. Leave
        out scales that attention does not use. None if there is no FP8 KV cache, or it cannot be inspected.
        """
        return None

    def calibration(self) -> list[list[int]] | None:
        """Return a batch of token ids on which two policies have different keys and values; None if scales cannot be
        measured.
        """
        return None


class AsyncSubject(Subject):
    """A subject with an asynchronous engine, which lives in an event loop in a thread of its own.

    Create the engine in that loop, with `self.run(make_engine())` after `super().__init__()`. Implement `generate`,
    `live_bytes` and the others by passing coroutines to `self.run(...)`.
    """

    interrupt = asyncio.CancelledError

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_in_loop = threading.Lock()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine's event loop", daemon=True)
        self._thread.start()

    def run(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the engine's loop, from any other thread, and return its result."""
        try:
            return asyncio.run_coroutine_threadsafe(steps, self.loop).result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None

    def stop(self) -> None:
        """Stop the loop. Call this last."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    @override
    def refit(self, refitter: Refitter, state_dict: StateDict, **options: Any) -> RefitReport:
        """Run one refit in the engine's loop."""
        return self._run_unless_refitting(refitter.refit_async(state_dict, **options))

    @override
    def calibrate(self, refitter: Refitter, calibration: Calibration) -> KvReport:
        """Run `refitter.calibrate(calibration)` in the engine's loop."""
        return self.run(refitter.calibrate_async(calibration))

    @override
    def layout(self, refitter: Refitter) -> EngineLayout:
        """Run `refitter.layout()` in the engine's loop."""
        return self.run(refitter.layout_async())

    @override
    def close(self, refitter: Refitter) -> None:
        """Run `refitter.close()` in the engine's loop."""
        self._run_unless_refitting(refitter.close_async())

    def _run_unless_refitting(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run in the loop, unless a refit is reading its source there: then run here, where it is refused without
        waiting.
        """
        if not self._is_in_loop.acquire(blocking=False):
            return asyncio.run(steps)
        try:
            return self.run(steps)
        finally:
            self._is_in_loop.release()


Check: TypeAlias = Callable[[Subject], None]
