"""What goes wrong inside a rank, whatever the engine."""

from collections.abc import Callable

import fp8refit.ranks.write


def end_next_write(fault: Callable[[], None]) -> None:
    """Let the next write of this process end in `fault`, after its last slot."""
    honest = fp8refit.ranks.write.assert_in_place

    def assert_in_place(inventory: object) -> None:
        fp8refit.ranks.write.assert_in_place = honest
        fault()

    fp8refit.ranks.write.assert_in_place = assert_in_place


def fail() -> None:
    raise RuntimeError("injected")
