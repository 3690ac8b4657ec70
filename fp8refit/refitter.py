"""The steps of one refit, in order, timed. The only place that knows the order."""

import logging
from textwrap import shorten
from types import TracebackType
from typing import Any, Self

from fp8refit.config import RefitConfig
from fp8refit.engine import attach_engine
from fp8refit.errors import EngineBusyError, RefitError
from fp8refit.layout import EngineLayout
from fp8refit.report import PhaseClock, RefitReport
from fp8refit.sources import Manifest, StateDict, as_source

logger = logging.getLogger(__name__)


class Refitter:
    """Moves one live engine from policy to policy.

    Args:
        engine: A `vllm.LLM`, or a transformers model made block FP8 by `fp8refit_transformers.to_block_fp8`.
        config: How to refit; or give its fields as keywords.

    Raises:
        UnsupportedEngineError: No installed adapter takes the engine, or it cannot be refitted; says what to set.

    Example:
        >>> refitter = Refitter(llm)                            # doctest: +SKIP
        >>> report = refitter.refit(model.state_dict())         # doctest: +SKIP
        >>> print(report)                                       # doctest: +SKIP
    """

    def __init__(self, engine: object, config: RefitConfig | None = None, **options: Any) -> None:
        self._config = config if config is not None else RefitConfig(**options)
        if config is not None and options:
            raise ValueError(f"give config or its fields as keywords, not both (got {sorted(options)} too)")
        attached = attach_engine(engine)
        self._engine, self._lock = attached.engine, attached.lock

    @property
    def version(self) -> int:
        """Policy version the engine serves; 0 is what it was booted with."""
        return self._engine.ranks.version

    @property
    def is_dirty(self) -> bool:
        """Whether the engine holds a mixture of two policies, and so refuses requests until the next complete refit."""
        return self._engine.ranks.is_dirty

    def refit(self, state_dict: StateDict, *, manifest: Manifest | None = None) -> RefitReport:
        """Make the engine serve the policy in `state_dict`: wholly, or with an error and not at all.

        An error before the first byte is written leaves the engine as it was, serving. An error after it leaves the
        engine dirty: it refuses requests at admission until a later `refit` succeeds.

        Args:
            state_dict: Checkpoint names to tensors, bfloat16, float16, float32 or already block FP8, on any device, in
                any order: a mapping, a list or iterator of pairs, a function returning a fresh iterator, or the path of a
                safetensors file or folder. Wrappers' prefixes (FSDP, torch.compile, DDP, PEFT) are stripped. The source
                must keep its bytes until this returns, and a stream's CUDA tensors must be ready on the caller's current
                stream. A function is called once for each pass: for names and shapes, unless a `manifest` says them; for
                scales, if FP8 comes to slots that want powers of two; for values, with `validate="strict"`; and to write.
            manifest: For iterators and functions: name to (shape, dtype) of all that will come. Without one, an iterator
                that can be read only once is judged while it is written.

        Returns:
            What was done and how long each phase took.

        Raises:
            InvalidSourceError: Names, shapes, dtypes or scales do not fit; names every problem at once.
            NonFiniteError: NaN or Inf; names the tensors.
            EngineBusyError: Requests are unfinished, or another refit is under way.
            EngineAsleepError: The weights sleep.
            UnsupportedEngineError: The engine has layers that cannot be refitted.
            StagingMemoryError: No room for the buckets of a source that is not on the engine's device.
            CacheFlushError: The weights are written but the old policy's KV cache stayed; the engine is dirty.
            EngineLostError: A CUDA fault; start the engine again.
        """
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError("another refit of this engine is under way; wait for it")
        try:
            return self._refit(state_dict, manifest)
        finally:
            self._lock.release()

    def _refit(self, state_dict: StateDict, manifest: Manifest | None) -> RefitReport:
        engine, ranks, clock = self._engine, self._engine.ranks, PhaseClock()
        with clock.phase("plan"):
            engine.check_ready()
            ranks.prepare(as_source(state_dict, manifest=manifest), self._config)
        engine.block_requests("a refit is under way")
        try:
            written = ranks.write()
            clock.phases_s |= {"fill": written.fill_s, "verify": written.verify_s}
            with clock.phase("flush"):
                engine.flush_caches()
            version = ranks.commit()
        except BaseException as error:
            engine.block_requests(
                f"the last refit failed part way ({type(error).__name__}: {shorten(str(error), 240)})"
            )
            raise
        engine.unblock_requests()
        report = RefitReport(
            version=version,
            engine=engine.name,
            num_tensors=written.num_tensors,
            ignored=written.ignored,
            bytes_read=written.num_bytes_read,
            bytes_written=written.num_bytes_written,
            phases_s=clock.phases_s,
            fill_device_s=written.device_s,
            extra_bytes=written.extra_bytes,
            is_first=written.is_first,
        )
        logger.info("%s", report.summary())
        return report

    def layout(self) -> EngineLayout:
        """Slots, kernels, scale formats and refusals of the engine."""
        return self._engine.ranks.layout()

    def close(self) -> None:
        """Give back what is held beyond the engine: plan and table. Version and state stay; a later refit compiles again.

        Raises:
            EngineBusyError: A refit is under way.
        """
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError("a refit of this engine is under way; wait for it")
        try:
            self._engine.ranks.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RefitError:
            if error is None:
                raise


def refit(engine: object, state_dict: StateDict, *, manifest: Manifest | None = None, **options: Any) -> RefitReport:
    """`Refitter(engine, **options).refit(state_dict)` in one line; the engine keeps its plan between calls."""
    return Refitter(engine, **options).refit(state_dict, manifest=manifest)
