"""What tests of ranks in other processes share."""

import pytest

import fp8refit.remote.host.stream_reader
import fp8refit.remote.host.stream_sender

LONG_S = 40.0
"""What nothing in these tests takes."""


@pytest.fixture
def patient(monkeypatch):
    """Ranks stay in a stream as long as it takes, and its driver waits for them: orders can be counted on any machine."""
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_LINGERING_S", LONG_S)
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_FOLLOWING_S", LONG_S)
    monkeypatch.setattr(fp8refit.remote.host.stream_sender, "_PATIENCE_S", LONG_S)
