"""Captures errors that are raised again after some clean-up."""

from types import TracebackType
from typing import Self


class ErrorCapture:
    """Keeps what a block raises, to raise it after the block: `raise failed.take()`.

    Awaiting in an `except` block may run an event loop. Whatever else runs there would chain to the error and keep it
    alive, with its traceback and the trainer's tensors in it. After this block, no error is being handled.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return True

    def take(self) -> BaseException:
        """Return what was captured, to be raised. Keeps nothing, since the traceback would hold the caller's frame."""
        error, self.error = self.error, None
        assert error is not None, "nothing was captured"
        return error
