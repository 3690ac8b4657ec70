"""Turns vLLM's `WeightSource` into a source for `Refitter.refit`, on every rank of a trainer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fp8refit.config import RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.sources.sharded.gather import Gathered, GatheredStream
from fp8refit.sources.sharded.shards import has_shards
from fp8refit.sources.source import Manifest, StateDict

_PATIENCE = 4
"""Other ranks of the trainer wait this many times `timeout_s` for the rank that prepares the engine."""


@contextmanager
def opened(source: Any, group: ProcessGroup | None, config: RefitConfig) -> Iterator[tuple[StateDict, Manifest | None]]:
    """The weights that rank 0 of the trainer sends, and their manifest, for `Refitter.refit`. Every rank enters and leaves
    this context and takes part in gathers.

    Args:
        source: A `WeightSource`. The shards of a `ModuleSource` are gathered in buckets, not tensor by tensor. All ranks read
            any other source together, as a pass over it may be a collective operation.
        group: The ranks of the trainer; by default torch's world group.
        config: Options of the refit.

    Raises:
        InvalidSourceError: The source yields only a part of the model.
    """
    limits: Any = {"bucket_bytes": config.bucket_bytes, "timeout_s": _PATIENCE * config.timeout_s}
    module = module_of(source)
    if module is None:
        if why := why_not_whole(source):
            raise InvalidSourceError([f"source: {why}; pass a source that yields every tensor, whole, on rank 0"])
        manifest = {meta.name: (meta.shape, meta.dtype) for meta in announced(source)}
        with GatheredStream(lambda: full_pass(source), group, **limits) as passes:
            yield passes.__iter__, manifest
        return
    state_dict: Mapping[str, Tensor] = module.state_dict()
    if not has_shards(state_dict.values()):
        yield state_dict, None
        return
    with Gathered(state_dict, group, **limits) as shards:
        yield shards, None


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
