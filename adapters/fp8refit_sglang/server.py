"""A running SGLang server: the same control plane over HTTP, through the route by which SGLang takes weights.

The plugin in the server's own process carries out what is posted; weights and reports travel over the loopback line between
driver and ranks, so the driver runs on the server's host, as the same user.
"""

import asyncio
import http.client
import json
import logging
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from fp8refit.config import RefitConfig
from fp8refit.errors import EngineBusyError, EngineLostError, RefitError, UnsupportedEngineError
from fp8refit.vote import ErrorRecord
from fp8refit_sglang.compat import handles_for, http_refusal, order_in
from fp8refit_sglang.controls import TokenizerControls
from fp8refit_sglang.driver import NOT_LOADED

logger = logging.getLogger(__name__)

_ROUTE = "/update_weights_from_ipc"
_INFO_ROUTES = ("/server_info", "/get_server_info")
_GRACE_S = 30.0
_CLERK = "_fp8refit_server_clerk"


class _Order(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hello(_Order):
    """Is the plugin there?"""

    step: Literal["hello"] = "hello"


class Pause(_Order):
    """See `fp8refit.engine.Engine.pause`."""

    step: Literal["pause"] = "pause"
    config: RefitConfig


class Resume(_Order):
    """See `fp8refit.engine.Engine.resume`."""

    step: Literal["resume"] = "resume"


class Refuse(_Order):
    """See `fp8refit.engine.Engine.refuse`."""

    step: Literal["refuse"] = "refuse"
    reason: str


class Tokenize(_Order):
    """See `fp8refit.engine.Engine.tokenize`."""

    step: Literal["tokenize"] = "tokenize"
    prompts: tuple[str, ...]


class Publish(_Order):
    """See `fp8refit.engine.Engine.publish_version`."""

    step: Literal["publish"] = "publish"
    version: int


class Ring(_Order):
    """Have every rank answer at an address."""

    step: Literal["ring"] = "ring"
    address: str


AnyOrder: TypeAlias = Annotated[
    Hello | Pause | Resume | Refuse | Tokenize | Publish | Ring, Field(discriminator="step")
]


class _Request(_Order):
    driver: str
    """Process id and name of who asks."""
    order: AnyOrder


class Answer(BaseModel):
    """What the server's process says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    speaker: Literal["fp8refit"] = "fp8refit"
    value: int = 0
    said: str = ""
    token_ids: list[list[int]] = []
    error: ErrorRecord | None = None


async def serve_order(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> tuple[bool, str]:
    """Around the method behind SGLang's route for weights: carry out an order, if it is one of ours."""
    order = order_in(obj)
    if order is None:
        success, message = await original(manager, obj, request)
        return success, message
    clerk: ServerClerk | None = getattr(manager, _CLERK, None)
    if clerk is None:
        clerk = ServerClerk(TokenizerControls(manager, refuse_with=http_refusal))
        setattr(manager, _CLERK, clerk)
    return True, (await clerk.answer(order)).model_dump_json()


class ServerClerk:
    """Carries out a driver's orders in the server's process. Requests do not wait for a driver that falls silent.

    Args:
        controls: The engine's.
    """

    def __init__(self, controls: TokenizerControls) -> None:
        self._controls = controls
        self._turn = asyncio.Lock()
        self._holder = ""
        self._silence_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._refusing: asyncio.Task[None] | None = None

    async def answer(self, message: str) -> Answer:
        """Carry out one order, after those before it, which a driver that was interrupted left. Errors are values."""
        async with self._turn:
            try:
                request = _Request.model_validate_json(message)
                if self._holder not in ("", request.driver) and _is_alive(self._holder):
                    raise EngineBusyError("another driver refits this server; wait for it")
                return await self._obey_watched(request)
            except Exception as error:
                if not isinstance(error, RefitError):
                    logger.exception("an order could not be carried out")
                return Answer(error=ErrorRecord.of(error))

    async def _obey_watched(self, request: _Request) -> Answer:
        """Carry out an order. From a pause on the driver that asked for it holds the server, unless it falls silent."""
        self._stop_watching()
        try:
            return await self._obey(request.order, request.driver)
        finally:
            if self._silence_s:
                self._watch = asyncio.get_running_loop().call_later(self._silence_s, self._give_up)

    async def _obey(self, order: AnyOrder, driver: str) -> Answer:
        if isinstance(order, Pause):
            num_requests = await self._controls.pause(order.config, may_wait=True)
            self._holder, self._silence_s = driver, order.config.timeout_s + 2 * _GRACE_S
            return Answer(value=num_requests)
        if isinstance(order, Ring):
            success, said = await self._controls.ring(order.address, timeout_s=self._silence_s)
            return Answer(value=int(success), said=said)
        if isinstance(order, Tokenize):
            return Answer(token_ids=await self._controls.tokenize(order.prompts))
        if isinstance(order, Publish):
            await self._controls.publish_version(order.version)
        elif isinstance(order, Refuse):
            await self._controls.refuse(order.reason)
            self._let_go()
        elif isinstance(order, Resume):
            await self._controls.resume()
            self._let_go()
        return Answer()

    def _let_go(self) -> None:
        self._holder, self._silence_s = "", 0.0

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _give_up(self) -> None:
        reason = f"the driver of a refit fell silent {self._silence_s:g} s ago; the next refit that succeeds heals it"
        self._let_go()
        self._refusing = asyncio.ensure_future(self._controls.refuse(reason))


def _is_alive(driver: str) -> bool:
    try:
        os.kill(int(driver.partition(":")[0]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class SglangServer:
    """A running SGLang server on this host, for `Refitter(SglangServer("http://127.0.0.1:30000"))`.

    Args:
        url: Where it listens.
        api_key: Its API key, or admin API key if it has one.

    Raises:
        UnsupportedEngineError: It is no URL.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UnsupportedEngineError(f'{url!r} is no URL of a server; pass one like "http://127.0.0.1:30000"')
        self.url = url.rstrip("/")
        self._driver = f"{os.getpid()}:{uuid.uuid4().hex}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this host
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def arguments(self) -> SimpleNamespace:
        """What the server was started with.

        Raises:
            EngineLostError: It cannot be reached.
            UnsupportedEngineError: It is none of SGLang's.
        """
        for route in _INFO_ROUTES:
            status, text = self._send(route, None, timeout_s=_GRACE_S)
            found = _read_object(text) if status == http.HTTPStatus.OK else {}
            if "tp_size" in found:
                return SimpleNamespace(**found)
        raise UnsupportedEngineError(f"{self.url} is no SGLang server: it answered {status} to {route}: {text[:200]}")

    def post(self, order: AnyOrder, *, timeout_s: float) -> Answer:
        """Have an order carried out.

        Raises:
            EngineLostError: The server cannot be reached, or does not answer in time.
            UnsupportedEngineError: It does not have our plugin.
            RefitError: What came of it.
        """
        body = json.dumps(
            {
                "zmq_handles": handles_for(_Request(driver=self._driver, order=order).model_dump_json(by_alias=True)),
                "flush_cache": False,
            }
        )
        status, text = self._send(_ROUTE, body.encode(), timeout_s=timeout_s)
        try:
            answer = Answer.model_validate_json(json.loads(text)["message"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedEngineError(f"{NOT_LOADED} ({self.url} answered {status}: {text[:200]})") from error
        if answer.error is not None:
            raise answer.error.error()
        return answer

    def _send(self, route: str, body: bytes | None, *, timeout_s: float) -> tuple[int, str]:
        request = urllib.request.Request(self.url + route, data=body, headers=self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EngineLostError(f"the server at {self.url} cannot be reached ({error}); start it again") from error


def _read_object(text: str) -> dict[str, Any]:
    """The JSON object that `text` is, or an empty one if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class ServerControls:
    """Implements `fp8refit_sglang.driver.Controls` by posting to a server.

    Args:
        server: The server.
        num_ranks: How many ranks it has.
    """

    num_unfinished = 0  # the server drives its requests itself
    bound_loop = None

    def __init__(self, server: SglangServer, num_ranks: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.num_ranks = num_ranks
        self._server = server
        self._timeout_s = RefitConfig().timeout_s

    async def pause(self, config: RefitConfig, *, may_wait: bool) -> int:
        """See `fp8refit_sglang.driver.Controls`. In the server's loop requests can always wait."""
        self._timeout_s = config.timeout_s
        return (await self._post(Pause(config=config))).value

    async def resume(self) -> None:
        """See `fp8refit_sglang.driver.Controls`."""
        await self._post(Resume())

    async def refuse(self, reason: str) -> None:
        """See `fp8refit_sglang.driver.Controls`."""
        await self._post(Refuse(reason=reason))

    async def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """See `fp8refit_sglang.driver.Controls`."""
        return (await self._post(Tokenize(prompts=tuple(prompts)))).token_ids

    async def publish_version(self, version: int) -> None:
        """See `fp8refit_sglang.driver.Controls`."""
        await self._post(Publish(version=version))

    async def ring(self, address: str, *, timeout_s: float) -> tuple[bool, str]:
        """See `fp8refit_sglang.driver.Controls`."""
        answer = await self._post(Ring(address=address), timeout_s)
        return bool(answer.value), answer.said

    async def _post(self, order: AnyOrder, timeout_s: float | None = None) -> Answer:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return await asyncio.to_thread(self._server.post, order, timeout_s=timeout_s + _GRACE_S)
