"""What synchronous callers share: coroutines that never suspend, and `with` blocks that close."""

from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from fp8refit.errors import RefitError

T = TypeVar("T")


def run(steps: Coroutine[Any, Any, T], *, engine: str = "this engine") -> T:
    """Run what drives a synchronous engine: it never suspends, so that no event loop is needed."""
    try:
        steps.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    steps.close()
    raise AssertionError(f"{engine} is synchronous, and suspended")


class Closing(ABC):
    """Is closed when its `with` block ends. An error of the block counts for more than one of closing."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

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
