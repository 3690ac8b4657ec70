"""Python's garbage collector, paused."""

import gc

import pytest

from fp8refit.live.collector import collector_paused


@pytest.fixture
def begun():
    """The generations of every collection that begins."""
    begun: list[int] = []

    def note(phase, info):
        if phase == "start":
            begun.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield begun
    gc.callbacks.remove(note)


def test_many_new_objects_are_scanned_once_and_alone(begun):
    with collector_paused():
        held = [[] for _ in range(200_000)]
        assert begun == []
    more = [[] for _ in range(300)]
    assert begun == [0]
    assert len(held) > len(more)


def test_a_collector_that_was_off_stays_off(begun):
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
        assert begun == []
    finally:
        gc.enable()


def test_pauses_may_be_nested(begun):
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
        assert begun == []
    assert gc.isenabled()
    assert begun == [0]
