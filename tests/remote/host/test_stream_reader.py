"""What a rank takes the sender's calls for."""

from math import inf

import pytest

import fp8refit.remote.host.stream_reader
from fp8refit.remote.host.stream_reader import State, StreamReader
from fp8refit.remote.protocol import messages
from fp8refit.transport.memory.importer import Importer
from fp8refit.transport.memory.ring import Call, Ring
from tests.fake_ranks import Cluster


@pytest.mark.parametrize(
    ("call", "is_over", "lingering_s"), [(Call.OVER, True, inf), (Call.BACK, False, inf), (Call.STAY, False, 0.0)]
)
def test_a_stream_is_over_only_when_the_sender_says_so(call, is_over, lingering_s, monkeypatch):
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_LINGERING_S", lingering_s)
    monkeypatch.setattr(fp8refit.remote.host.stream_reader, "_FOLLOWING_S", inf)
    ring = Ring.make()
    ring.begin()
    ring.expect_readers()
    ring.call_back(call)
    rank = Cluster("alone").ranks[0]
    rank.target.begin = lambda prepared: None
    reader = StreamReader(rank, Importer(rank.target.live.device))
    try:
        assert reader.follow(messages.Stream(refit="a", ring=ring.segment, begins=True), None) is is_over
        assert reader.state is (State.OVER if is_over else State.OPEN)
        assert ring.is_left(1)
    finally:
        reader.unmap()
        ring.close()
