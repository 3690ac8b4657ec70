"""Pauses Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: reading a model or a policy makes many objects but no garbage, and a process has many more
    to scan. At the end only the new ones are scanned; otherwise the collector would begin by scanning all.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(0)
            gc.enable()
