"""A running SGLang server: orders are posted to the route by which SGLang takes weights, where our plugin answers them.

What comes is carried out in the server's process as `Refitter(engine)` would. The ranks are asked over a line within the
server's host, so the driver need not be on it: only tensors that are to be mapped have to be.
"""

import asyncio
import json
import os
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from fp8refit.errors import UnsupportedEngineError
from fp8refit.transport.clerk import Clerk
from fp8refit.transport.http import Server, is_local, read_object
from fp8refit.transport.orders import MAX_BYTES, TOKEN_VARIABLE, Answer
from fp8refit.vote import ErrorRecord
from fp8refit_sglang.compat import handles_for, has_api_key, http_refusal, order_in
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.driver import NOT_LOADED, Driver

_ROUTE = "/update_weights_from_ipc"
_INFO_ROUTES = ("/server_info", "/get_server_info")
_CLERK = "_fp8refit_server_clerk"


async def serve_order(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> tuple[bool, str]:
    """Around the method behind SGLang's route for weights: carry out an order, if it is one of ours."""
    order = order_in(obj)
    if order is None:
        success, message = await original(manager, obj, request)
        return success, message
    clerk: Clerk | None = getattr(manager, _CLERK, None)
    if clerk is None:
        controls = TokenizerControls(manager, asyncio.get_running_loop(), refuse_with=http_refusal)
        clerk = Clerk(Driver(controls), token=os.environ.get(TOKEN_VARIABLE))
        setattr(manager, _CLERK, clerk)
    if len(order) > MAX_BYTES:
        error = UnsupportedEngineError(f"an order of {len(order)} bytes is none of ours")
        return True, Answer(error=ErrorRecord.of(error)).model_dump_json()
    answer = await clerk.answer(order, is_trusted=has_api_key(manager) or is_local(request))
    return True, answer.model_dump_json()


class SglangServer(Server):
    """A running SGLang server, for `Refitter(SglangServer("http://127.0.0.1:30000"))`.

    Args:
        url: Where it listens.
        api_key: Its API key, or admin API key if it has one.
        token: What it was told in `FP8REFIT_TOKEN`, if it was.

    Raises:
        UnsupportedEngineError: It is no URL.
    """

    engine = "sglang"

    def recognise(self) -> bool:
        """See `Server`."""
        return self._arguments() is not None

    def arguments(self) -> SimpleNamespace:
        """What the server was started with.

        Raises:
            EngineLostError: It cannot be reached.
            UnsupportedEngineError: It is none of SGLang's.
        """
        found = self._arguments()
        if found is None:
            raise UnsupportedEngineError(
                f"{self.url} is no SGLang server: it answered otherwise than one to {_INFO_ROUTES[0]}"
            )
        return SimpleNamespace(**found)

    def _arguments(self) -> dict[str, Any] | None:
        for route in _INFO_ROUTES:
            status, text = self.send(route, None, timeout_s=self.asking_s)
            found = read_object(text) if status == HTTPStatus.OK else {}
            if "tp_size" in found:
                return found
        return None

    def deliver(self, message: str, *, timeout_s: float) -> str:
        """See `Server`."""
        body = json.dumps({"zmq_handles": handles_for(message), "flush_cache": False})
        status, text = self.send(_ROUTE, body, timeout_s=timeout_s)
        said = read_object(text).get("message")
        if status != HTTPStatus.OK or not isinstance(said, str) or not read_object(said):
            raise UnsupportedEngineError(f"{NOT_LOADED} ({self.url} answered {status}: {text[:200]})")
        return said
