"""Python's garbage collector, paused."""

import gc

import pytest

from fp8refit.live.collector import collector_paused


@pytest.fixture(autouse=True)
def collector():
    """A thread that another test left behind may have paused it."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    if not was_enabled:
        gc.disable()


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


def test_new_objects_are_scanned_alone_even_if_a_scan_of_all_is_due(begun):
    for _ in range(2 * gc.get_threshold()[2]):
        gc.collect(1)
    begun.clear()
    with collector_paused():
        held = [[] for _ in range(200_000)]
        assert begun == []
    more = [[] for _ in range(300)]
    assert begun == [0]
    assert len(held) > len(more)


def test_an_interrupt_during_the_scan_leaves_the_collector_on(monkeypatch):
    def interrupt(generation):
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "collect", interrupt)
    with pytest.raises(KeyboardInterrupt), collector_paused():
        pass
    assert gc.isenabled()


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
