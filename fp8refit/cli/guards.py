"""Guards around commands: for signals, invalid options, folders that cannot be written, and what engines print."""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer
from pydantic import ValidationError


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C, so that temporary files are removed. A second signal ends the process at
    once.

    A signal that is ignored, as under nohup, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def options_checked() -> Iterator[None]:
    """Report which option a config refuses.

    Raises:
        typer.BadParameter: It refuses one.
    """
    try:
        yield
    except ValidationError as error:
        problem = error.errors()[0]
        field = [part for part in problem["loc"] if isinstance(part, str)][-1]
        option = f"--{field.removeprefix('num_').replace('_', '-')}"
        raise typer.BadParameter(f"{problem['input']!r}: {problem['msg']}", param_hint=option) from error


def make_folder(folder: Path, option: str) -> None:
    """Create the folder for results before a long run.

    Raises:
        typer.BadParameter: It cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {folder} ({error})", param_hint=option) from error


@contextlib.contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Redirect standard output of engines and their worker processes, C libraries included, to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which would be written when the process ends
        os.dup2(saved, 1)
        os.close(saved)
