"""Where weights come from: a mapping, a stream, a safetensors file or folder, all as one kind of source.

Names are checkpoint names with trainers' wrappers stripped. A `MappingSource` holds its tensors and is read in any
order; every other source is a stream, read in its own order with one tensor in memory at a time.
"""

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from fp8refit.errors import InvalidSourceError
from fp8refit.names import strip_wrappers
from fp8refit.slots import TensorMeta

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
StateDict: TypeAlias = "Mapping[str, Tensor] | NamedTensors | Callable[[], NamedTensors] | str | Path | Source"
Manifest: TypeAlias = Mapping[str, TensorMeta | Tensor | tuple[Iterable[int], torch.dtype]]


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


@runtime_checkable
class Source(Protocol):
    """A stream of named tensors."""

    @property
    def is_repeatable(self) -> bool:
        """Whether `iter()` gives a fresh pass every time."""
        ...

    def scan(self) -> tuple[Mapping[str, TensorMeta], Sequence[str]] | None:
        """What will come, as far as it can be known before it is written.

        Returns:
            Shape and dtype by checkpoint name, and what is wrong, one line a problem, each beginning with the tensor's
            name. A stream without manifest is read once for it; None for one that cannot be read again.
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Give checkpoint name and tensor, one at a time."""
        ...


@runtime_checkable
class RandomAccess(Protocol):
    """A source that gives some of its tensors without reading the others."""

    def pick(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """The tensors of these checkpoint names, all of which it has."""
        ...


def as_source(state_dict: StateDict, *, manifest: Manifest | None = None) -> Source:
    """Wrap whatever a trainer holds.

    Args:
        state_dict: A mapping; a list of pairs; an iterator of pairs; a function that returns a fresh iterator of pairs at
            every call; a safetensors file, or a folder with `model.safetensors.index.json` or safetensors files; or a source.
        manifest: For iterators: name to `TensorMeta` or (shape, dtype) of everything that will come, so that it can be
            judged before the first byte is written.

    Raises:
        InvalidSourceError: It is none of these, or a file is missing or unreadable.
    """
    if isinstance(state_dict, nn.Module):
        raise InvalidSourceError([f"source: is a {type(state_dict).__name__}; pass its state_dict()"])
    if manifest is not None and isinstance(state_dict, Mapping | str | Path | list | tuple | Source):
        raise InvalidSourceError(["manifest: is for iterators and functions; a mapping, list or path needs none"])
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
    if isinstance(state_dict, Iterable):
        return StreamSource(lambda: iter(state_dict), is_repeatable=True, manifest=manifest)
    raise InvalidSourceError(
        [f"{type(state_dict).__name__}: not a state dict; pass a mapping, an iterable of (name, tensor) or a path"]
    )


def check_can_be_read_twice(source: Source) -> None:
    """Hold that values can be looked for in `source` before they are written.

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
    """Tensors that are all there.

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
        """What can be read, and what is wrong with the rest. Not needed for a source that is recognised as it was sent."""
        problems: dict[str, str] = {}
        tensors = _read_all(self.sent_names, self.sent)
        if tensors is None:
            tensors = dict(_readable(zip(self.sent_names, self.sent, strict=True), problems))
        return tensors, tuple(problems.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that can be read, by its checkpoint name."""
        return self._read[0]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the others, one line each."""
        return self._read[1]

    @property
    def metadata(self) -> dict[str, TensorMeta]:
        """See `Source`."""
        return {name: TensorMeta.of(tensor) for name, tensor in self.tensors.items()}

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """See `Source`."""
        return self.metadata, self.problems

    def pick(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `RandomAccess`."""
        return {name: self.tensors[name] for name in names}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See `Source`."""
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
        """See `Source`.

        Raises:
            InvalidSourceError: A value is no tensor, or one without bytes here.
        """
        for name, _, tensor in named(self._make_iterator()):
            if problem := what_is_wrong(tensor):
                raise InvalidSourceError([f"{name}: {problem}"])
            yield name, tensor

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]] | None:
        """See `Source`."""
        if self.metadata is not None:
            return self.metadata, ()
        if not self.is_repeatable:
            return None
        problems: dict[str, str] = {}
        metadata = {name: TensorMeta.of(tensor) for name, tensor in _readable(self._make_iterator(), problems)}
        return metadata, tuple(problems.values())


class PushedSource:
    """Tensors that somebody else reads and hands over part by part. What could be judged there was judged there.

    Args:
        metadata: Shape and dtype of everything that will come; None if nothing is known.
        problems: What was found wrong with it.
        odd_scales: Names of scale tensors with values that are no powers of two.
        unfit: Names of KV scales that are none, and why.
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
        """See `Source`."""
        return None if self.metadata is None else (self.metadata, self.problems)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See `Source`: it has nothing to give."""
        return iter(())


class SafetensorsSource:
    """A safetensors file, or a folder of them with or without an index."""

    is_repeatable = True

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self._files = _safetensors_files(path)
        self._file_of: dict[str, Path] = {}
        self.metadata: dict[str, TensorMeta] = {}
        problems = []
        for file in self._files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for raw_name in tensors.keys():  # noqa: SIM118 - a handle, not a mapping
                        name = strip_wrappers(raw_name)
                        if name in self._file_of:
                            problems.append(f"{name}: stored twice, in {self._file_of[name].name} and in {file.name}")
                            continue
                        view = tensors.get_slice(raw_name)
                        self._file_of[name] = file
                        self.metadata[name] = TensorMeta(
                            shape=tuple(view.get_shape()), dtype=_SAFETENSORS_DTYPES.get(view.get_dtype(), torch.uint8)
                        )
            except (SafetensorError, OSError) as error:
                raise InvalidSourceError([f"{file}: cannot be read as safetensors ({error})"]) from error
        self.problems = tuple(problems)

    def scan(self) -> tuple[dict[str, TensorMeta], tuple[str, ...]]:
        """See `Source`."""
        return self.metadata, self.problems

    def pick(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `RandomAccess`."""
        from safetensors import safe_open

        picked: dict[str, Tensor] = {}
        wanted = set(names)
        for file in {self._file_of[name] for name in wanted}:
            with safe_open(file, framework="pt") as tensors:
                raw_names = {strip_wrappers(name): name for name in tensors.keys()}  # noqa: SIM118 - a handle, not a mapping
                picked |= {name: tensors.get_tensor(raw_names[name]) for name in wanted & raw_names.keys()}
        return picked

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See `Source`."""
        from safetensors import safe_open

        for file in self._files:
            with safe_open(file, framework="pt") as tensors:
                for raw_name in tensors.keys():  # noqa: SIM118 - a handle, not a mapping
                    yield strip_wrappers(raw_name), tensors.get_tensor(raw_name)


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


def _safetensors_files(path: Path) -> list[Path]:
    """The files of a checkpoint, in order.

    Raises:
        InvalidSourceError: There are none, or the index names one that is not there.
    """
    if not path.exists():
        raise InvalidSourceError([f"{path}: does not exist"])
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSourceError([f"{index}: not a safetensors index ({error!r})"]) from error
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise InvalidSourceError([f"{name}: named by {index} but not there" for name in absent])
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InvalidSourceError([f"{path}: no safetensors file, nor a folder with any"])
    return files


def named(items: Iterable[Any]) -> Iterator[tuple[str, str, Any]]:
    """Checkpoint name, name as it was sent, and value of each pair.

    Raises:
        InvalidSourceError: An item is no pair of a name and a value.
    """
    for item in items:
        try:
            raw_name, value = item
            name = strip_wrappers(raw_name)
        except (TypeError, ValueError):
            raise InvalidSourceError(
                [f"source: gave something of type {type(item).__name__} where a pair (name, tensor) belongs"]
            ) from None
        yield name, raw_name, value


def _read_all(raw_names: Sequence[str], values: Sequence[Any]) -> dict[str, Tensor] | None:
    """Every tensor under its checkpoint name, if there is nothing wrong with any: `_readable`, in a third of the time.

    Takes 0.3 us a tensor; a model of experts has 18 000.
    """
    tensors: dict[str, Tensor] = {}
    try:
        for raw_name, tensor in zip(raw_names, values, strict=True):
            if type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided or tensor.is_meta:
                return None
            tensors[strip_wrappers(raw_name)] = tensor
    except (TypeError, ValueError):
        return None
    return tensors if len(tensors) == len(values) else None


def _readable(items: Iterable[Any], problems: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be read, once, under its checkpoint name; `problems` takes a line for each other name."""
    names = set()
    for name, raw_name, tensor in named(items):
        if name in names:
            problems[name] = f"{name}: sent twice, the second time as {raw_name}; send it once"
            continue
        names.add(name)
        if problem := what_is_wrong(tensor):
            problems[name] = f"{name}: {problem}"
        else:
            yield name, tensor


def _not_exhausted(iterator: Iterator[Any]) -> Iterator[Any]:
    """The same items as `iterator`'s.

    Raises:
        InvalidSourceError: There are none, or the first is no pair of a name and a value.
    """
    for first in iterator:
        next(named([first]))
        return itertools.chain([first], iterator)
    raise InvalidSourceError(
        ["source: is an iterator with nothing left; it is read once, so make a new one every time"]
    )


def _read_manifest(manifest: Manifest) -> dict[str, TensorMeta]:
    """Names and what comes under them.

    Raises:
        InvalidSourceError: An entry says no shape and dtype.
    """
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


def what_is_wrong(tensor: Any) -> str | None:
    """Why a source value cannot be read, or None."""
    if type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided and not tensor.is_meta:
        return None
    if not isinstance(tensor, Tensor):
        return f"is of type {type(tensor).__name__}, not a tensor"
    if hasattr(tensor, "full_tensor"):
        return (
            "is a DTensor shard; pass the mapping that holds it, from every trainer rank, or fp8refit.gathered(mapping), or "
            "send tensor.full_tensor() from every trainer rank"
        )
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}; send it dense"
    if tensor.is_meta:
        return "is on the meta device and has no bytes"
    return None
