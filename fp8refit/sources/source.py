"""Where weights come from: a mapping, a stream, a safetensors file or folder, all as one kind of source.

Names are checkpoint names without trainers' wrappers. A `MappingSource` holds its tensors and can be read in any order.
Every other source is a stream, read in its own order with one tensor in memory at a time.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.live.names import strip_wrappers
from fp8refit.live.slots import TensorMeta
from fp8refit.sources.checkpoints import SafetensorsSource
from fp8refit.sources.pairs import named, read_all, readable

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
StateDict: TypeAlias = "Mapping[str, Tensor] | NamedTensors | Callable[[], NamedTensors] | str | Path | Source"
Manifest: TypeAlias = Mapping[str, TensorMeta | Tensor | tuple[Iterable[int], torch.dtype]]


@runtime_checkable
class Source(Protocol):
    """A stream of named tensors."""

    @property
    def is_repeatable(self) -> bool:
        """Whether every `iter()` starts a fresh pass."""
        ...

    def scan(self) -> tuple[Mapping[str, TensorMeta], Sequence[str]] | None:
        """Describe what will come, as far as that is known before anything is written.

        Returns:
            Shape and dtype by checkpoint name; and one line per problem, beginning with the tensor's name. A repeatable
            stream without manifest is read once for it. None for a stream that cannot be read again.
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield checkpoint name and tensor, one at a time."""
        ...


@runtime_checkable
class RandomAccess(Protocol):
    """A source that can return some of its tensors without reading the others."""

    def pick(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the tensors with these checkpoint names. All of them must exist."""
        ...


def as_source(state_dict: StateDict, *, manifest: Manifest | None = None) -> Source:
    """Turn any state dict into a source.

    Args:
        state_dict: A mapping; a list of pairs; an iterator of pairs; a function that returns a new iterator of pairs per
            call; a safetensors file; a folder with `model.safetensors.index.json` or safetensors files; or a source.
        manifest: For iterators: name to `TensorMeta` or (shape, dtype) of everything that will come, so that it can be
            checked before the first byte is written.

    Raises:
        InvalidSourceError: It is none of these, or a file is missing or unreadable.
    """
    if isinstance(state_dict, nn.Module):
        is_peft = hasattr(state_dict, "peft_config")
        what = "fp8refit.training.peft.merged(model)" if is_peft else "its state_dict()"
        raise InvalidSourceError([f"source: is a {type(state_dict).__name__}; pass {what}"])
    if manifest is not None and isinstance(state_dict, Mapping | str | Path | list | tuple | Source):
        raise InvalidSourceError(
            ["manifest: is only for iterators and functions; leave it out for a mapping, list or path"]
        )
    if isinstance(state_dict, Source):
        return state_dict
    if isinstance(state_dict, str | Path):
        return SafetensorsSource(Path(state_dict))
    if isinstance(state_dict, Mapping | list | tuple):
        return MappingSource(state_dict)
    if callable(state_dict):
        return StreamSource(state_dict, is_repeatable=True, manifest=manifest)
    if isinstance(state_dict, Iterator):
        rest = _not_exhausted(state_dict)
        return StreamSource(lambda: rest, is_repeatable=False, manifest=manifest)
    if isinstance(state_dict, Iterable) and not isinstance(state_dict, Tensor):
        return StreamSource(lambda: iter(state_dict), is_repeatable=True, manifest=manifest)
    raise InvalidSourceError(
        [f"{type(state_dict).__name__}: not a state dict; pass a mapping, an iterable of (name, tensor) or a path"]
    )


def check_can_be_read_twice(source: Source) -> None:
    """Check that `source` can be read once to check values and again to write them.

    Raises:
        InvalidSourceError: It can be read only once.
    """
    if not source.is_repeatable:
        raise InvalidSourceError(
            [
                'source: validate="strict" reads everything twice; pass a mapping, files, or a function that returns a fresh '
                "iterator"
            ]
        )


class MappingSource:
    """Tensors that are all available.

    Attributes:
        sent_names: Names as they were sent.
        sent: Values as they were sent, in the same order.
    """

    is_repeatable = True

    def __init__(self, items: NamedTensors | Mapping[str, Tensor]) -> None:
        if isinstance(items, Mapping) and type(items) in (dict, OrderedDict) and set(map(type, items)) <= {str}:
            names, values = list(items), list(items.values())
        else:
            pairs = list(named(items.items() if isinstance(items, Mapping) else items))
            names, values = [name for _, name, _ in pairs], [value for _, _, value in pairs]
        self.sent_names: list[str] = names
        self.sent: list[Tensor] = values

    @cached_property
    def _read(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the readable tensors, and the problems of the rest. Skipped for a source whose layout is recognized."""
        problems: dict[str, str] = {}
        tensors = read_all(self.sent_names, self.sent)
        if tensors is None:
            tensors = dict(readable(zip(self.sent_names, self.sent, strict=True), problems))
        return tensors, tuple(problems.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every readable tensor, by its checkpoint name."""
        return self._read[0]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the others, one line each."""
        return self._read[1]

    @property
    def metadata(self) -> dict[str, TensorMeta]:
        """Shape and dtype of every readable tensor, by its checkpoint name."""
        return {name: TensorMeta.of(tensor) for name, tensor in self.tensors.items()}

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """Return metadata and problems."""
        return self.metadata, self.problems

    def pick(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors with these names."""
        return {name: self.tensors[name] for name in names}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every readable tensor."""
        return iter(self.tensors.items())


class StreamSource:
    """Tensors that come one after another."""

    def __init__(
        self, make_iterator: Callable[[], NamedTensors], *, is_repeatable: bool, manifest: Manifest | None
    ) -> None:
        self._make_iterator = make_iterator
        self.is_repeatable = is_repeatable
        self.metadata = _read_manifest(manifest) if manifest is not None else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of a new pass. Whoever takes it checks that it can be read."""
        for name, _, tensor in named(self._make_iterator()):
            yield name, tensor

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]] | None:
        """Return the manifest, or read a repeatable stream once for it."""
        if self.metadata is not None:
            return self.metadata, ()
        if not self.is_repeatable:
            return None
        problems: dict[str, str] = {}
        metadata = {name: TensorMeta.of(tensor) for name, tensor in readable(self._make_iterator(), problems)}
        return metadata, tuple(problems.values())


class PushedSource:
    """Tensors that somebody else reads and hands over in parts. They were checked there as far as possible.

    Args:
        metadata: Shape and dtype of everything that will come; None if unknown.
        problems: What is wrong with it.
        odd_scales: Names of scale tensors with values that are not powers of two.
        unfit: Names of invalid KV scales, and why.
    """

    is_repeatable = False

    def __init__(
        self,
        metadata: Mapping[str, TensorMeta] | None,
        *,
        problems: Sequence[str] = (),
        odd_scales: Iterable[str] = (),
        unfit: Mapping[str, str] | None = None,
    ) -> None:
        self.unfit = dict(unfit or {})
        self.metadata = metadata
        self.problems = tuple(problems)
        self.odd_scales = frozenset(odd_scales)

    def scan(self) -> tuple[Mapping[str, TensorMeta], Sequence[str]] | None:
        """Return what was said about the tensors."""
        return None if self.metadata is None else (self.metadata, self.problems)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: the tensors come from elsewhere."""
        return iter(())


def _not_exhausted(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of `iterator`.

    Raises:
        InvalidSourceError: There are none, or the first is not a pair of a name and a value.
    """
    for first in iterator:
        next(named([first]))
        return itertools.chain([first], iterator)
    raise InvalidSourceError(
        ["source: is an iterator with nothing left; it can be read only once, so make a new one for every refit"]
    )


def _read_manifest(manifest: Manifest) -> dict[str, TensorMeta]:
    """Parse a manifest.

    Raises:
        InvalidSourceError: It is not a mapping, or an entry is not a name with a shape and dtype.
    """
    if not isinstance(manifest, Mapping):
        raise InvalidSourceError(
            [f"manifest: is of type {type(manifest).__name__}; pass a mapping of names to (shape, dtype)"]
        )
    if unnamed := [name for name in manifest if not isinstance(name, str)]:
        raise InvalidSourceError([f"manifest: {name!r} is not a tensor name" for name in unnamed])
    metas = {}
    for raw_name, entry in manifest.items():
        if isinstance(entry, Tensor):
            entry = TensorMeta.of(entry)
        elif not isinstance(entry, TensorMeta):
            try:
                shape, dtype = entry
                entry = TensorMeta(shape=tuple(shape), dtype=dtype)
            except (TypeError, ValueError):
                raise InvalidSourceError([f"{raw_name}: the manifest says {entry!r}, not (shape, dtype)"]) from None
        metas[strip_wrappers(raw_name)] = entry
    return metas
