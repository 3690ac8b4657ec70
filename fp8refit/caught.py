"""Errors after which something has to be done before they go on."""

from types import TracebackType
from typing import Self


class Caught:
    """Keeps what a block raises, to be raised again after it: `raise caught.take()`.

    What is awaited in an error's handler may run an event loop, in which whatever else runs there would take the error for its
    own context, and keep it: with its traceback, and the trainer's tensors in it. After a block nothing is being handled.
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
        """What was caught, to be raised. Nothing of it is kept: its traceback will hold whoever raises it."""
        error, self.error = self.error, None
        assert error is not None, "nothing was caught"
        return error
