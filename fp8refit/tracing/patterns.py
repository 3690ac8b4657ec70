"""The regular patterns in which a storage's elements come from a checkpoint tensor, and copies between them."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from fp8refit.tracing.records import Copy, Run


class NoPatternError(Exception):
    """The places do not form a regular pattern."""


class Mode(NamedTuple):
    """One dimension of a dense storage that is filled from a checkpoint tensor."""

    size: int
    here: int
    """Stride in the storage."""
    there: int
    """Stride in the checkpoint tensor."""


class Origin(NamedTuple):
    """Where the elements of a storage come from."""

    source: str
    start: int
    modes: tuple[Mode, ...]
    """Sorted by stride in the storage, smallest first."""

    @classmethod
    def of(cls, source: str, start: int, modes: Iterable[Mode]) -> "Origin":
        """Make an origin of modes in any order."""
        return cls(source, start, tuple(sorted(modes, key=lambda mode: mode.here)))

    def start_of(self, offset: int) -> int:
        """Where the storage's element `offset` comes from in the checkpoint tensor."""
        return self.start + sum(offset // mode.here % mode.size * mode.there for mode in self.modes)


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor of `shape`."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def copy_of(
    name: str, into: int, strides: Iterable[int], origin: Origin, tensor: Tensor, offset: int | None = None
) -> Copy:
    """Describe `tensor`, a view of the storage that `origin` describes, as a copy to elements `strides` apart.

    Its first element is the storage's element `offset`, by default its own offset.

    Raises:
        NoPatternError: Its places do not form a regular pattern.
    """
    runs = _runs_between(tuple(strides), tensor.shape, tensor.stride(), origin.modes)
    start = origin.start_of(int(tensor.storage_offset()) if offset is None else offset)
    return Copy(parameter=name, into=into, source=origin.source, start=start, runs=runs)


@lru_cache(maxsize=4096)
def _runs_between(
    strides: tuple[int, ...], shape: tuple[int, ...], read: tuple[int, ...], modes: tuple[Mode, ...]
) -> tuple[Run, ...]:
    """Return the runs of a copy of `shape` to elements `strides` apart, from a storage's elements `read` apart.

    Raises:
        NoPatternError: Its places do not form a regular pattern.
    """
    found: list[tuple[int, int, int]] = []
    for size, stride, here in zip(shape, strides, read, strict=True):
        steps = [] if size == 1 else [(size, 0)] if here == 0 else _steps(modes, size, here)
        inner = []
        for taken, there in steps:
            inner.append((taken, stride, there))
            stride *= taken
        found += reversed(inner)
    return runs_of(found)


def _steps(modes: Iterable[Mode], size: int, stride: int) -> list[tuple[int, int]]:
    """Return sizes and strides in the checkpoint tensor of `size` elements `stride` apart in the storage, innermost
    first.

    Raises:
        NoPatternError: They do not form a regular pattern.
    """
    steps: list[tuple[int, int]] = []
    for mode in modes:
        extent = mode.size * mode.here
        if size == 1:
            break
        if stride % extent == 0:
            continue
        step, rest = divmod(stride, mode.here)
        taken = min(size, mode.size // step) if step else 0
        if rest or not taken or (taken < size and (mode.size % step or size % taken)):
            raise NoPatternError
        steps.append((taken, step * mode.there))
        size, stride = size // taken, extent
    if size != 1:
        raise NoPatternError
    return steps


def nothing_into(name: str, into: Tensor) -> Copy:
    """Describe the elements of `into` as a copy that reads nothing."""
    runs = runs_of(zip(into.shape, into.stride(), (0,) * into.ndim, strict=True))
    return Copy(parameter=name, into=int(into.storage_offset()), source="", start=0, runs=runs)


def runs_of(dims: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Merge dimensions (size, stride written, stride read), outermost first, into as few runs as possible."""
    merged: list[Run] = []
    for size, into, stride in dims:
        last = merged[-1] if merged else None
        if last is not None and (last.into, last.stride) == (into * size, stride * size):
            merged[-1] = Run(size=last.size * size, into=into, stride=stride)
        elif size != 1:
            merged.append(Run(size=size, into=into, stride=stride))
    return tuple(merged)


def origin_of(places: Copy) -> Origin:
    """Where the elements of a dense tensor filled by `places` come from."""
    modes = (Mode(run.size, run.into, run.stride) for run in places.runs)
    return Origin.of(places.source, places.start, modes)
