"""Updates of an engine from within: whoever receives a policy beside the live model hands it over, bucket by bucket.

An update is a refit whose source is handed over instead of read. Its steps stop where the next bucket is wanted, and go on
when it comes.
"""

from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fp8refit.config import RefitConfig
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineDirtyError, RefitError, UnsupportedEngineError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import RefitReport
from fp8refit.sources.handover import HandedBucket, HandedSource
from fp8refit.sources.row_runs import InPieces
from fp8refit.sources.source import Manifest, check_can_be_read_twice, named


def update(
    engine: object,
    config: RefitConfig | None = None,
    *,
    manifest: Manifest | None = None,
    calibration: Calibration | None = None,
    kv_scales: KvScaleValues | None = None,
    **options: Any,
) -> "Update":
    """Update one engine from within, where its live model is, instead of calling `model.load_weights`.

    Every rank of the engine enters and leaves the block, each with the whole policy. Entering it agrees that all of them can be
    written, and keeps requests away; leaving it holds that everything came and is finite, sets KV scales, and commits, on every
    rank or on none. After an error the engine refuses requests until an update, or a refit, succeeds.

    A worker does not reach what schedules its requests: it raises a flag in shared memory, which fp8refit's plugin reads
    there before each step. Requests are refused while it is up, and caches of the policy before are dropped before any is
    answered.

    Args:
        engine: A worker of vLLM, or a worker extension (`self`); a scheduler of SGLang; the network that one of them runs;
            or an engine whose model is in this process.
        config: How to refit; or give its fields as keywords.
        manifest: Name to (shape, dtype) of all that will come, to be judged before anything is written. Without it, what comes
            is judged as it comes, and an engine that it does not fit is dirty.
        calibration: See `Refitter.refit`; token ids.
        kv_scales: See `Refitter.refit`.
        **options: Fields of the config.

    Raises:
        UnsupportedEngineError: The ranks of this engine are in other processes, or what schedules its requests does not
            read the flag.
        RefitError: See `Refitter.refit`; on entering the block nothing is written yet.

    Examples:
        >>> class Extension:                                                     # doctest: +SKIP
        ...     def update_weights(self, receive):
        ...         with fp8refit.update(self) as update:
        ...             for bucket in receive():
        ...                 update.load(bucket)
    """
    refitter = Refitter(engine, config, **options)
    return Update(refitter, HandedSource(manifest), calibration=calibration, kv_scales=kv_scales)


class Update(AbstractContextManager["Update"]):
    """See `update`.

    Attributes:
        report: What was written; there when the block is over.
    """

    def __init__(self, refitter: Refitter, source: HandedSource, **order: Any) -> None:
        if not isinstance(refitter.engine.ranks, LocalRanks):
            raise UnsupportedEngineError(
                "the ranks of this engine are in other processes: call update() there, in a worker, or refit from here"
            )
        self.report: RefitReport | None = None
        self._config = refitter.config
        self._source, self._refitter, self._order = source, refitter, order
        self._steps: Coroutine[Any, Any, RefitReport] | None = None

    def load(self, bucket: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Write a bucket of any number of tensors.

        A tensor of the engine's GPU is read where it lies, by what the current stream does next: it may be overwritten, or
        freed, by what comes after that. Nothing waits for the device.

        Args:
            bucket: Checkpoint names, with the prefixes of trainers' wrappers or without, and tensors, each whole. A list or
                mapping is taken at once; from an iterator each tensor is taken before it is asked for the next.

        Raises:
            RefitError: What does not fit. An engine of several ranks raises it on leaving the block, on all of them alike: the
                others may wait for this rank in the middle of a collective operation of the trainer.
            EngineDirtyError: The update is over, by an error.
        """
        if self._steps is None:
            raise EngineDirtyError("this update is over, or was not entered; nothing more can be loaded")
        self._go_on(self._as_pairs(bucket))

    def __enter__(self) -> Self:
        if self._config.validate_values == "strict":
            check_can_be_read_twice(self._source)
        assert self._steps is None and self.report is None, "an update is entered once"
        self._steps = self._refitter.refit_async(self._source, **self._order)
        self._go_on(None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._steps is None:
            return  # it ended in load(), by the error that comes here
        if error is not None:
            self._steps.throw(error)
        else:
            self._go_on(None)
        assert self.report is not None, "the last bucket was handed over"

    def __del__(self) -> None:
        steps, self._steps = getattr(self, "_steps", None), None
        if steps is not None:
            with suppress(RefitError):  # which every other rank raises
                steps.close()

    def _go_on(self, bucket: HandedBucket | None) -> None:
        """Let the refit go on until it wants a bucket, or is over."""
        assert self._steps is not None, "entered"
        steps, self._steps = self._steps, None
        try:
            steps.send(bucket)
        except StopIteration as result:
            self.report = result.value
            return
        self._steps = steps

    def _as_pairs(self, bucket: Any) -> HandedBucket:
        if isinstance(bucket, InPieces):
            return bucket.pieces(self._config.bucket_bytes)
        if isinstance(bucket, Mapping):
            bucket = list(bucket.items())
        pairs: Iterator[tuple[str, Tensor]] = ((name, tensor) for name, _, tensor in named(bucket))
        return list(pairs) if isinstance(bucket, list | tuple) else pairs
