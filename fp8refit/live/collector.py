"""Pauses Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection: reading a model or a policy makes many objects but no garbage, and a process has many more
    to scan. At the end only the new ones are scanned, so that a scan of all that is due begins later, not in a refit.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            try:
                gc.collect(0)
            finally:  # an interrupt is raised as soon as the scan is over
                gc.enable()
