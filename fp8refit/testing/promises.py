"""Promises: how a check holds one, and says how it was broken."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def hold(is_kept: bool, message: str) -> None:
    """Hold a promise. No `assert`: `python -O` must not weaken the checks."""
    if not is_kept:
        raise AssertionError(message)


def expect(kind: type[Error], situation: str, call: Callable[[], object]) -> Error:
    """The error of `kind` that `call` must raise."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"{situation} should raise {kind.__name__}, and raised {type(error).__name__}: {error}"
        ) from error
    raise AssertionError(f"{situation} should raise {kind.__name__}, and raised nothing")


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Names under which two mappings hold something else, or only one of them anything."""
    absent = object()
    return sorted(name for name in one.keys() | other.keys() if one.get(name, absent) != other.get(name, absent))


def listed(names: Iterable[str]) -> str:
    """The first names, for a message."""
    first, *others = (*names, "")[:-1] or ("nothing",)
    shown = [first, *others[:4]]
    return ", ".join(shown) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
