"""Sends orders to every rank of an engine in other processes, and tracks what their replies say about them."""

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal, Protocol, TypeAlias, TypeVar

from pydantic import ValidationError

from fp8refit import __version__
from fp8refit.config import LONGEST_WAIT_S, RefitConfig
from fp8refit.errors import EngineLostError, RankFailedError
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import PROTOCOL, Reply, Request, have_done
from fp8refit.report import RankReport
from fp8refit.transport.vote import merge_errors

T = TypeVar("T")
EngineTime: TypeAlias = Literal["pause_s", "flush_s", "still_s"]

NUM_VOTES = 3
"""Largest number of votes in one order: prepare, calibration, and a write that sets KV scales."""
GRACE_S = 30.0
"""How much longer a driver waits than the ranks wait for each other, so that their error is the one raised."""

_LOST_STEP = (
    "the engine's channel to its ranks is out of step and cannot recover, which happens when a worker raises an error. "
    "Restart the engine"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The ranks' answers to one message, or to two that were sent together."""

    said: Sequence[str]
    """Answers to the last message; or to the first of two, if a rank failed it and the second was not sent."""
    is_refused: bool = False
    """Whether a rank failed the first of two messages."""
    pause_s: float = 0.0
    """Seconds until requests had stopped, if the engine stopped them by itself between two messages."""
    flush_s: float = 0.0
    """Seconds that the ranks waited while the engine dropped its caches."""
    still_s: float = 0.0
    """Seconds from when it had stopped them until it let them run again, if it did both."""

    @property
    def times_s(self) -> dict[EngineTime, float]:
        """What is known of the above, as `RankReport` has it."""
        times_s: dict[EngineTime, float] = {"pause_s": self.pause_s, "flush_s": self.flush_s, "still_s": self.still_s}
        return {name: seconds for name, seconds in times_s.items() if seconds}


class Channel(Protocol):
    """How a driver reaches every rank of one engine."""

    num_at_once: int = 2
    """How many messages `send` takes: two if it can drop the engine's caches in between."""

    @property
    def serves_meanwhile(self) -> bool:
        """Whether the engine may compute requests between two messages."""
        return self.is_asynchronous

    @property
    def num_ahead(self) -> int:
        """How many messages `send` can send without waiting for answers."""
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether its methods may suspend, so that they need an event loop."""
        ...

    async def send(self, messages: Sequence[str], timeouts_s: Sequence[float], *, begins: bool) -> Awaitable[Answers]:
        """Send one message, or two in one exchange, to the `RankServer` of every rank.

        Of two, the second is sent once all ranks have succeeded with the first, and the engine has dropped its caches.

        Args:
            messages: The messages.
            timeouts_s: Seconds to wait for the answers to each.
            begins: Whether they must be on their way when this returns. Otherwise they may be sent when the answers are
                awaited.

        Returns:
            An awaitable for the answers. Await it once, before sending anything else; the engine can be used in the
            meantime.

        Raises:
            CacheFlushError: The engine kept its caches; the second message was not sent.
            RankFailedError: Dropping the caches failed; the second message was not sent.
            EngineLostError: The engine, or a rank, died or does not answer; or unused caches could not be dropped after the
                second message was sent.
        """
        ...


async def send_in_turn(
    call: Callable[[str, float], Awaitable[Sequence[str]]],
    flush_caches: Callable[[], Awaitable[None]],
    messages: Sequence[str],
    timeouts_s: Sequence[float],
) -> Answers:
    """Implement `Channel.send` by separate calls, for callers near the engine, where an exchange is cheap.

    Args:
        call: Sends a message to every rank, with a time limit.
        flush_caches: Drops the caches; see `fp8refit.remote.servers.control.ControlPlane`.
        messages: The messages.
        timeouts_s: Time limit of each.
    """
    said = await call(messages[0], timeouts_s[0])
    if len(messages) == 1:
        return Answers(said=said)
    if not have_done(said, messages[0]):
        return Answers(said=said, is_refused=True)
    start_s = time.perf_counter()
    await flush_caches()
    flush_s = time.perf_counter() - start_s
    return Answers(said=await call(messages[1], timeouts_s[1]), flush_s=flush_s)


class RankClient:
    """Sends orders to every rank of one engine, one at a time.

    Args:
        channel: Reaches every rank.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.config = RefitConfig()
        """Options of the current refit."""
        self.refit = ""
        """Id of the prepared refit; empty if there is none."""
        self.version = 0
        self.is_dirty = False
        self.num_ranks = 0
        """Number of ranks that answer; 0 before the first refit."""
        self.has_refused = False
        """Whether the last exchange of two orders ended after the first."""
        self.lost_because: str | None = None
        self._times_s: dict[EngineTime, float] = {}

    async def handshake(self) -> None:
        """Identify the ranks, once.

        Raises:
            EngineLostError: They no longer answer.
            RankFailedError: They have another version of fp8refit.
        """
        self._check_is_there()
        if self.num_ranks:
            return
        replies = await self.ask(messages.Do(step="hello"))
        for reply in replies:
            if reply.package_version != __version__:
                raise RankFailedError(
                    f"rank {reply.rank} has fp8refit {reply.package_version}, this process has {__version__}; install the "
                    "same version for both"
                )
        self.num_ranks = len(replies)

    def takes_pairs(self, *, begins: bool = False) -> bool:
        """Whether `ask` takes two orders; or `begin`. No pair goes to an engine whose requests it might abort for nothing."""
        num_messages = self.channel.num_ahead if begins else self.channel.num_at_once
        return num_messages > 1 and self.config.in_flight != "abort"

    async def ask(self, *orders: messages.Order, num_votes: int | None = None) -> list[Reply]:
        """Send an order to every rank, or two in one exchange, and return their replies to the last that was sent.

        Args:
            *orders: The orders: one, or a `Prepare` and what writes it; see `takes_pairs`.
            num_votes: How many votes the ranks may hold before they answer the last one, if that differs from its default.

        Raises:
            RefitError: The ranks' common error, or the combined errors of those that failed.
            EngineLostError: They can no longer be reached.
        """
        return await (await self._send(orders, num_votes))

    async def begin(self, *orders: messages.Order, num_votes: int = 1) -> Awaitable[list[Reply]] | None:
        """Send orders, and return an awaitable for the replies; None, with nothing sent, if only `ask` is possible."""
        return await self._send(orders, num_votes, begins=True) if self.channel.num_ahead else None

    async def _send(
        self, orders: Sequence[messages.Order], num_votes: int | None, *, begins: bool = False
    ) -> Awaitable[list[Reply]]:
        self._check_is_there()
        if isinstance(orders[0], messages.Prepare):
            self._times_s, self.has_refused = {}, False
        requests = [Request(id=uuid.uuid4().hex, order=order) for order in orders]
        timeouts_s = [*map(self._timeout_s, orders[:-1]), self._timeout_s(orders[-1], num_votes)]
        texts = [request.encode() for request in requests]
        return self._hear(await self._reach(self.channel.send(texts, timeouts_s, begins=begins)), requests)

    def start_over(self) -> None:
        """Forget ranks that are gone: others answer in their place."""
        self.refit, self.version, self.is_dirty, self.num_ranks, self.lost_because = "", 0, False, 0, None

    def reports(self, replies: Sequence[Reply]) -> Sequence[RankReport]:
        """The ranks' reports, with the times that their engine took for the rest."""
        if not self._times_s:
            return replies[0].reports
        times_s: dict[str, float] = dict(self._times_s.items())
        return [report.model_copy(update=times_s) for report in replies[0].reports]

    def check_is_one_policy(self, replies: Sequence[Reply]) -> None:
        """Check that every rank committed the same version.

        Raises:
            RankFailedError: They did not.
        """
        if self.is_dirty:
            held = ", ".join(f"rank {reply.rank} holds {reply.version}" for reply in replies)
            raise RankFailedError(f"the ranks serve different versions ({held}); refit again")

    async def _hear(self, sent: Awaitable[Answers], requests: Sequence[Request]) -> list[Reply]:
        """Wait for every rank's reply to the last request that was sent; see `ask`."""

        async def replies() -> list[Reply]:
            answers = await sent
            if len(requests) > 1:
                self._times_s, self.has_refused = answers.times_s, answers.is_refused
            return _replies(answers.said, requests[0 if answers.is_refused else -1])

        return self._judge(await self._reach(replies()))

    async def _reach(self, step: Awaitable[T]) -> T:
        """Await a step, and remember if it shows that the engine is lost."""
        try:
            return await step
        except EngineLostError as lost:
            self.lost_because, self.is_dirty = str(lost), True
            raise

    def _judge(self, replies: list[Reply]) -> list[Reply]:
        """Record the state that the ranks report, and check that all of them succeeded."""
        versions = {reply.version for reply in replies}
        self.is_dirty = len(versions) > 1 or any(reply.is_dirty for reply in replies)
        self.version = min(versions)
        failed = {rank: reply.error for rank, reply in enumerate(replies) if reply.error is not None}
        if failed:
            error = merge_errors(failed, num_ranks=len(replies), is_agreed=len(failed) == len(replies))
            if isinstance(error, EngineLostError):
                self.lost_because = str(error)
            raise error
        return replies

    def _timeout_s(self, order: messages.Order, num_votes: int | None = None) -> float:
        """Seconds to wait for the ranks."""
        if num_votes is None:
            num_votes = NUM_VOTES if order.step in ("prepare", "calibrate") else 1
        return min(num_votes * self.config.timeout_s + GRACE_S, LONGEST_WAIT_S)

    def _check_is_there(self) -> None:
        if self.lost_because is not None:
            raise EngineLostError(self.lost_because)


def _read(answer: str) -> Reply:
    """Parse a rank's reply.

    Raises:
        EngineLostError: It is not a reply to one of our requests.
        RankFailedError: This version cannot read it.
    """
    try:
        reply = Reply.model_validate_json(answer)
    except ValidationError as error:
        if not (isinstance(answer, str) and answer.startswith('{"id":')):
            raise EngineLostError(f"a rank answered {shorten(repr(answer), 80)}: {_LOST_STEP}") from error
        raise RankFailedError(
            f"fp8refit {__version__} cannot read a rank's answer; install the same version for every process "
            f"({messages.first_problem(error)})"
        ) from error
    if reply.protocol != PROTOCOL:
        raise RankFailedError(
            f"a rank, fp8refit {reply.package_version}, speaks protocol {reply.protocol} and this process, fp8refit "
            f"{__version__}, speaks {PROTOCOL}; install the same version for every process"
        )
    return reply


def _replies(answers: Sequence[str], request: Request) -> list[Reply]:
    """Parse the ranks' replies to a request.

    Raises:
        EngineLostError: A reply belongs to another request.
        RankFailedError: This version cannot read a reply.
    """
    replies = [_read(answer) for answer in answers]
    if not replies:
        raise EngineLostError("no rank of the engine answered; restart the engine")
    stale = [rank for rank, reply in enumerate(replies) if not reply.is_to(request)]
    if stale:
        raise EngineLostError(f"rank(s) {', '.join(map(str, stale))} answered an earlier request: {_LOST_STEP}")
    return replies
