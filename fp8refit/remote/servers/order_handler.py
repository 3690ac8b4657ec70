"""Carries out drivers' orders on the engine of a server, one at a time.

A driver that pauses requests holds the server until it resumes or refuses them. If the driver dies or falls silent before
that, the handler ends the refit: requests resume if every rank holds a whole policy, and are refused otherwise.
"""

import asyncio
import logging
import os
import select
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from pydantic import ValidationError

from fp8refit.errors import EngineBusyError, RankFailedError, RefitError, TensorsForgottenError
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import Answers, Channel
from fp8refit.remote.protocol.messages import Place
from fp8refit.remote.servers import orders
from fp8refit.remote.servers.control import ControlPlane
from fp8refit.remote.servers.orders import Answer, AnyOrder, Caller, OrderRequest
from fp8refit.transport.vote import ErrorRecord

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""Seconds that a driver may be silent, on top of `RefitConfig.timeout_s`."""
_DIED = "the driver of a refit died"
_HEALED = "the next refit that succeeds heals it"


class Controls(ControlPlane, Channel, Protocol):
    """The engine, as an order handler uses it."""


class OrderHandler:
    """Carries out orders in the event loop that drives the engine. `http_endpoint` has already checked who may give them.

    Args:
        controls: The engine.
        note: Told what becomes of refits; see `metrics.exported`.
    """

    def __init__(self, controls: Controls, note: Callable[..., None] = lambda **_: None) -> None:
        self._controls, self._note, self._since_s = controls, note, 0.0
        self._id, self._place = uuid.uuid4().hex, Place.here()
        self._turn = asyncio.Lock()
        self._holder: Caller | None = None
        self._silence_s = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._process = -1
        self._version = self._least = 0
        self._last: tuple[Caller | None, int] = None, 0
        """Whose order began or ended a pause last, and which of its pauses that was."""
        self._ending: asyncio.Task[None] | None = None
        self._obeying: asyncio.Task[Answer | KeyboardInterrupt | SystemExit] | None = None

    async def answer(self, message: str) -> Answer:
        """Carry out an order once earlier ones are done, even if the caller leaves. Errors are returned, not raised.

        Args:
            message: The order, encoded by `OrderRequest.encode`.
        """
        self._obeying = asyncio.ensure_future(self._answer(message))
        found = await asyncio.shield(self._obeying)
        if not isinstance(found, Answer):
            raise found
        return found

    async def _answer(self, message: str) -> Answer | KeyboardInterrupt | SystemExit:
        """An interrupt is returned: raised in a task, it would stop the event loop, and come out of the next order too."""
        try:
            found = await self._carry_out(message)
            return found.model_copy(update={"server": self._id, "place": self._place})
        except (KeyboardInterrupt, SystemExit) as error:
            return error

    async def _carry_out(self, message: str) -> Answer:
        try:
            request = OrderRequest.decode(message)
            async with self._turn:
                await self._check_is_free_for(request.driver)
                return await self._obey_watched(request)
        except Exception as error:
            if not isinstance(error, RefitError):
                logger.exception("an order could not be carried out")
            record = ErrorRecord.of(error)
            self._note(failure=record.kind)
            return Answer(error=record)

    async def give_up(self, reason: str) -> None:
        """End the refit of the driver that holds the server, if one does. It may not know what became of its last order."""
        async with self._turn:
            if self._holder is not None:
                await self._end(reason)

    async def _check_is_free_for(self, driver: Caller) -> None:
        if self._holder in (None, driver):
            return
        if self._process < 0 or not _has_ended(self._process):
            raise EngineBusyError("another driver refits this server; wait for it")
        await self._end(_DIED)

    async def _obey_watched(self, request: OrderRequest) -> Answer:
        """Carry out an order. If its driver then holds the server, its silence is timed from here on."""
        if self._silence is not None:
            self._silence.cancel()
        try:
            return await self._obey(request.order, request.driver)
        finally:
            if self._holder is not None:
                reason = f"the driver of a refit fell silent {self._silence_s:g} s ago"
                self._silence = asyncio.get_running_loop().call_later(self._silence_s, self._end_soon, reason)

    async def _obey(self, order: AnyOrder, driver: Caller) -> Answer:
        controls, is_held = self._controls, self._holder is not None
        if isinstance(order, orders.OfPause):
            self._check_is_next(order, driver)
        if isinstance(order, orders.Pause):
            self._since_s = time.monotonic()
            self._hold_for(driver, order.config.timeout_s + SILENCE_S)  # before, so that what interrupts it is ended
            try:
                return Answer(value=await controls.pause(order.config))
            except Exception:
                if not is_held:  # else an earlier pause of this driver lasts, and somebody must end it
                    self._let_go()
                raise
        if isinstance(order, orders.Send):
            if len(order.messages) > 1 and self._holder is None:  # any other holder was refused before
                raise RankFailedError(
                    "the server gave this refit up or was restarted, and serves requests; refit again"
                )
            answers = await self._send(order.messages, order.timeouts_s)
            failure = next(filter(None, map(messages.failure_of, answers.said)), None)
            if failure not in (None, TensorsForgottenError.__name__):  # after which the driver sends them again
                self._note(failure=failure)
            is_resumed = is_held and await self._resume_if_committed(order.messages[-1], answers)
            return Answer(
                said=tuple(answers.said),
                is_refused=answers.is_refused,
                times_s=answers.times_s,
                is_resumed=is_resumed,
            )
        if isinstance(order, orders.Tokenize):
            return Answer(token_ids=await controls.tokenize(order.prompts))
        if isinstance(order, orders.Look):
            return Answer(value=int(can_read(order.path)))
        if isinstance(order, orders.Flush):
            await controls.flush_caches()
        elif isinstance(order, orders.Refuse) and not is_held:
            await self._settle(order.reason, "hello")  # its driver does not know whether the ranks are whole
        elif isinstance(order, orders.Refuse):
            await controls.refuse(order.reason)
            self._note(is_dirty=1)
            self._let_go()
        elif isinstance(order, orders.Resume):
            held = self._version if is_held else await self._whole_version("hello")
            is_late = order.version is not None and (order.version < self._least if is_held else order.version != held)
            if held is None or is_late:
                raise RankFailedError(
                    f"an order to serve version {order.version} came again or too late: the server is at version "
                    f"{self._version}, and its ranks {'are dirty' if held is None else f'hold version {held}'}; refit again"
                )
            await self._resume(order.version, is_held=is_held)
        return Answer()

    async def _resume_if_committed(self, message: str, answers: Answers) -> bool:
        """Resume requests if the ranks have committed a policy by this message. If that fails, the driver orders it, and hears
        why.
        """
        try:
            version = messages.common_version(answers.said, if_written_by=message)
        except ValidationError:  # the driver reads it, too, and says so
            return False
        if version is None or version < self._least:
            return False
        try:
            await self._resume(version, is_held=True)
        except Exception:
            logger.warning("the engine did not resume with the write", exc_info=True)
            return False
        return True

    async def _resume(self, version: int | None, *, is_held: bool) -> None:
        if version is not None:
            await self._publish(version)
        await self._controls.resume()
        self._note(is_dirty=0, **({"seconds": time.monotonic() - self._since_s} if is_held else {}))
        self._let_go()

    def _check_is_next(self, order: orders.OfPause, driver: Caller) -> None:
        """Refuse what begins or ends a pause after a later one of the same driver, and a pause that has begun or ended."""
        last = self._last[1] if driver == self._last[0] else 0
        if order.number < last or (isinstance(order, orders.Pause) and 0 < order.number == last):
            raise RankFailedError(
                f"an order to {order.step} came again or too late: this driver has begun another refit since; refit again"
            )
        self._last = driver, order.number

    def _hold_for(self, driver: Caller, silence_s: float) -> None:
        self._let_go()
        self._holder, self._silence_s, self._least = driver, silence_s, self._version + 1
        if driver.place == self._place:
            try:
                self._process = os.pidfd_open(driver.pid)
            except ProcessLookupError:  # it ended while the server waited for requests
                self._end_soon(_DIED)
                return
            except OSError:  # this kernel has no pidfds; the time limit remains
                return
            asyncio.get_running_loop().add_reader(self._process, self._end_soon, _DIED)

    def _let_go(self) -> None:
        self._holder, self._least = None, self._version
        if self._silence is not None:
            self._silence.cancel()
        if self._process >= 0:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._process)
            self._process = -1

    def _end_soon(self, reason: str) -> None:
        """Once the last order is done, end the refit of the driver that holds the server."""
        if self._process >= 0:
            asyncio.get_running_loop().remove_reader(self._process)
        holder = self._holder

        async def end() -> None:
            async with self._turn:
                if self._holder == holder:
                    await self._end(reason)

        self._ending = asyncio.ensure_future(end())

    async def _end(self, reason: str) -> None:
        self._let_go()
        self._note(failure="driver")
        await self._settle(reason, "close")

    async def _settle(self, reason: str, ask: Literal["hello", "close"]) -> None:
        """Serve if the ranks hold a whole policy; otherwise refuse requests. See `_whole_version`."""
        logger.warning("%s; its refit is given up", reason)
        self._note(is_dirty=1)
        try:
            version = await self._whole_version(ask)
            if version is None:
                await self._controls.refuse(f"{reason}, part way; {_HEALED}"[: orders.MAX_REASON])
                return
            if version != self._version:
                await self._publish(version, counts=ask == "close")
            await self._controls.resume()
            self._note(is_dirty=0)
        except Exception as error:
            if not isinstance(error, RefitError):
                logger.exception("the refit of a driver that left could not be ended")
            await self._controls.refuse(
                f"{reason}, and the engine did not go on ({error}); {_HEALED}"[: orders.MAX_REASON]
            )

    async def _send(self, texts: Sequence[str], timeouts_s: Sequence[float]) -> Answers:
        return await (await self._controls.send(texts, timeouts_s, begins=False))

    async def _publish(self, version: int, *, counts: bool = True) -> None:
        """Tell the engine its version. It counts as a refit, unless nobody refits the server: then a drop-in has."""
        await self._controls.publish_version(version)
        if counts and version != self._version:
            self._note(version=version)
        self._version = self._least = version

    async def _whole_version(self, ask: Literal["hello", "close"]) -> int | None:
        """The version that all ranks hold; None if they differ or are dirty. `close` makes them drop an unfinished refit."""
        request = messages.Request(id=uuid.uuid4().hex, order=messages.Do(step=ask))
        answers = await self._send((request.encode(),), (self._silence_s or SILENCE_S,))
        return messages.common_version(answers.said)


def _has_ended(process: int) -> bool:
    """Whether the process of a pidfd has ended. `select` cannot watch file descriptors above 1023; a busy server has those."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def can_read(path: str) -> bool:
    """Whether this process can read a path."""
    return "\0" not in path and os.access(path, os.R_OK)
