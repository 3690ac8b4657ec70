"""How a check tests a promise, and says how it was broken."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)


def hold(is_kept: bool, message: str) -> None:
    """Fail with `message` unless `is_kept`. Not an `assert`, which `python -O` would remove."""
    if not is_kept:
        raise AssertionError(message)


def expect(kind: type[Error], situation: str, call: Callable[[], object]) -> Error:
    """Call `call`, which must raise `kind`, and return the error."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"{situation} should raise {kind.__name__}, but raised {type(error).__name__}: {error}"
        ) from error
    raise AssertionError(f"{situation} should raise {kind.__name__}, but raised nothing")


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names that only one mapping has or whose values differ."""
    absent = object()
    return sorted(name for name in one.keys() | other.keys() if one.get(name, absent) != other.get(name, absent))


def hold_equal(one: Mapping[str, object], other: Mapping[str, object], problem: str) -> None:
    """Fail unless the mappings are equal. `problem` leads to the names that differ."""
    names = differing(one, other)
    hold(not names, f"{problem} {listed(names)}")


def listed(names: Iterable[str]) -> str:
    """Format the first names for a message."""
    first, *others = (*names, "")[:-1] or ("nothing",)
    shown = [first, *others[:4]]
    return ", ".join(shown) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
