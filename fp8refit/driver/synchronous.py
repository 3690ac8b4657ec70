"""Helpers for synchronous callers: runs coroutines that never suspend, and closes objects at the end of a `with`
block.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from fp8refit.errors import RefitError

T = TypeVar("T")


def run(steps: Coroutine[Any, Any, T], *, engine: str = "this engine") -> T:
    """Run a coroutine of a synchronous engine, which never suspends and so needs no event loop."""
    try:
        steps.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    steps.close()
    raise AssertionError(f"{engine} is synchronous, and suspended")


class Closing(ABC):
    """Closed at the end of its `with` block. An error of the block takes precedence over one of closing."""

    @abstractmethod
    def close(self) -> None:
        """Release resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RefitError:
            if error is None:
                raise
