"""A store where processes of several hosts meet: torch's, under a token, on one address of the host that opens it.

No client waits long for an answer, even if the trainer is stopped or its host vanishes. torch's client has no such limit,
so its connection gets one. An exchange that hits the limit raises a `RuntimeError`. After that the connection must not be
used: a late answer would be taken for that of the next question.
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
"""How long the trainer may be silent, however short the timeout. It may pause for a moment, and torch's client resolves
the address's name, where glibc waits 10 s for a silent name server."""
_BREAK_S = 0.1
_DESCRIPTORS = Path("/proc/self/fd")


def open_store(*, host: str, port: int, timeout_s: float) -> tuple[Store, str, int]:
    """Open a store, and return it with its token and port.

    Args:
        host: Address of this host that the others can reach. The store binds to it.
        port: 0 for any free port.
        timeout_s: For every exchange with it.

    Raises:
        TransportError: The address is not one of this host's, or is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as listener:
            port = listener.getsockname()[1]
            descriptor = os.dup(listener.fileno())
            store = _tcp_store(host, port, timeout_s, is_master=True, master_listen_fd=descriptor)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"cannot listen on {host}:{port} ({error}); use an address of this host and a free port"
        ) from error
    token = secrets.token_hex(16)
    return PrefixStore(token, store), token, port


def find_store(*, host: str, port: int, token: str, timeout_s: float) -> Store:
    """Connect to the trainer's store.

    Args:
        host: The trainer's host.
        port: Port there.
        token: Identifies the group.
        timeout_s: To connect, and for every answer; for answers at least 15 s.

    Raises:
        TransportError: It cannot be reached or does not answer.
    """
    try:
        # torch's client would retry a port where nobody listens until the timeout.
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
    """Limit every exchange of this process with a store.

    torch's client has a deadline for waiting for keys, but none for the answers to `check`, `compare_set` and `add`, or
    for what follows the wait in `get`. A trainer that is stopped, or whose host vanishes, sends no answer and does not
    close the connection: the client would wait until TCP gives up after a quarter of an hour. With this limit on the
    connection it raises `DistNetworkError`. `poll` waits for keys without hitting the limit.
    """
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for connection in _connections(peer):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        # A large value fills the buffers between the hosts, and then waits for a trainer that does not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextlib.contextmanager
def _broken_off_after(limit_s: float, peer: tuple[str, int]) -> Iterator[None]:
    """End a connection attempt to a store that does not answer: torch's client talks to it before a limit can be set."""
    is_over = threading.Event()

    def watch() -> None:
        pause_s = limit_s
        while not is_over.wait(pause_s):
            for connection in _connections(peer):
                with contextlib.suppress(OSError):  # it has just ended
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
    """Yield this process's connections to an address; none if the system does not list them (Linux does)."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else ():
        with (
            contextlib.suppress(OSError),
            contextlib.ExitStack() as stack,
        ):  # it has been closed, or is not connected
            # Do not duplicate other files: closing a duplicate gives up this process's locks on the file.
            if not os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                continue
            # With this flag Python leaves the mode of the connection as it is, whatever `socket.setdefaulttimeout` says.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            connection = stack.enter_context(socket.socket(type=kind, fileno=os.dup(int(name))))
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _address(connection) == peer:
                yield connection


def _address(connection: socket.socket) -> tuple[str, int]:
    """Return where a connection goes, in the same form for IPv4 and for IPv6 carrying it."""
    host, port = connection.getpeername()[:2]
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), port
