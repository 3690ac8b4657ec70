"""What commands write: JSON, tables and errors, progress on standard error, and exit codes."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

Result = TypeVar("Result", bound=BaseModel)

EXIT_FAILED = 1
"""The command ran, but its result is bad."""
EXIT_REFUSED = 2
"""The command was refused: a `RefitError` or invalid options."""
WIDE = 10_000
"""Width, in columns, of a table that must not wrap."""


def write_json(model: BaseModel) -> None:
    """Write one object on a line of standard output."""
    typer.echo(model.model_dump_json())


def write_result(result: Result, show: Callable[[Result], object], *, as_json: bool) -> None:
    """Write a result as JSON, or show it to people."""
    if as_json:
        write_json(result)
    else:
        show(result)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is. It is not broken, so that names in it can be searched for."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()  # also into a pipe


def complain(text: str) -> None:
    """Write an error to standard error."""
    print_line(Console(stderr=True), text, "red")


def make_console() -> Console:
    """Return a console for standard output: as wide as the terminal, unlimited in a file or pipe."""
    is_narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_narrow else WIDE)


def make_table(*names: str, title: str | None = None, show_header: bool = True) -> Table:
    """Create a table that wraps long cells instead of cutting them."""
    columns = [Column(name, overflow="fold") for name in names]
    return Table(*columns, title=None if title is None else escape(title), show_header=show_header)


@contextlib.contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, driven by (bytes done, bytes in total)."""
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(label, total=None, visible=False)
        yield lambda done, total: progress.update(bar, completed=done, total=total, visible=True)


@contextlib.contextmanager
def step_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on standard error, driven by (current step, steps done, steps in total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("begin", total=1)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)


@contextlib.contextmanager
def push_progress(urls: Iterable[str]) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar per server on standard error, driven by (URL, bytes done, bytes in total).

    A bar pulses until its server's first bytes are read.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {url.rstrip("/"): progress.add_task(escape(url), total=None) for url in urls}
        yield lambda url, done, total: progress.update(bars[url], completed=done, total=total)
