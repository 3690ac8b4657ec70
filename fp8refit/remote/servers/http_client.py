"""The driver's connection to a server: posts orders to the engine's own HTTP server.

The driver opens no port, follows no redirects, uses no proxies, and limits size and time of every answer. Every order has a
connection of its own.
"""

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from fp8refit.errors import EngineLostError, UnsupportedEngineError
from fp8refit.remote.servers.connection import Connection
from fp8refit.remote.servers.orders import (
    API_KEY_VARIABLE,
    MAX_BYTES,
    MEDIA_TYPE,
    PROTOCOL,
    PROTOCOL_HEADER,
    TOKEN_HEADER,
    Answer,
    is_header,
    read_token,
)

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""After 10 s of silence the peer is probed every 5 s, four times. Sent data must be acknowledged within 30 s."""


class Server(Connection):
    """A running server of one kind of engine. An adapter defines the route of our plugin there.

    Args:
        url: The server's base URL, such as `http://127.0.0.1:8000`.
        api_key: The server's API key; by default `FP8REFIT_API_KEY` in this environment.
        token: The server's `FP8REFIT_TOKEN`, if it has one; by default the same variable in this environment.

    Raises:
        UnsupportedEngineError: `url` is not a URL, or the key or token is malformed.
    """

    engine: ClassVar[str] = ""

    def __init__(self, url: str, *, api_key: str | None = None, token: str | None = None) -> None:
        self._address = _split(url)
        self.url = url.rstrip("/")
        super().__init__(f"the server at {self.url}")
        self._headers = {}
        api_key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if api_key:
            if not is_header(api_key):
                raise UnsupportedEngineError(
                    f"an API key is printable ASCII without spaces; pass api_key, or set {API_KEY_VARIABLE}, to the server's"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._order_headers = {"Content-Type": MEDIA_TYPE, PROTOCOL_HEADER: str(PROTOCOL)}
        token = read_token(token)
        if token is not None:
            self._order_headers[TOKEN_HEADER] = token

    def recognise(self) -> bool:
        """Whether this kind of engine answers at the URL.

        Raises:
            EngineLostError: No server answers.
            UnsupportedEngineError: It requires another API key.
        """
        raise NotImplementedError

    def order(self, route: str, message: str, *, timeout_s: float) -> tuple[str | None, str]:
        """Post an order. Returns the order handler's answer (None if there is no handler), and status and body for messages.

        Raises:
            EngineLostError: See `send`.
            UnsupportedEngineError: See `send`.
        """
        status, text = self.send(route, message, timeout_s=timeout_s, headers=self._order_headers)
        is_answer = status == HTTPStatus.OK or _is_answer(text)
        return text if is_answer else None, f"{self.url} answered {status}: {text[:200]}"

    def send(
        self, route: str, body: str | None, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """POST `body`, or GET if it is None. Returns status and answer.

        Args:
            route: The path.
            body: JSON, unless `headers` say otherwise.
            timeout_s: Total time limit, to the last byte of the answer.
            headers: Headers in addition to the API key.

        Raises:
            EngineLostError: The server cannot be reached, or does not answer in time.
            UnsupportedEngineError: It requires another API key, or its answer is too long.
        """
        sent = self._headers | ({"Content-Type": "application/json"} if headers is None else dict(headers))
        try:
            status, text = _Exchange(self._connection(timeout_s)).run(
                self._address.path.rstrip("/") + route, body, sent, timeout_s
            )
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise EngineLostError(
                f"{self.label} cannot be reached ({type(error).__name__}: {error}); check its URL, or restart it"
            ) from error
        if text is None:
            raise UnsupportedEngineError(
                f"{self.url} answered more than {MAX_BYTES} bytes to {route}, which is longer than any answer of fp8refit"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and not _is_answer(text):
            raise UnsupportedEngineError(
                f"{self.url} answered {status} to {route}: it asks for an API key; pass api_key, or set "
                f"{API_KEY_VARIABLE} ({text[:200]})"
            )
        return status, text

    def _connection(self, timeout_s: float) -> "_Connection":
        """A new connection, not open yet."""
        host, port = self._address.hostname, self._address.port
        assert host is not None, "looked at"
        if self._address.scheme == "https":
            return _SecureConnection(host, port or http.client.HTTPS_PORT, timeout=timeout_s, context=self._trusted)
        return _Connection(host, port or http.client.HTTP_PORT, timeout=timeout_s)  # else it parses one from the host

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        """Cached, since a refit takes several orders."""
        return ssl.create_default_context()


class _Connection(http.client.HTTPConnection):
    """A connection that breaks soon after the other host or the network is gone, however long an order takes."""

    is_given_up = False
    _line: socket.socket | None = None
    """The socket. `sock` is the same, but None as soon as an answer begins after which the server closes."""

    def connect(self) -> None:
        super().connect()
        self._line = self.sock
        if self.is_given_up:  # in the meantime; nothing was sent
            raise TimeoutError("timed out")
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def give_up(self) -> None:
        """Abort it from another thread."""
        self.is_given_up = True
        if self._line is not None:
            with contextlib.suppress(OSError):  # closed
                self._line.shutdown(socket.SHUT_RDWR)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """The same, over TLS."""


class _Exchange:
    """One request and its answer, in a separate thread, because a socket timeout only limits single reads."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._outcome: Future[tuple[int, str | None]] = Future()

    def run(self, path: str, body: str | None, headers: Mapping[str, str], timeout_s: float) -> tuple[int, str | None]:
        """Return status and answer; None for an answer that is too long.

        Raises:
            OSError: It failed, or took too long.
            HTTPException: The response is not HTTP.
        """
        arguments = ("GET" if body is None else "POST", path, None if body is None else body.encode(), headers)
        try:
            threading.Thread(target=self._post, args=arguments, name="fp8refit-http", daemon=True).start()
            return self._outcome.result(timeout_s)
        except BaseException as error:
            self._connection.give_up()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"timed out: no whole answer within {timeout_s:g} s") from error
            raise

    def _post(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> None:
        connection = self._connection
        try:
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                self._outcome.set_result((response.status, _read(response)))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            self._outcome.set_exception(error)
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse) -> str | None:
    """The body of a response; None if it is too long."""
    if (response.length or 0) > MAX_BYTES:
        return None
    text = response.read(MAX_BYTES + 1)
    if response.length:
        raise http.client.IncompleteRead(text[:80], response.length)
    return text.decode(errors="replace") if len(text) <= MAX_BYTES else None


def _split(url: str) -> SplitResult:
    """Split a server's URL.

    Raises:
        UnsupportedEngineError: It is not a valid URL.
    """
    why = "it begins with http:// or https://"
    if url.startswith(("http://", "https://")):
        try:
            parts = urlsplit(url)
            if not parts.hostname or parts.port == 0:
                why = "it names a host, and a port from 1 to 65535"
            elif parts.username is not None:
                why = f"it has no user name or password; for an API key pass api_key, or set {API_KEY_VARIABLE}"
            elif parts.query or parts.fragment or not is_header(url):
                why = "it ends with its path, without ? and #, in printable ASCII without spaces"
            elif parts.hostname.encode("idna"):
                return parts
        except ValueError as error:
            why = str(error)
    raise UnsupportedEngineError(f'{url!r} is no URL of a server; pass one like "http://127.0.0.1:8000" ({why})')


def _is_answer(text: str) -> bool:
    """Whether it is an answer of our order handler, of any version."""
    return bool(read_object(text).get("speaker") == Answer.model_fields["speaker"].default)


def read_object(text: str) -> dict[str, Any]:
    """Parse `text` as a JSON object; empty if it is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
