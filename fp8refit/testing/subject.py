"""What an adapter's author says of one engine under test, and does to it."""

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from fp8refit.calibration import Calibration, KvScaleValues
from fp8refit.layout import EngineLayout
from fp8refit.refitter import Refitter
from fp8refit.report import KvReport, RefitReport
from fp8refit.sources import Manifest, StateDict

Result = TypeVar("Result")


class Subject(ABC):
    """One live engine under test, as its adapter's author describes it.

    The engine's ranks may live in other processes; the subject lives in this one. What it says of the engine must come
    from the engine itself: nothing here may ask fp8refit, but for `refit`, `calibrate`, `layout` and `close`. Contexts undo
    what they did in a `finally`: a check may fail inside.
    """

    engine: Any
    """What a user passes to `Refitter`."""

    interrupt: type[BaseException] = KeyboardInterrupt
    """What interrupts a refit. An engine whose event loop runs in another thread sets `asyncio.CancelledError`."""

    @abstractmethod
    def policy(self, seed: int) -> Mapping[str, Tensor]:
        """What a trainer's `state_dict()` gives; equal for equal seeds, and other in every tensor for others."""

    @abstractmethod
    def live_bytes(self) -> Mapping[str, object]:
        """The bytes, or a hash of them, of every live parameter and buffer on every rank, by the engine's own names."""

    @abstractmethod
    def expected_bytes(self, policy: Mapping[str, Tensor]) -> Mapping[str, object]:
        """What `live_bytes()` gives while `policy` is served: read from a fresh engine, or computed by name.

        `quantize_blockwise` is the arithmetic. `policy` is unquantized and has the names, dtypes and shapes of `policy()`.
        """

    @abstractmethod
    def places(self) -> Mapping[str, object]:
        """Identity, address, shape, stride and dtype of every live parameter and buffer on every rank."""

    @abstractmethod
    def generate(self) -> Any:
        """What the engine says to a fixed set of prompts, as something that `==` compares; raises what admission raises.

        Equal weights and equally warm caches give equal answers; other policies give other answers. At least one prompt
        is long enough for the engine to cache it.
        """

    @abstractmethod
    def drop_caches(self) -> None:
        """Drop what the engine remembers of earlier requests, by the engine's own means; nothing if it has no caches."""

    @abstractmethod
    def num_unfinished(self) -> int:
        """How many requests wait or run."""

    def refitter(self, **options: Any) -> Refitter:
        """Make a `Refitter` of the engine."""
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

        It is also called in a second thread while the first is in it, reading its source; it must not wait for the first.
        """
        return refitter.refit(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)

    def calibrate(self, refitter: Refitter, calibration: Calibration) -> KvReport:
        """Run `refitter.calibrate(calibration)`."""
        return refitter.calibrate(calibration)

    def layout(self, refitter: Refitter) -> EngineLayout:
        """Run `refitter.layout()`."""
        return refitter.layout()

    def close(self, refitter: Refitter) -> None:
        """Run `refitter.close()`; called in a second thread too, as `refit` is."""
        refitter.close()

    def traces(self) -> Collection[str] | None:
        """What an adapter has left on the engine's request path (patches, hooks, flags); None if that cannot be seen."""
        return None

    def memory_bytes(self) -> int | None:
        """Bytes of tensors that this process and the ranks hold, by an exact count; None if that cannot be measured."""
        return None

    def busy(self) -> AbstractContextManager[Callable[[], Any]] | None:
        """Give the engine one unfinished request; what it yields finishes the request and gives the answer.

        None if the engine cannot be held there, or waits for its requests instead of refusing the refit.
        """
        return None

    def asleep(self) -> AbstractContextManager[None] | None:
        """Put the weights to sleep, or mark them so, and wake them up again with their bytes; None if they never sleep."""
        return None

    def unflushable(self) -> AbstractContextManager[None] | None:
        """Make the engine keep its caches, as if blocks of them were held; None if that cannot be brought about.

        The engine answers requests meanwhile, as it does while it keeps its caches.
        """
        return None

    def kv_scales(self) -> Mapping[str, Sequence[float]] | None:
        """Every scale of the engine's FP8 KV cache, by the name that reports give it (`model.layers.0.self_attn.k_scale`).

        Each with what every rank holds of it now in each of its places: the tensor that kernels read, numbers, host tensors.
        Scales that the engine's attention does not use are left out. None if there is no FP8 KV cache, or none that can be
        looked into.
        """
        return None

    def calibration(self) -> list[list[int]] | None:
        """A batch of token ids, under which two policies show other keys and values; None if scales cannot be measured."""
        return None


class AsyncSubject(Subject):
    """A subject whose engine is asynchronous: it lives in an event loop, which runs in a thread of its own.

    Make the engine in that loop, with `self.run(make_engine())` after `super().__init__()`; and `generate`, `live_bytes` and
    the others from coroutines by `self.run(...)`.
    """

    interrupt = asyncio.CancelledError

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_in_loop = threading.Lock()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engine's event loop", daemon=True)
        self._thread.start()

    def run(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the engine's loop, from any other thread, and give what it returns."""
        try:
            return asyncio.run_coroutine_threadsafe(steps, self.loop).result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None

    def stop(self) -> None:
        """Stop the loop; the last thing done with the subject."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def refit(
        self,
        refitter: Refitter,
        state_dict: StateDict,
        *,
        manifest: Manifest | None = None,
        calibration: Calibration | None = None,
        kv_scales: KvScaleValues | None = None,
    ) -> RefitReport:
        """See `Subject`."""
        steps = refitter.refit_async(state_dict, manifest=manifest, calibration=calibration, kv_scales=kv_scales)
        return self._run_unless_refitting(steps)

    def calibrate(self, refitter: Refitter, calibration: Calibration) -> KvReport:
        """See `Subject`."""
        return self.run(refitter.calibrate_async(calibration))

    def layout(self, refitter: Refitter) -> EngineLayout:
        """See `Subject`."""
        return self.run(refitter.layout_async())

    def close(self, refitter: Refitter) -> None:
        """See `Subject`."""
        self._run_unless_refitting(refitter.close_async())

    def _run_unless_refitting(self, steps: Coroutine[Any, Any, Result]) -> Result:
        """A refit reads its source in the loop, so another one must not wait for the loop; it is refused anywhere."""
        if not self._is_in_loop.acquire(blocking=False):
            return asyncio.run(steps)
        try:
            return self.run(steps)
        finally:
            self._is_in_loop.release()


Check: TypeAlias = Callable[[Subject], None]
