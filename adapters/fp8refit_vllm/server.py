"""Refits a running vLLM server: adds the route `POST /v1/fp8refit` to it, as a vLLM endpoint plugin.

vLLM adds only routes of plugins that are named: start the server with `VLLM_PLUGINS=fp8refit`. vLLM's own middleware
checks the API key of this route too, if the server has one. Orders are carried out as by `Refitter(AsyncLLM)`.
"""

from argparse import Namespace
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from typing_extensions import override

from fp8refit.driver.passage import Passage
from fp8refit.errors import RankFailedError, RefitError, UnsupportedEngineError
from fp8refit.remote.servers.http_client import Server, read_object
from fp8refit.remote.servers.http_endpoint import CLOSED, Door
from fp8refit.remote.servers.metrics import exported
from fp8refit.remote.servers.order_handler import OrderHandler
from fp8refit.remote.servers.orders import Answer, read_token
from fp8refit.transport.vote import ErrorRecord
from fp8refit_vllm.async_driver import AsyncDriver
from fp8refit_vllm.clients import PLUGIN, check_server, method_of
from fp8refit_vllm.compat import ENDPOINT, VERSIONS, api_keys, is_first_api_server, num_api_servers

_ROUTE = "/v1/fp8refit"
_NOT_LOADED = (
    "vLLM does not load fp8refit's endpoint in this server: install fp8refit where it runs (a path alone has no entry points), "
    f"and start it with VLLM_PLUGINS={PLUGIN} (vLLM adds only the routes of plugins named there; name your other plugins too). "
    f"If it has no endpoint plugins, {ENDPOINT.without}"
)


class RefitEndpoint:
    """Implements vLLM's `EndpointPlugin`: `POST /v1/fp8refit`."""

    name = PLUGIN
    required_tasks = None

    def __init__(self) -> None:
        self._token: str | None = None
        self._door: Door | None = None
        self._carry_out: Callable[[str], Awaitable[Answer]] | None = None
        self._passage: Passage | None = None  # kept: its socket closes with it
        self._refused_because: RefitError = RankFailedError("the server is not ready yet; refit later")

    def attach_router(self, app: Any) -> None:
        """Add the route for orders to vLLM's server.

        Raises:
            UnsupportedEngineError: `FP8REFIT_TOKEN` is too short. The server does not start.
        """
        from fastapi import Request
        from fastapi.responses import Response

        self._token = read_token()  # not in __init__: if that raised, vLLM would start without the plugin

        async def take_order(request: Request) -> Response:
            if self._door is None:
                answer = (await self._answer("")).model_dump_json()
                status, said, headers = int(HTTPStatus.SERVICE_UNAVAILABLE), answer, CLOSED
            else:
                status, said, headers = await self._door.take(request.scope, request.receive, self._answer)
            return Response(said, status_code=status, headers=headers, media_type="application/json")

        app.add_api_route(_ROUTE, take_order, methods=["POST"], include_in_schema=False)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the route once the engine is there."""
        self._door = Door(token=self._token, api_keys=api_keys(args))
        try:
            check_server(engine_client)
        except UnsupportedEngineError as error:
            self._refused_because = error
            return
        config = engine_client.vllm_config
        self._passage = passage = Passage(str(getattr(args, "uds", None) or args.port))
        if not is_first_api_server(config):
            self._carry_out = passage.pass_on
            return
        self._carry_out = OrderHandler(AsyncDriver(engine_client, method_of(config)), exported()).answer
        if num_api_servers(config) > 1:
            await passage.open(self._carry_out)

    async def _answer(self, message: str) -> Answer:
        if self._carry_out is None:
            return Answer(error=ErrorRecord.of(self._refused_because))
        try:
            return await self._carry_out(message)
        except RefitError as error:
            return Answer(error=ErrorRecord.of(error))


class VllmServer(Server):
    """A running vLLM server, for `Refitter(VllmServer("http://127.0.0.1:8000"))`.

    Args:
        url: The server's base URL.
        api_key: The server's API key, if it has one.
        token: The value of `FP8REFIT_TOKEN` in the server's environment, if set.

    Raises:
        UnsupportedEngineError: `url` is not a URL, or the key or token is malformed.
    """

    engine = "vllm"

    @override
    def recognise(self) -> bool:
        status, text = self.send("/version", None, timeout_s=self.asking_s)
        version = read_object(text).get("version")
        if status != HTTPStatus.OK or not isinstance(version, str):
            return False
        VERSIONS.check(version)
        return True

    @override
    def deliver(self, message: str, *, timeout_s: float) -> str:
        answer, said = self.order(_ROUTE, message, timeout_s=timeout_s)
        if answer is None:
            raise UnsupportedEngineError(f"{_NOT_LOADED} ({said})")
        return answer
