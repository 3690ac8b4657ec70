"""Requests to an ASGI app with no server before it: whoever asks, with whatever headers, and body part by part."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8refit.remote.servers import orders
from fp8refit.remote.servers.orders import Answer

LOCAL = ("127.0.0.1", 40000)
ELSEWHERE = ("10.0.0.7", 40000)


def order_headers(**more: str | None) -> dict[str, str]:
    """Those of an order from this host; one that is None is left out."""
    headers: dict[str, str | None] = {
        "Host": "127.0.0.1:8000",
        "Content-Type": orders.MEDIA_TYPE,
        orders.PROTOCOL_HEADER: str(orders.PROTOCOL),
    }
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    return {name: value for name, value in headers.items() if value is not None}


@dataclass
class Response:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    num_parts_read: int = 0
    """How much of the request's body was taken, in parts."""

    @property
    def answer(self) -> Answer:
        return Answer.model_validate_json(self.body)

    @property
    def refusal(self) -> str:
        """What is said against the order; nothing if it was carried out."""
        error = self.answer.error
        return "" if error is None else error.message


def scope_of(
    route: str, headers: Mapping[str, str] | Iterable[tuple[str, str]], client: tuple[str, int] | None, **more: Any
) -> dict[str, Any]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    asked = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    asked |= {"path": route, "raw_path": route.encode(), "query_string": b"", "root_path": "", "headers": encoded}
    return asked | {"client": client, "server": ("127.0.0.1", 8000)} | more


async def post(
    app: Any,
    route: str,
    body: bytes | list[bytes],
    *,
    headers: Mapping[str, str] | Iterable[tuple[str, str]] | None = None,
    client: tuple[str, int] | None = LOCAL,
    hangs_up: bool = False,
    part_s: float = 0.0,
) -> Response:
    """Post a body, in parts that come `part_s` apart; after the last the caller hangs up, or waits for the response."""
    parts = body if isinstance(body, list) else [body]
    response = Response()

    async def receive() -> dict[str, Any]:
        place = response.num_parts_read
        response.num_parts_read += 1
        await asyncio.sleep(part_s)
        if place >= len(parts):
            return {"type": "http.disconnect"}
        is_last = place == len(parts) - 1 and not hangs_up
        return {"type": "http.request", "body": parts[place], "more_body": not is_last}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            response.body += message.get("body", b"")

    headers = order_headers() if headers is None else headers
    await app(scope_of(route, headers, client), receive, send)
    return response
