"""What goes wrong inside a rank, whatever the engine."""

from collections.abc import Callable
from typing import Any

import fp8refit.ranks.write
from fp8refit.ranks.target import Target
from fp8refit.ranks.write import Write


def end_next_write(fault: Callable[[], None]) -> None:
    """Let the next write of this process end in `fault`, after its last slot."""
    honest = fp8refit.ranks.write.assert_in_place

    def assert_in_place(inventory: object) -> None:
        fp8refit.ranks.write.assert_in_place = honest
        fault()

    fp8refit.ranks.write.assert_in_place = assert_in_place


def before_next(when: str, fault: Callable[[], None]) -> None:
    """Let `fault` happen in this process before the next refit is `prepared` or `written`."""
    owner, name = (Write, "begin") if when == "written" else (Target, "prepare")
    honest = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        setattr(owner, name, honest)
        fault()
        return honest(*arguments, **options)

    setattr(owner, name, called)


def fail() -> None:
    raise RuntimeError("injected")
