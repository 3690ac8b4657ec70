"""Stores that processes meet at: what limits a client's connection, and what that does not touch."""

import os
import socket
import struct
import time
from datetime import timedelta

import pytest

from fp8refit.transport.collective import store
from fp8refit.transport.collective.store import find_store, open_store


def limits_of(port):
    """How long each connection of this process to a port waits to receive and to send, and whether it blocks."""
    return [
        (limit_of(connection, socket.SO_RCVTIMEO), limit_of(connection, socket.SO_SNDTIMEO), blocks(connection))
        for connection in store._connections(("127.0.0.1", port))
    ]


def limit_of(connection, option):
    return connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("ll"))


def blocks(connection):
    return os.get_blocking(connection.fileno())


@pytest.mark.parametrize(("timeout_s", "seconds"), [(1.0, (15, 0)), (20.5, (20, 500_000))])
def test_a_client_waits_for_an_answer_no_longer_than_its_timeout_and_15_s_at_least(timeout_s, seconds):
    _, token, port = opened = open_store(host="127.0.0.1", port=0, timeout_s=20.0)
    none, limit = struct.pack("ll", 0, 0), struct.pack("ll", *seconds)
    assert limits_of(port) == [(none, none, True)]  # of who opened it, and asks its own process
    found = find_store(host="127.0.0.1", port=port, token=token, timeout_s=timeout_s)
    assert limits_of(port) == [(limit, limit, True)] * 2
    found.set("key", "value")
    assert opened[0].get("key") == found.get("key") == b"value"


def test_a_key_is_waited_for_longer_than_an_answer(monkeypatch):
    monkeypatch.setattr(store, "_LEAST_S", 0.3)
    _, token, port = open_store(host="127.0.0.1", port=0, timeout_s=20.0)
    found = find_store(host="127.0.0.1", port=port, token=token, timeout_s=0.3)
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match="wait timeout"):
        found.wait(["key"], timedelta(seconds=1))
    assert time.monotonic() - start_s >= 1
    with pytest.raises(RuntimeError, match="wait timeout"):
        found.get("key")
    assert not found.check(["key"])


def test_other_connections_are_left_as_they_are():
    _, token, port = open_store(host="127.0.0.1", port=0, timeout_s=20.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as other:
        other.connect(listener.getsockname())
        before_s = socket.getdefaulttimeout()
        socket.setdefaulttimeout(5.0)  # which makes Python change what it takes over
        try:
            find_store(host="127.0.0.1", port=port, token=token, timeout_s=1.0)
        finally:
            socket.setdefaulttimeout(before_s)
        assert limit_of(other, socket.SO_RCVTIMEO) == struct.pack("ll", 0, 0)
        assert blocks(other)
