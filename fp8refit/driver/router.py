"""Routers: vLLM's and SGLang's own, which pass requests on to the servers behind them."""

import re
from http import HTTPStatus

from pydantic import BaseModel, ValidationError

from fp8refit.errors import UnsupportedEngineError
from fp8refit.remote.servers.http_client import Server, read_object

_ROUTE = "/workers"
_REPLICA = re.compile(r"@\d+$")
"""Ends the URL of a server's replica, if the router knows about replicas."""


class _Worker(BaseModel):
    """A server behind a router, or one of its replicas."""

    url: str


class _Workers(BaseModel):
    """What a router says of them."""

    workers: list[_Worker]
    total: int


def behind(server: Server) -> list[str] | None:
    """URLs of the servers behind a router, sorted; None if no router answers. Also those that the router sends no requests to
    now: it may again, without a word.

    Args:
        server: Sends requests to its URL.

    Raises:
        EngineLostError: Nobody answers.
        UnsupportedEngineError: It requires an API key.
    """
    status, text = server.send(_ROUTE, None, timeout_s=server.asking_s)
    try:
        said = _Workers.model_validate(read_object(text))
    except ValidationError:
        return None
    if status != HTTPStatus.OK:
        return None
    return sorted({_REPLICA.sub("", worker.url).rstrip("/") for worker in said.workers})


def behind_router(url: str) -> list[str]:
    """URLs of the servers behind a router, sorted.

    Args:
        url: The router's.

    Raises:
        EngineLostError: Nobody answers.
        UnsupportedEngineError: It is no router.
    """
    urls = behind(Server(url))
    if urls is None:
        raise UnsupportedEngineError(f"{url} is no router: it does not answer {_ROUTE} as vLLM's and SGLang's do")
    return urls
