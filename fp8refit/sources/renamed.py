"""A source under the engine's names, where a trainer has others. Tensors, and the order they come in, stay as they are."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fp8refit.config import Rename, read_rename
from fp8refit.errors import InvalidSourceError, NonFiniteError, fold
from fp8refit.live.names import is_kv_scale, strip_wrappers
from fp8refit.live.slots import SCALE_SUFFIX, TensorMeta
from fp8refit.sources.row_runs import AnyRun, InPieces, MakesPieces
from fp8refit.sources.source import MappingSource, PushedSource, RandomAccess, Source

_NO_SCALES = 'KV of the old scales stays in use with in_flight="continue"; leave it out (ignore=), or choose "keep"'


class Names(dict[str, str]):
    """The engine's name of each of a trainer's names, computed when it is asked for and then kept.

    Args:
        rename: See `RefitConfig.rename`.
    """

    def __init__(self, rename: Rename) -> None:
        super().__init__()
        found = read_rename(rename)
        if isinstance(found, dict):
            found = {strip_wrappers(old): new for old, new in found.items()}
        elif isinstance(found, tuple):
            found = tuple((strip_wrappers(old), new) for old, new in found)
        self._rename: dict[str, str] | tuple[tuple[str, str], ...] | Callable[[str], object] = found
        self._met: set[str] = set()

    @classmethod
    def of(cls, rename: Rename | None) -> "Names | None":
        """The names; None if they stay as they are."""
        return None if rename is None else cls(rename)

    def __missing__(self, name: str) -> str:
        try:
            self[name] = found = strip_wrappers(self._renamed(strip_wrappers(name)))
        except UnicodeEncodeError:
            return name  # and whoever reads it refuses it
        return found

    def _renamed(self, name: str) -> str:
        rename = self._rename
        if isinstance(rename, dict):
            weight = name.removesuffix(SCALE_SUFFIX)
            self._met |= {name, weight}
            return rename.get(name) or rename.get(weight, weight) + name[len(weight) :]
        if isinstance(rename, tuple):
            for old, new in rename:
                if name.startswith(old):
                    self._met.add(old)
                    name = new + name[len(old) :]
            return name
        found = rename(name)
        if isinstance(found, str):
            return found
        raise InvalidSourceError([f"{name}: the function rename= makes {type(found).__name__} of it; return a name"])

    @property
    def sent(self) -> dict[str, str]:
        """The trainer's names, or name, of each of the engine's, where they differ."""
        found: dict[str, list[str]] = {}
        for name, here in self.items():
            found.setdefault(here, []).append(name)
        return {here: ", ".join(names) for here, names in found.items() if names != [here]}

    @property
    def idle(self) -> list[tuple[str, str]]:
        """The pairs or names of `rename=` that no name has matched so far, and why. Of a function, nothing is known."""
        rename = self._rename
        if isinstance(rename, tuple):
            why = "no name that was sent begins with it"
            return [(f'("{old}", "{new}")', why) for old, new in rename if old not in self._met]
        unmet = fold(old for old in rename if old not in self._met) if isinstance(rename, dict) else ()
        return [(f'"{old}"', "no such name was sent") for old in unmet]


@contextmanager
def also_as_sent(names: Names | None) -> Iterator[None]:
    """Add the trainer's names to errors that speak of the engine's."""
    try:
        yield
    except (InvalidSourceError, NonFiniteError) as error:
        if names is not None:
            error.tell(names.sent)
        raise


def why_one(names: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each of the engine's names that two of the trainer's became."""
    firsts: dict[str, str] = {}
    return [
        f"{here}: is made of {firsts[here]} and of {name}, which rename= makes one; send one of them"
        for name, here in names
        if firsts.setdefault(here, name) != name
    ]


def under(names: Names, runs: Iterator[AnyRun]) -> Iterator[AnyRun]:
    """Yield the same rows of tensors that have the engine's names."""
    for run in runs:
        yield replace(run, name=names[run.name])
        del run  # nothing of it is held while the next one is made


def renamed(source: Source, names: Names | None) -> Source:
    """Return a source with the same tensors under the engine's names.

    Raises:
        InvalidSourceError: Two names become one.
    """
    if names is None or isinstance(source, PushedSource):
        return source
    if not isinstance(source, MappingSource):
        return RenamedSource(source, names)
    found = MappingSource({})
    found.sent_names, found.sent = list(map(names.__getitem__, source.sent_names)), source.sent
    if len(set(found.sent_names)) < len(found.sent_names):
        raise InvalidSourceError(why_one(zip(source.sent_names, found.sent_names, strict=True)))
    return found


def without_scales(source: Source, is_ignored: Callable[[str], bool]) -> Source:
    """Return the source, of which no tensor may be a KV scale, except one that is ignored.

    Raises:
        InvalidSourceError: One is. A stream that cannot be read again raises it when the scale comes.
    """
    if isinstance(source, MappingSource):
        names: Iterable[str] = source.sent_names
    else:
        scanned = source.scan()
        if scanned is None:
            return RenamedSource(source, _NamesWithoutScales(is_ignored))
        names = scanned[0]
    refuse_scales(names, is_ignored)
    return source


def refuse_scales(names: Iterable[str], is_ignored: Callable[[str], bool]) -> None:
    """Check that none of these names is a KV scale's, except one that is ignored.

    Raises:
        InvalidSourceError: Some are; names all of them.
    """
    if problems := [f"{name}: {_NO_SCALES}" for name in names if is_kv_scale(name) and not is_ignored(name)]:
        raise InvalidSourceError(problems)


class _NamesWithoutScales(Names):
    def __init__(self, is_ignored: Callable[[str], bool]) -> None:
        super().__init__(())
        self._is_ignored = is_ignored

    def __missing__(self, name: str) -> str:
        refuse_scales([name], self._is_ignored)
        return super().__missing__(name)


class RenamedSource:
    """A stream under the engine's names. It can do what the stream can, but ranks cannot read its files themselves."""

    def __init__(self, source: Source, names: Names) -> None:
        self._source, self._names, self.is_repeatable = source, names, source.is_repeatable
        if isinstance(source, RandomAccess):
            self.pick = partial(self._pick, source)
        if isinstance(source, InPieces):
            self.pieces: Callable[[int], Iterator[Any]] = lambda max_bytes: under(names, source.pieces(max_bytes))
        if isinstance(source, MakesPieces):
            self.recipes: Callable[[int], Iterator[Any]] = lambda max_bytes: under(names, source.recipes(max_bytes))
            self.make = source.make

    def scan(self) -> tuple[Mapping[str, TensorMeta], Sequence[str]] | None:
        """Describe what will come; see `Source.scan`."""
        scanned = self._source.scan()
        if scanned is None:
            return None
        metadata, problems = scanned
        here = [(name, self._names[name]) for name in metadata]
        return {name: metadata[sent] for sent, name in here}, (*problems, *why_one(here))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, one at a time."""
        return ((self._names[name], tensor) for name, tensor in self._source)

    def _pick(self, source: RandomAccess, names: Iterable[str]) -> Mapping[str, Tensor]:
        wanted, (metadata, _) = set(names), self._source.scan() or ({}, ())
        sent = [name for name in metadata if self._names[name] in wanted]
        return {self._names[name]: tensor for name, tensor in source.pick(sent).items()}
