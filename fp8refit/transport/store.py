"""A store at which processes of several hosts meet: torch's, under a token, on one address of the host that opens it.

Whoever went to it is left by no answer for long, even if the trainer is stopped or its host vanishes without a word: torch's
client has no limit of its own for that, so its connection is given one. An exchange that runs into it raises a `RuntimeError`,
and no other may follow it there: the answer that comes late would be taken for that of the next question.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fp8refit.errors import TransportError

_LEAST_S = 15.0
"""How long the trainer may be silent, however short the timeout. It may stand still for a moment; and torch's client asks for
the name of the address it goes to, where glibc waits 10 s for a name server that is silent."""
_BREAK_S = 0.1
_DESCRIPTORS = Path("/proc/self/fd")


def open_store(*, host: str, port: int, timeout_s: float) -> tuple[Store, str, int]:
    """Open a store, and give it with its token and its port.

    Args:
        host: Address of this host that the others reach, and that the store binds to.
        port: 0 for any that is free.
        timeout_s: For every exchange with it.

    Raises:
        TransportError: The address is none of this host's, or taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as listener:
            port = listener.getsockname()[1]
            descriptor = os.dup(listener.fileno())
            store = _tcp_store(host, port, timeout_s, is_master=True, master_listen_fd=descriptor)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"{host}:{port} cannot be listened at ({error}); name an address of this host and a port that is free"
        ) from error
    token = secrets.token_hex(16)
    return PrefixStore(token, store), token, port


def find_store(*, host: str, port: int, token: str, timeout_s: float) -> Store:
    """Go to a store that the trainer opened.

    Args:
        host: Of the trainer.
        port: There.
        token: Names what is exchanged.
        timeout_s: To reach it, and for every answer; for those it is 15 s at least.

    Raises:
        TransportError: It cannot be reached, or does not answer.
    """
    try:
        # torch's client would try a port where nobody listens until its time is over.
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            peer = _address(probe)
        with _broken_off_after(_limit_s(timeout_s), peer):
            store = _tcp_store(host, port, timeout_s, is_master=False)
        _limit_answers(_limit_s(timeout_s), peer)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"the trainer cannot be reached at {host}:{port} ({error}); give the trainer's config a host that this engine's "
            "hosts can reach"
        ) from error
    return PrefixStore(token, store)


def _tcp_store(host: str, port: int, timeout_s: float, **options: Any) -> TCPStore:
    timeout = timedelta(seconds=_limit_s(timeout_s))
    store = TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _limit_s(timeout_s: float) -> float:
    return max(timeout_s, _LEAST_S)


def _limit_answers(limit_s: float, peer: tuple[str, int]) -> None:
    """Let every exchange of this process with a store end.

    torch's client waits for keys to a deadline, but without one for the answers to `check`, `compare_set` and `add`, and for
    what follows the wait in `get`. A trainer that is stopped, or whose host vanishes, sends neither an answer nor the end of
    its connection: the client would wait until it goes on, or TCP gives up after a quarter of an hour. Past this limit of the
    connection itself it raises `DistNetworkError`. Keys are waited for with `poll`, which is not subject to it.
    """
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for connection in _connections(peer):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        # A large value fills what the hosts between them hold of it, and waits for a trainer that does not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextlib.contextmanager
def _broken_off_after(limit_s: float, peer: tuple[str, int]) -> Iterator[None]:
    """End the attempt to connect with a store that does not answer: torch's client greets it before anybody can limit it."""
    is_over = threading.Event()

    def watch() -> None:
        pause_s = limit_s
        while not is_over.wait(pause_s):
            for connection in _connections(peer):
                with contextlib.suppress(OSError):  # it just ended
                    connection.shutdown(socket.SHUT_RDWR)
            pause_s = _BREAK_S  # the client may have time for another attempt

    watcher = threading.Thread(target=watch, name="fp8refit-store", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _connections(peer: tuple[str, int]) -> Iterator[socket.socket]:
    """The connections of this process that go to an address; none where the system does not list them (Linux does)."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else ():
        with (
            contextlib.suppress(OSError),
            contextlib.ExitStack() as stack,
        ):  # it was closed meanwhile, or is not connected
            # Others are not even duplicated: to close the duplicate of a file gives up this process's locks of it.
            if not os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                continue
            # With this flag Python leaves the mode of the connection as it is, whatever `socket.setdefaulttimeout` says.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            connection = stack.enter_context(socket.socket(type=kind, fileno=os.dup(int(name))))
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _address(connection) == peer:
                yield connection


def _address(connection: socket.socket) -> tuple[str, int]:
    """Where a connection goes to, the same for a socket of IPv4 and one of IPv6 that carries it."""
    host, port = connection.getpeername()[:2]
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), port
