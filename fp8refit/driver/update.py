"""Updates an engine from inside: code next to the live model receives a policy and hands it over bucket by bucket.

An update is a refit whose source is handed over instead of read. It stops when it needs the next bucket, and continues
when that arrives.
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Never, Self, Unpack

from torch import Tensor

from fp8refit.config import Options, RefitConfig, refuse_others
from fp8refit.driver.attach import attach_engine
from fp8refit.driver.local_ranks import LocalRanks
from fp8refit.driver.refitter import Refitter
from fp8refit.errors import EngineDirtyError, InvalidOptionError, RefitError, UnsupportedEngineError
from fp8refit.ranks.kv.calibration import Calibration, KvScaleValues
from fp8refit.report import RefitReport
from fp8refit.sources.handover import HandedBucket, HandedSource
from fp8refit.sources.pairs import named
from fp8refit.sources.renamed import under
from fp8refit.sources.row_runs import InPieces
from fp8refit.sources.source import Manifest, check_can_be_read_twice
from fp8refit.transport.running import run


def update(
    engine: object,
    config: RefitConfig | None = None,
    *,
    manifest: Manifest | None = None,
    calibration: Calibration | None = None,
    kv_scales: KvScaleValues | None = None,
    **options: Unpack[Options],
) -> "Update":
    """Update an engine from inside the process of its live model, instead of calling `model.load_weights`.

    Every rank of the engine enters and leaves the block, each with the whole policy. On entering, the ranks agree that
    all of them can be written, and requests are kept away. On leaving, they check that everything arrived and is
    finite, set KV scales and commit, all or none. After an error the engine refuses requests until an update or a refit
    succeeds.

    A worker cannot reach its scheduler, so it raises a flag in shared memory, which fp8refit's plugin reads there
    before each step. While the flag is up, requests are refused. Caches of the previous policy are dropped before the
    next request is answered.

    Args:
        engine: A worker of vLLM, or a worker extension (`self`); a scheduler of SGLang; the network that one of them runs;
            or an engine whose model is in this process.
        config: Options; or pass its fields as keywords.
        manifest: Name to (shape, dtype) of every tensor, to be checked before anything is written. Without it, tensors
            are checked as they arrive, and one that does not fit leaves the engine dirty.
        calibration: See `Refitter.refit`; token ids.
        kv_scales: See `Refitter.refit`.
        **options: Fields of the config; see `Refitter`.

    Raises:
        UnsupportedEngineError: The engine's ranks are in other processes, or its scheduler does not read the flag.
        RefitError: See `Refitter.refit`. If raised on entering the block, nothing was written.

    Examples:
        >>> class Extension:                                                     # doctest: +SKIP
        ...     def update_weights(self, receive):
        ...         with fp8refit.update(self) as update:
        ...             for bucket in receive():
        ...                 update.load(bucket)
    """
    refitter = Refitter(engine, config, **options)
    return Update(
        refitter, HandedSource(manifest, refitter.names), engine, calibration=calibration, kv_scales=kv_scales
    )


class Update(AbstractContextManager["Update"]):
    """One refit whose tensors are handed over one after another; `update` begins it.

    Attributes:
        report: What was written; set when the block ends.
    """

    def __init__(self, refitter: Refitter, source: HandedSource, engine: object, **order: Any) -> None:
        if not isinstance(refitter.engine.ranks, LocalRanks):
            raise UnsupportedEngineError(
                "the ranks of this engine are in other processes: call update() there, in a worker, or refit from here"
            )
        if refitter.config.in_flight == "continue":
            raise InvalidOptionError(
                'update() does not pause requests, so it takes no in_flight="continue"; leave it out'
            )
        self.report: RefitReport | None = None
        self._config = refitter.config
        self._source, self._refitter, self._engine, self._order = source, refitter, engine, order
        self._steps: Coroutine[Any, Any, RefitReport] | None = None

    def load(self, bucket: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], **_others: Never) -> None:
        """Write a bucket of any number of tensors.

        Tensors on the engine's GPU are read in place, by work queued on the current stream; later work on that stream
        may overwrite or free them. Nothing waits for the device.

        Args:
            bucket: Checkpoint names, with or without the prefixes of trainers' wrappers, and whole tensors. A list or
                mapping is taken at once; from an iterator, each tensor is taken before the next is requested.

        Raises:
            RefitError: Something does not fit. With several ranks it is raised on leaving the block, on all of them,
                because other ranks may be waiting for this one in a collective operation of the trainer.
            EngineDirtyError: The update has already failed.
            InvalidOptionError: An option, which `update` takes.
        """
        refuse_others(self.load, _others, where="update")
        if self._steps is None:
            raise EngineDirtyError(
                "nothing can be loaded: its block was left or not entered, or another call is not over"
            )
        self._go_on(self._as_pairs(bucket))

    def lend_turn(self, why: str) -> Callable[[], bool]:
        """Let others write the engine instead. See `Turn.lend`.

        Args:
            why: What requests are told meanwhile.
        """
        attached = attach_engine(self._engine)
        run(attached.engine.refuse(why))
        return attached.turns.lend()

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
            return  # it ended in load(), with this error
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
        """Continue the refit until it needs a bucket or is over."""
        assert self._steps is not None, "entered"
        steps, self._steps = self._steps, None
        try:
            steps.send(bucket)
        except StopIteration as result:
            self.report = result.value
            return
        self._steps = steps

    def _as_pairs(self, bucket: Any) -> HandedBucket:
        names = self._refitter.names
        if isinstance(bucket, Mapping):
            bucket = list(bucket.items())
        pairs: Iterator[tuple[str, Tensor]] = (
            (name if names is None else names[name], tensor) for name, _, tensor in named(bucket)
        )
        if isinstance(bucket, list | tuple):  # checked first: the check for `InPieces` takes a tenth of a millisecond
            return list(pairs)
        if not isinstance(bucket, InPieces):
            return pairs
        pieces = bucket.pieces(self._config.bucket_bytes)
        return pieces if names is None else under(names, pieces)
