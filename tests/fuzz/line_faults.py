"""Raises an error at a chosen line of fp8refit or an adapter, as an interrupt may come between any two lines.

But where a `with` block ends, none can come before `__exit__` is called: Python looks for interrupts only at calls and jumps.
"""

import dis
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import fp8refit_transformers

import fp8refit

ROOTS = tuple(str(Path(package.__file__).parent) + "/" for package in (fp8refit, fp8refit_transformers))
Place = tuple[str, int]
"""A file and a line."""


class Tracer:
    """Shows every line that this thread comes to, before it is run.

    Args:
        on_line: Called with the place; what it raises is raised there.
    """

    def __init__(self, on_line: Callable[[Place], None]) -> None:
        self._on_line = on_line

    def on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.on_event if frame.f_code.co_filename.startswith(ROOTS) else None

    def on_event(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not _ends_with(frame):
            self._on_line((frame.f_code.co_filename, frame.f_lineno))
        return self.on_event


def _ends_with(frame: FrameType) -> bool:
    """Whether a frame comes to the line of a `with` once more, to call `__exit__`, and first loads its arguments."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ") and frame.f_code.co_code[frame.f_lasti] == dis.opmap["LOAD_CONST"]


@contextmanager
def traced(on_line: Callable[[Place], None]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(Tracer(on_line).on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(call: Callable[[], object]) -> list[Place]:
    """Every line that a call comes to, in order."""
    places: list[Place] = []
    with traced(places.append):
        call()
    return places


@contextmanager
def raising(error: BaseException, *, at: Place | int, again: int = 1) -> Iterator[list[Place]]:
    """Raise `error` once in the block: at the `again`-th time that the line `at` comes, or at the `at`-th of all lines.

    Gives the place at which it was raised; empty if it never was.
    """
    raised: list[Place] = []
    left = again if isinstance(at, tuple) else at

    def on_line(place: Place) -> None:
        nonlocal left
        if raised or (isinstance(at, tuple) and place != at):
            return
        left -= 1
        if left == 0:
            raised.append(place)
            raise error

    with traced(on_line):
        yield raised
