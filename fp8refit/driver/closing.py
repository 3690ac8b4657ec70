"""Closes objects at the end of a `with` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from fp8refit.errors import RefitError


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
