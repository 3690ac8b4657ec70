"""Refits a running SGLang server: our middleware answers orders that are posted to SGLang's weight-update route.

A header tells orders from SGLang's own requests. They never reach SGLang's handler, which would read the whole body of
an unchecked caller. The server's process carries them out as `Refitter(engine)` would. The driver may be on another
host, unless the ranks are to map its tensors.
"""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from fp8refit.errors import UnsupportedEngineError
from fp8refit.remote.servers.http_client import Server, read_object
from fp8refit.remote.servers.http_endpoint import Door, other_version
from fp8refit.remote.servers.metrics import exported
from fp8refit.remote.servers.order_handler import OrderHandler
from fp8refit.remote.servers.orders import PROTOCOL_HEADER, Answer, read_token
from fp8refit.transport.vote import ErrorRecord
from fp8refit_sglang.compat import api_keys, app_to_start, handles_for, has_order, http_refusal
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.driver import NOT_LOADED, Driver

_ROUTE = "/update_weights_from_ipc"
_ORDER_HEADER = PROTOCOL_HEADER.lower().encode()
_INFO_ROUTES = ("/server_info", "/get_server_info")


def open_door(original: Callable[..., Any], manager: Any, *arguments: Any) -> None:
    """Wraps a startup step of the process that takes requests: if it is a server, add the middleware.

    Raises:
        UnsupportedEngineError: `FP8REFIT_TOKEN` is too short. The server does not start.
    """
    original(manager, *arguments)
    app = app_to_start()
    if app is not None:  # middleware added later, such as SGLang's check of the API key, runs first
        app.add_middleware(OrderMiddleware, manager=manager, token=read_token())


async def refuse_older(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> tuple[bool, str]:
    """Wraps the method behind SGLang's route: tell drivers of an older version to upgrade."""
    if has_order(obj):
        return True, Answer(error=ErrorRecord.of(other_version(None))).model_dump_json()
    success, message = await original(manager, obj, request)
    return success, message


class OrderMiddleware:
    """Answers orders, and passes every other request on.

    Args:
        app: The next ASGI app.
        manager: SGLang's tokenizer manager.
        token: The token that drivers must present, if any.
    """

    def __init__(self, app: Callable[..., Any], *, manager: Any, token: str | None) -> None:
        self._app, self._manager = app, manager
        self._door = Door(token=token, api_keys=api_keys(manager))
        self._handler: OrderHandler | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Take an order, or pass the request on to SGLang."""
        if not _is_order(scope):
            await self._app(scope, receive, send)
            return
        from starlette.responses import Response

        status, said, headers = await self._door.take(scope, receive, self._answer)
        response = Response(said, status_code=status, headers=headers, media_type="application/json")
        await response(scope, receive, send)

    async def _answer(self, message: str) -> Answer:
        if self._handler is None:
            controls = TokenizerControls(self._manager, asyncio.get_running_loop(), refuse_with=http_refusal)
            self._handler = OrderHandler(Driver(controls), exported())
        return await self._handler.answer(message)


def _is_order(scope: dict[str, Any]) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == _ROUTE and any(name.lower() == _ORDER_HEADER for name, _ in scope["headers"])


class SglangServer(Server):
    """A running SGLang server, for `Refitter(SglangServer("http://127.0.0.1:30000"))`.

    Args:
        url: The server's base URL.
        api_key: The server's API key, or its admin API key if it has one.
        token: The value of `FP8REFIT_TOKEN` in the server's environment, if set.

    Raises:
        UnsupportedEngineError: `url` is not a URL, or the key or token is malformed.
    """

    engine = "sglang"

    @override
    def recognise(self) -> bool:
        return self._arguments() is not None

    def arguments(self) -> SimpleNamespace:
        """The arguments that the server was started with.

        Raises:
            EngineLostError: The server cannot be reached.
            UnsupportedEngineError: It is not an SGLang server.
        """
        found = self._arguments()
        if found is None:
            raise UnsupportedEngineError(
                f"{self.url} is not an SGLang server: it does not answer {_INFO_ROUTES[0]} like one"
            )
        return SimpleNamespace(**found)

    def _arguments(self) -> dict[str, Any] | None:
        for route in _INFO_ROUTES:
            status, text = self.send(route, None, timeout_s=self.asking_s)
            found = read_object(text) if status == HTTPStatus.OK else {}
            if "tp_size" in found:
                return found
        return None

    @override
    def deliver(self, message: str, *, timeout_s: float) -> str:
        answer, said = self.order(_ROUTE, message, timeout_s=timeout_s)
        if answer is None:
            answer = self._ask_older(timeout_s)
        if answer is None:
            raise UnsupportedEngineError(f"{NOT_LOADED} ({said})")
        return answer

    def _ask_older(self, timeout_s: float) -> str | None:
        """The answer of an older plugin, which takes orders in another form; None if there is none."""
        body = json.dumps({"zmq_handles": handles_for("an order of another version"), "flush_cache": False})
        status, text = self.send(_ROUTE, body, timeout_s=timeout_s)
        said = read_object(text).get("message")
        return said if status == HTTPStatus.OK and isinstance(said, str) and read_object(said) else None
