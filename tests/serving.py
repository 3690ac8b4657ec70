"""What tests of real servers have in common, whatever the engine."""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fp8refit.remote.servers import orders
from tests.asgi import order_headers

FORK = multiprocessing.get_context("fork")
"""For drivers, and servers where their engine is imported already. No process that is forked has booted one."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
RAW = {
    "a stranger": (403, "the token is not that of the server"),
    "a stranger with a long body": (403, "the token is not that of the server"),
    "an older driver": (200, "install the same version on both sides"),
    "another content type": (415, "an order has the content type"),
    "too long": (413, "an order has 67108864 bytes at most"),
    "too long, in chunks": (413, "an order has 67108864 bytes at most"),
    "truncated": (200, "cannot read what the driver says"),
    "many keys": (200, "cannot read what the driver says"),
}
"""Ways to ask a server with a token for what it does not do: status, and what it says."""


def free_port() -> int:
    """A TCP port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def option(name: str, value: Any) -> list[str]:
    """One setting of a server as its command line takes it."""
    flag = ("--no-" if value is False else "--") + name.replace("_", "-")
    return [flag] if isinstance(value, bool) else [flag, str(value)]


def read_answer(answer: bytes) -> Any:
    """What a server says: JSON, or else text."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode()


def ask(url: str, body: str | None = None, *, headers: Mapping[str, str] = NO_HEADERS) -> tuple[int, Any]:
    """Status and answer of a request; status 0 if nobody answers."""
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, None if body is None else body.encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as said:
            return said.status, read_answer(said.read())
    except urllib.error.HTTPError as error:
        return error.code, read_answer(error.read())
    except OSError:
        return 0, None


def read_metrics(url: str) -> dict[str, float]:
    """What a server exports of refits, in Prometheus' format."""
    _, text = ask(url + "/metrics")
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("fp8refit_"))
    return {name: float(value) for name, _, value in lines}


def interrupted(policy: Mapping[str, Tensor], half_way: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    """A policy that is read once, with something that happens on the way."""
    for index, pair in enumerate(policy.items()):
        if index == len(policy) // 2:
            half_way()
        yield pair


def die(*_: Any) -> None:
    time.sleep(1)  # until the order that begins the write has been carried out
    os.kill(os.getpid(), signal.SIGKILL)


def run_driver(refit: Callable[[], object], *, timeout_s: float = 60) -> int | None:
    """In a process of its own, which is ended if it takes too long; its exit status."""
    process = FORK.Process(target=refit)
    process.start()
    process.join(timeout_s)
    process.kill()
    process.join()
    return process.exitcode


def ask_rawly(url: str, route: str, *, token: str, key: str = "") -> dict[str, dict]:
    """Every way of `RAW`."""
    known = order_headers(X_Fp8refit_Token=token) | ({"Authorization": f"Bearer {key}"} if key else {})
    stranger = known | {orders.TOKEN_HEADER: token[::-1]}
    no_body = {"Content-Length": str(orders.MAX_ORDER_BYTES)}  # which never comes
    older = {name: value for name, value in known.items() if name != orders.PROTOCOL_HEADER}
    chunks = itertools.repeat(b"100000\r\n" + bytes(1 << 20) + b"\r\n", orders.MAX_ORDER_BYTES // (1 << 20) + 1)
    many_keys = ",".join(f'"{index:x}":1' for index in range(1_000_000)).encode()
    if route == "/update_weights_from_ipc":  # an older driver comes by SGLang's own request
        old_body = json.dumps({"zmq_handles": {"fp8refit.order": "{}"}, "flush_cache": False}).encode()
        older["Content-Type"] = "application/json"
    else:
        old_body = b"{}"
    asked: dict[str, tuple[dict, Iterable[bytes]]] = {
        "a stranger": (stranger | {"Content-Length": "2"}, [b"{}"]),
        "a stranger with a long body": (stranger | no_body, []),
        "an older driver": (older | {"Content-Length": str(len(old_body))}, [old_body]),
        "another content type": (known | {"Content-Type": "text/plain", "Content-Length": "2"}, [b"{}"]),
        "too long": (known | {"Content-Length": str(orders.MAX_ORDER_BYTES + 1)}, []),
        "too long, in chunks": (known | {"Transfer-Encoding": "chunked"}, chunks),
        "truncated": (known | {"Content-Length": "15"}, [b'{"driver": {"pl']),
        "many keys": (known | {"Content-Length": str(len(many_keys) + 2)}, [b"{", many_keys, b"}"]),
    }
    return {name: _say(url, route, headers, body) for name, (headers, body) in asked.items()}


def _say(url: str, route: str, headers: dict[str, str], body: Iterable[bytes]) -> dict:
    """Raw HTTP: status, and what was said until the server hung up, or had answered."""
    host, port = url.removeprefix("http://").split(":")
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | {"Connection": "close"}).items())
    said = b""
    with socket.create_connection((host, int(port)), timeout=20) as line:
        try:
            line.sendall(f"POST {route} HTTP/1.1\r\n{lines}\r\n".encode())
            for part in body:
                line.sendall(part)
        except OSError:
            pass  # refused meanwhile
        try:
            while part := line.recv(1 << 16):
                said += part
        except ConnectionResetError:
            pass
    return {"status": int(said.split(b" ")[1]) if said else 0, "says": said.decode(errors="replace")}
