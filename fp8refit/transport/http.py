"""The driver's end of a line to a server: orders are posted to the engine's own HTTP server, answers are what it returns.

The driver opens no port. It neither follows redirects nor uses proxies, and takes no answer that is too long.
"""

import http.client
import ipaddress
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from functools import cached_property
from http import HTTPStatus
from typing import Any, ClassVar

from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.transport.line import Line
from fp8refit.transport.orders import API_KEY_VARIABLE, MAX_BYTES, TOKEN_VARIABLE

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A peer that is silent for 10 s is asked every 5 s, four times, whether it is there; what was sent has to arrive in 30 s."""


class Server(Line):
    """A running server of one kind of engine. An adapter says by which route orders reach our plugin there.

    Args:
        url: Where it listens, as `http://127.0.0.1:8000`.
        api_key: Its API key. `FP8REFIT_API_KEY` in the environment if not given.
        token: What it was told in `FP8REFIT_TOKEN`, if it was. The same variable here if not given.

    Raises:
        UnsupportedEngineError: It is no URL.
    """

    engine: ClassVar[str] = ""

    def __init__(self, url: str, *, api_key: str | None = None, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UnsupportedEngineError(f'{url!r} is no URL of a server; pass one like "http://127.0.0.1:8000"')
        self.url = url.rstrip("/")
        super().__init__(
            f"the server at {self.url}", token=os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects(), _Http(), _Https())
        self._headers = {"Content-Type": "application/json"}
        api_key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def recognise(self) -> bool:
        """Whether this kind of engine answers at the URL.

        Raises:
            EngineLostError: Nobody answers.
            UnsupportedEngineError: It asks for another API key.
        """
        raise NotImplementedError

    def send(self, route: str, body: str | None, *, timeout_s: float) -> tuple[int, str]:
        """Post `body`, or get if there is none; status and answer.

        Raises:
            EngineLostError: It cannot be reached, or does not answer in time.
            UnsupportedEngineError: It asks for another API key, or says more than any answer of ours is long.
        """
        data = None if body is None else body.encode()
        request = urllib.request.Request(self.url + route, data=data, headers=self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return response.status, self._read(response, route)
        except urllib.error.HTTPError as error:
            with error:
                text = self._read(error, route)
            if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise UnsupportedEngineError(
                    f"{self.url} answered {error.code} to {route}: it asks for an API key; pass api_key, or set "
                    f"{API_KEY_VARIABLE} ({text[:200]})"
                ) from error
            return error.code, text
        except (OSError, http.client.HTTPException) as error:
            raise EngineLostError(
                f"{self.label} cannot be reached ({type(error).__name__}: {error}); start it again"
            ) from error

    def _read(self, response: Any, route: str) -> str:
        """What a server says, if it is not too long; looked at before it is taken in."""
        announced = response.headers.get("Content-Length")
        if announced is None or (announced.isdecimal() and int(announced) <= MAX_BYTES):
            text: bytes = response.read(MAX_BYTES + 1)
            if announced is not None and len(text) < int(announced):
                raise http.client.IncompleteRead(text[:80], int(announced) - len(text))
            if len(text) <= MAX_BYTES:
                return text.decode(errors="replace")
        raise UnsupportedEngineError(
            f"{self.url} answered more than {MAX_BYTES} bytes to {route}, which is none of ours"
        )


class _Connection(http.client.HTTPConnection):
    """Is broken soon after the other host or the network went away, however long an order may take."""

    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """The same, over TLS."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    @cached_property
    def trusted(self) -> ssl.SSLContext:
        """Read once: a refit is several orders."""
        return ssl.create_default_context()

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=self.trusted)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An API key goes nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def read_object(text: str) -> dict[str, Any]:
    """The JSON object that `text` is, or an empty one if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def is_local(request: Any) -> bool:
    """Whether who asks a server is on its host, or in its process. A Unix socket has no addresses.

    Args:
        request: Starlette's, or None.
    """
    client = getattr(request, "client", None)
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client.host).is_loopback
    except ValueError:
        return False
