"""The server's side of HTTP, for any engine: decides who may give orders, and limits what is read.

Unauthorized requests are refused by their headers; their bodies are not read.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

from fp8refit import __version__
from fp8refit.errors import EngineBusyError, RankFailedError, RefitError, UnsupportedEngineError
from fp8refit.remote.servers import orders
from fp8refit.remote.servers.orders import Answer
from fp8refit.transport.vote import ErrorRecord

READING_S = 60.0
"""Time limit in seconds for an order to arrive."""
MAX_VISITORS = 8
"""Maximum number of orders being received, waiting or running. A refit has one at a time."""
CLOSED: Mapping[str, str] = {"Connection": "close"}
"""Headers of the response to a refused order. Its body is not read, so the connection is closed."""
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
"""The last one is the first as an IPv6 socket reports it."""
_LOCAL_NAME = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]|\[::ffff:127\.0\.0\.1\])(:\d+)?", re.IGNORECASE)
_OF_A_PROXY = re.compile(
    r"forwarded|via|x-forwarded.*|x-original.*|x-real-ip|x-envoy-.*|(.+-)?(client|connecting)-ip|cf-.*|cdn-.*"
)
"""Headers that proxies set."""
_OF_A_BROWSER = re.compile(r"origin|referer|sec-.*")
"""Headers that browsers set, and other programs do not."""

Receive: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]


class _RefusedError(Exception):
    """An order is refused with this HTTP status."""

    def __init__(self, status: HTTPStatus, error: RefitError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


class Door:
    """Receives orders over HTTP.

    Args:
        token: What a driver has to show, as `orders.read_token` gives it; None if there is none.
        api_keys: The server's own API keys. A driver has to show one of them if there is no token. With neither, only programs
            on this host may give orders.
    """

    def __init__(self, *, token: str | None, api_keys: Sequence[str] = ()) -> None:
        self._token, self._api_keys = token, tuple(api_keys)
        self._num_visitors = 0

    async def take(
        self, scope: Mapping[str, Any], receive: Receive, answer: Callable[[str], Awaitable[Answer]]
    ) -> tuple[int, str, Mapping[str, str]]:
        """Accept or refuse one request. Returns the response's status, its body, which is always an `Answer`, and its headers.

        Args:
            scope: ASGI's, of a POST.
            receive: ASGI's.
            answer: Carries out an authorized order.
        """
        try:
            self._check_may_ask(scope)
            if self._num_visitors >= MAX_VISITORS:
                busy = EngineBusyError(f"{self._num_visitors} orders wait for this server already; refit later")
                raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, busy)
            self._num_visitors += 1
            try:
                found = await answer(await _read(receive))
            finally:
                self._num_visitors -= 1
        except _RefusedError as refused:
            return refused.status, Answer(error=ErrorRecord.of(refused.error)).model_dump_json(), CLOSED
        return HTTPStatus.OK, found.model_dump_json(), {}

    def _check_may_ask(self, scope: Mapping[str, Any]) -> None:
        headers = _headers_of(scope)
        protocol = headers.get(orders.PROTOCOL_HEADER.lower())
        if protocol != str(orders.PROTOCOL):
            # Status 200: older drivers take any other status for a server without fp8refit.
            raise _RefusedError(HTTPStatus.OK, other_version(protocol))
        problem = self._distrust(headers, scope)
        if problem:
            raise _RefusedError(HTTPStatus.FORBIDDEN, UnsupportedEngineError(problem))
        if headers.get("content-type") != orders.MEDIA_TYPE:
            problem = f"an order has the content type {orders.MEDIA_TYPE}, and no other"
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, UnsupportedEngineError(problem))
        length = headers.get("content-length", "0")
        if len(length) > 20 or (length.isdecimal() and int(length) > orders.MAX_ORDER_BYTES):
            raise _too_long()

    def _distrust(self, headers: Mapping[str, str], scope: Mapping[str, Any]) -> str:
        """Why this caller may not give orders; empty if it may."""
        if self._token is not None:
            shown = headers.get(orders.TOKEN_HEADER.lower(), "")
            if _is_same(shown, self._token):
                return ""
            return (
                f"the token is not that of the server; set {orders.TOKEN_VARIABLE} to the same value for both "
                f"({'another' if shown else 'none'} was shown)"
            )
        if self._api_keys:
            kind, _, shown = headers.get("authorization", "").partition(" ")
            if kind.lower() == "bearer" and any(_is_same(shown, key) for key in self._api_keys):
                return ""
            return f"the API key is not that of the server; pass api_key, or set {orders.API_KEY_VARIABLE}"
        reason = _why_elsewhere(headers, scope)
        return reason and (
            "this server takes weights from its own host alone; start it with an API key, or with "
            f"{orders.TOKEN_VARIABLE} set ({reason})"
        )


def other_version(protocol: str | None) -> RankFailedError:
    """The error for a driver with another protocol, or with one from before the protocol header."""
    theirs = "an older one" if protocol is None else protocol[:20]
    return RankFailedError(
        f"this server, fp8refit {__version__}, speaks protocol {orders.PROTOCOL} with drivers, and this driver {theirs}; "
        "install the same version on both sides"
    )


def _why_elsewhere(headers: Mapping[str, str], scope: Mapping[str, Any]) -> str:
    """Why a request may not come from a program on this host; empty if it seems to.

    Proxies and browser pages on this host also connect locally, but their headers reveal them. Unix sockets, and
    connections that have already ended, show no address, so their origin is unknown.
    """
    client = scope.get("client")
    if not client or client[0] not in _LOOPBACK:
        return f"it was asked from {client[0] if client else 'an address that is not known'}"
    for name in headers:
        if _OF_A_PROXY.fullmatch(name):
            return f"a proxy passed the order on: it has the header {name}"
        if _OF_A_BROWSER.fullmatch(name):
            return f"a page in a browser sent the order: it has the header {name}"
    host = headers.get("host", "")
    if not _LOCAL_NAME.fullmatch(host):
        return f"it was asked by the name {host[:80]!r}; call it 127.0.0.1, [::1] or localhost"
    return ""


def _headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """A request's headers by lower-case name. Repeated headers are joined by commas, so they match no expected
    value.
    """
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _is_same(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode(), secret.encode())


async def _read(receive: Receive) -> str:
    """Read the body, up to the maximum length of an order."""
    body = bytearray()
    try:
        async with asyncio.timeout(READING_S):
            while True:
                part = await receive()
                if part["type"] != "http.request":
                    raise _RefusedError(HTTPStatus.BAD_REQUEST, RankFailedError("the driver hung up"))
                body += part.get("body", b"")
                if len(body) > orders.MAX_ORDER_BYTES:
                    raise _too_long()
                if not part.get("more_body", False):
                    return body.decode()
    except TimeoutError:
        late = RankFailedError(f"the order did not arrive within {READING_S:g} s; refit again")
        raise _RefusedError(HTTPStatus.REQUEST_TIMEOUT, late) from None
    except UnicodeDecodeError as error:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, RankFailedError(f"an order is UTF-8 ({error.reason})")) from None


def _too_long() -> _RefusedError:
    problem = (
        f"an order has {orders.MAX_ORDER_BYTES} bytes at most; calibrate with fewer prompts, or announce less at once"
    )
    return _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, UnsupportedEngineError(problem))
