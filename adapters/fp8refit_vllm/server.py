"""A running vLLM server: a route of our own in the process that takes its requests, added by vLLM's endpoint plugins.

vLLM adds no route that is not asked for: start the server with `VLLM_PLUGINS=fp8refit`. The route lies where vLLM's own
middleware asks for the API key, if the server has one. What comes is carried out as `Refitter(AsyncLLM)` would.
"""

import os
from argparse import Namespace
from http import HTTPStatus
from typing import Any

from fp8refit.errors import RankFailedError, RefitError, UnsupportedEngineError
from fp8refit.transport.clerk import Clerk
from fp8refit.transport.http import Server, is_local, read_object
from fp8refit.transport.orders import MAX_BYTES, TOKEN_VARIABLE, Answer
from fp8refit.vote import ErrorRecord
from fp8refit_vllm.async_driver import AsyncDriver
from fp8refit_vllm.clients import PLUGIN, check_server, method_of
from fp8refit_vllm.compat import has_api_key, http_refusal

_ROUTE = "/v1/fp8refit"
_NOT_LOADED = (
    "vLLM does not load fp8refit's endpoint in this server: install fp8refit where it runs (a path alone has no entry points), "
    f"and start it with VLLM_PLUGINS={PLUGIN} (vLLM adds the routes of plugins that are named there; name your others too)"
)


class RefitEndpoint:
    """Implements vLLM's `EndpointPlugin`: `POST /v1/fp8refit`."""

    name = PLUGIN
    required_tasks = None

    def __init__(self) -> None:
        self._clerk: Clerk | None = None
        self._refused_because: RefitError | None = None
        self._has_api_key = False

    def attach_router(self, app: Any) -> None:
        """See vLLM's `EndpointPlugin`."""
        from fastapi import Request
        from fastapi.responses import Response

        async def take_order(request: Request) -> Response:
            message = await _read_body(request)
            if message is None:
                return Response(f"more than {MAX_BYTES} bytes", status_code=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            answer = await self._answer(message, is_trusted=self._has_api_key or is_local(request))
            return Response(answer.model_dump_json(), media_type="application/json")

        app.add_api_route(_ROUTE, take_order, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """See vLLM's `EndpointPlugin`."""
        self._has_api_key = has_api_key(args)
        try:
            check_server(engine_client)
        except UnsupportedEngineError as error:
            self._refused_because = error
            return
        controls = AsyncDriver(engine_client, method_of(engine_client.vllm_config), refuse_with=http_refusal)
        self._clerk = Clerk(controls, token=os.environ.get(TOKEN_VARIABLE))

    async def _answer(self, message: str, *, is_trusted: bool) -> Answer:
        if self._clerk is None:
            reason = self._refused_because or RankFailedError("the server is not ready yet; refit later")
            return Answer(error=ErrorRecord.of(reason))
        return await self._clerk.answer(message, is_trusted=is_trusted)


async def _read_body(request: Any) -> str | None:
    """What was posted; None if it is too long, which is known before it is taken in."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            return None
    return body.decode(errors="replace")


class VllmServer(Server):
    """A running vLLM server, for `Refitter(VllmServer("http://127.0.0.1:8000"))`.

    Args:
        url: Where it listens.
        api_key: Its API key.
        token: What it was told in `FP8REFIT_TOKEN`, if it was.

    Raises:
        UnsupportedEngineError: It is no URL.
    """

    engine = "vllm"

    def recognise(self) -> bool:
        """See `Server`."""
        status, text = self.send("/version", None, timeout_s=self.asking_s)
        return status == HTTPStatus.OK and isinstance(read_object(text).get("version"), str)

    def deliver(self, message: str, *, timeout_s: float) -> str:
        """See `Server`."""
        status, text = self.send(_ROUTE, message, timeout_s=timeout_s)
        if status != HTTPStatus.OK:
            raise UnsupportedEngineError(f"{_NOT_LOADED} ({self.url} answered {status}: {text[:200]})")
        return text
