"""Pairs of a name and a value, as trainers send them, and which of them can be read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fp8refit.errors import InvalidSourceError
from fp8refit.live.names import strip_wrappers
from fp8refit.live.storage import why_unreadable


def check_readable(name: str, tensor: object, *, written: bool = False) -> None:
    """Check that a value is a tensor whose bytes can be read.

    Raises:
        InvalidSourceError: It is not.
    """
    if problem := why_unreadable(tensor):
        raise InvalidSourceError([f"{name}: {problem}"], written=written)


def named(items: Iterable[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield checkpoint name, name as sent, and value of each pair.

    Raises:
        InvalidSourceError: An item is not a pair of a name and a value, or `items` is not iterable.
    """
    if not isinstance(items, Iterable) or isinstance(items, Tensor):
        raise InvalidSourceError(
            [f"source: its function returned {type(items).__name__}; return a new iterator of pairs (name, tensor)"]
        )
    for item in items:
        try:
            raw_name, value = item
            name = strip_wrappers(raw_name)
        except (TypeError, ValueError):
            raise InvalidSourceError(
                [f"source: gave something of type {type(item).__name__} instead of a pair (name, tensor)"]
            ) from None
        yield name, raw_name, value


def read_all(raw_names: Sequence[str], values: Sequence[Any]) -> dict[str, Tensor] | None:
    """Return every tensor under its checkpoint name, as `readable` does in three times the time; None if one has a problem.

    Takes 1 us per tensor; a mixture-of-experts model has 18,000.
    """
    tensors: dict[str, Tensor] = {}
    try:
        for raw_name, tensor in zip(raw_names, values, strict=True):
            if why_unreadable(tensor):
                return None
            tensors[strip_wrappers(raw_name)] = tensor
    except (TypeError, ValueError):
        return None
    return tensors if len(tensors) == len(values) else None


def readable(
    items: Iterable[Any], problems: dict[str, str], why_not: Callable[[Any], str | None] = why_unreadable
) -> Iterator[tuple[str, Tensor]]:
    """Yield every readable tensor once, under its checkpoint name. `problems` gets a line for each other name."""
    names = set()
    for name, raw_name, tensor in named(items):
        if name in names:
            problems[name] = f"{name}: sent twice, the second time as {raw_name}; send it once"
            continue
        names.add(name)
        if problem := why_not(tensor):
            problems[name] = f"{name}: {problem}"
        else:
            yield name, tensor
