"""A store at which processes of several hosts meet: torch's, under a token, on one address of the host that opens it."""

import os
import secrets
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fp8refit.errors import TransportError

_LOOKUP_S = 15.0
"""torch's client asks for the name of the address it goes to, and glibc waits 10 s for a name server that is silent."""


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

    Raises:
        TransportError: It cannot be reached.
    """
    try:
        # torch's client would try a port where nobody listens until its time is over.
        socket.create_connection((host, port), timeout=timeout_s).close()
        store = _tcp_store(host, port, timeout_s, is_master=False)
    except (OSError, RuntimeError) as error:
        raise TransportError(
            f"the trainer cannot be reached at {host}:{port} ({error}); give the trainer's config a host that this engine's "
            "hosts can reach"
        ) from error
    return PrefixStore(token, store)


def _tcp_store(host: str, port: int, timeout_s: float, **options: Any) -> TCPStore:
    timeout = timedelta(seconds=max(timeout_s, _LOOKUP_S))
    store = TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
