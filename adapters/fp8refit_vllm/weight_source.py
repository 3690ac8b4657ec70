"""Turns vLLM's `WeightSource` into a source for `Refitter.refit`, on every rank of a trainer."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.sources.sharded.gather import Gathered
from fp8refit.sources.sharded.shards import has_shards
from fp8refit.sources.sharded.trainer_group import Statement, Trainers, trainer_group
from fp8refit.sources.source import Manifest, NamedTensors, StateDict
from fp8refit.transport.error_capture import ErrorCapture

Weights: TypeAlias = tuple[StateDict, Manifest | None]
"""Arguments of `Refitter.refit`."""

_PATIENCE = 4
"""Other ranks of the trainer wait this many times `timeout_s` for the rank that prepares the engine."""


def opened(source: Any, group: ProcessGroup | None, config: RefitConfig) -> AbstractContextManager[Weights]:
    """The weights that rank 0 of the trainer sends. Every rank enters and leaves this context and takes part in
    gathers.

    Args:
        source: A `WeightSource`. The shards of a `ModuleSource` are gathered in buckets, not tensor by tensor.
        group: The ranks of the trainer; by default torch's world group.
        config: Options of the refit.

    Raises:
        InvalidSourceError: The source yields only a part of the model.
    """
    timeout_s = _PATIENCE * config.timeout_s
    module = module_of(source)
    if module is None:
        return SharedPasses(source, Trainers(trainer_group(group), timeout_s=timeout_s))
    state_dict: Mapping[str, Tensor] = module.state_dict()
    if not has_shards(state_dict.values()):
        return nullcontext((state_dict, None))
    return _gathered(Gathered(state_dict, group, bucket_bytes=config.bucket_bytes, timeout_s=timeout_s))


@contextmanager
def _gathered(shards: Gathered) -> Iterator[Weights]:
    with shards as weights:
        yield weights, None


class SharedPasses(AbstractContextManager[Weights]):
    """A source whose passes are collective operations of the trainer. All ranks start each pass together and finish it.

    Args:
        source: Yields whole tensors.
        trainers: The ranks of the trainer.

    Raises:
        InvalidSourceError: The source yields only a part of the model.
    """

    def __init__(self, source: Any, trainers: Trainers) -> None:
        if why := why_not_whole(source):
            raise InvalidSourceError([f"source: {why}; pass a source that yields every tensor, whole, on rank 0"])
        self._source = source
        self._trainers = trainers
        self._manifest = {meta.name: (meta.shape, meta.dtype) for meta in announced(source)}
        self._rest: Iterator[tuple[str, Tensor]] = iter(())
        self._has_read = False

    def __enter__(self) -> Weights:
        return self._read, self._manifest

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._trainers.is_over:
            return
        if error is None and not self._has_read:
            self._join()
            return
        for _ in self._rest:  # finish the pass that the other ranks are in
            pass
        with suppress(type(error)) if error is not None else nullcontext():
            self._trainers.hear(Statement(step="done"), error)

    def _read(self) -> NamedTensors:
        """Make one pass, together with the other ranks."""
        self._has_read = True
        self._trainers.hear(Statement(step="read"))
        self._rest = full_pass(self._source)
        yield from self._rest
        self._trainers.hear(Statement(step="end"))

    def _join(self) -> None:
        """Take part in the passes of the rank that reads.

        Raises:
            RefitError: The error of that rank.
        """
        while any(said.step == "read" for said in self._trainers.hear(Statement(step="follow"))):
            with ErrorCapture() as failed:
                for _ in full_pass(self._source):
                    pass
            self._trainers.hear(Statement(step="end"), failed.error)


def module_of(source: Any) -> nn.Module | None:
    """The module behind vLLM's `ModuleSource`; None for another source."""
    from vllm.distributed.weight_transfer.base import ModuleSource

    return source._module if type(source) is ModuleSource else None


def announced(source: Any) -> list[Any]:
    """Name, dtype and shape of every tensor of vLLM's `WeightSource`: a method before 0.32, an attribute since."""
    metadata = source.metadata
    metas: list[Any] = metadata() if callable(metadata) else metadata
    return metas


def full_pass(source: Any) -> Iterator[tuple[str, Tensor]]:
    """One pass over whole tensors: `iter(source)` before 0.32, `iter_full` since."""
    iter_full = getattr(source, "iter_full", None)
    tensors: Iterator[tuple[str, Tensor]] = iter(source) if iter_full is None else iter_full()
    return tensors


def why_not_whole(source: Any) -> str:
    """Why a source does not yield every tensor, whole, on rank 0; empty if it does."""
    if not hasattr(source, "iter_full"):
        held_names = getattr(source, "held_names", lambda: None)
        return "" if held_names() is None else "this rank holds only a part of the model"
    if not source.implements_iter_full():
        return "it yields only pieces of tensors, because it does not implement iter_full"
    absent = len(source.metadata) - len(source.owned_names(0))
    return f"rank 0 does not own {absent} of its tensors" if absent else ""
