"""Sends orders to every rank of an engine in other processes, and tracks what their replies say about them."""

import uuid
from collections.abc import Awaitable, Sequence
from textwrap import shorten
from typing import Protocol, TypeVar

from pydantic import ValidationError

from fp8refit import __version__
from fp8refit.config import LONGEST_WAIT_S, RefitConfig
from fp8refit.errors import EngineLostError, RankFailedError
from fp8refit.remote import messages
from fp8refit.remote.message_pairs import PairAnswers, Pairs
from fp8refit.remote.messages import PROTOCOL, Reply, Request
from fp8refit.report import RankReport
from fp8refit.transport.vote import merge_errors

T = TypeVar("T")

NUM_VOTES = 3
"""Largest number of votes in one order: prepare, calibration, and a write that sets KV scales."""
GRACE_S = 30.0
"""How much longer a driver waits than the ranks wait for each other, so that their error is the one raised."""

_LOST_STEP = (
    "the engine's channel to its ranks is out of step and cannot recover, which happens when a worker raises an error. "
    "Restart the engine"
)


class Channel(Protocol):
    """How a driver reaches every rank of one engine."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether its methods may suspend, so that they need an event loop."""
        ...

    async def call(self, message: str, *, timeout_s: float) -> Sequence[str]:
        """Send `message` to the `RankServer` of every rank, and return their answers.

        Raises:
            EngineLostError: The engine, or a rank, died or does not answer.
        """
        ...

    async def begin(self, message: str, *, timeout_s: float) -> Awaitable[Sequence[str]] | None:
        """Send `message` to every rank without waiting for answers.

        Returns:
            An awaitable for the answers. Await it once, before sending anything else; the engine can be used in the
            meantime. None if the engine only supports `call`; then nothing was sent.
        """
        ...


class AskedRanks:
    """Sends orders to every rank of one engine, one at a time.

    Args:
        channel: Reaches every rank.
        pairs: Sends two messages in one exchange, if the engine can.
    """

    def __init__(self, channel: Channel, pairs: Pairs | None) -> None:
        self.channel, self.pairs = channel, pairs
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
        self._held: Request | None = None
        self._flush_s = 0.0

    @property
    def is_asynchronous(self) -> bool:
        """Whether sending an order needs an event loop."""
        return self.channel.is_asynchronous

    @property
    def holds(self) -> bool:
        """Whether an order is held back to be sent with the next one."""
        return self._held is not None

    async def meet(self) -> None:
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

    async def ask(self, order: messages.Order, *, num_votes: int | None = None) -> list[Reply]:
        """Send an order to every rank, and return their replies.

        Args:
            order: The order.
            num_votes: How many votes the ranks may hold before they answer, if that differs from the order's default.

        Raises:
            RefitError: The ranks' common error, or the combined errors of those that failed.
            EngineLostError: They can no longer be reached.
        """
        self._check_is_there()
        held, self._held = self._held, None  # any other order drops it
        if isinstance(order, messages.Prepare):
            self._flush_s, self.has_refused = 0.0, False
        request, timeout_s = Request(id=uuid.uuid4().hex, order=order), self._timeout_s(order, num_votes)
        if held is not None and isinstance(order, messages.Write | messages.Take):
            assert self.pairs is not None, "something was held"
            timeouts_s = self._timeout_s(held.order), timeout_s
            answers = self.pairs.call_pair(held.encode(), request.encode(), timeouts_s=timeouts_s)
            return await self._hear_pair(answers, held, request)
        return await self._hear(self.channel.call(request.encode(), timeout_s=timeout_s), request)

    async def begin(self, order: messages.Order, *, num_votes: int = 1) -> Awaitable[Sequence[Reply]] | None:
        """Send an order, and return an awaitable for the replies; None, with nothing sent, if the engine only supports `call`.

        An order to write is sent with the one that is held back; any other order drops it.
        """
        self._check_is_there()
        held, self._held = self._held, None
        request, timeout_s = Request(id=uuid.uuid4().hex, order=order), self._timeout_s(order, num_votes)
        if held is not None and isinstance(order, messages.Stream | messages.Write | messages.Take):
            assert self.pairs is not None, "something was held"
            timeouts_s = self._timeout_s(held.order), timeout_s
            pair = await self._reach(self.pairs.begin_pair(held.encode(), request.encode(), timeouts_s=timeouts_s))
            return self._hear_pair(pair, held, request)
        answers = await self._reach(self.channel.begin(request.encode(), timeout_s=timeout_s))
        return self._hear(answers, request) if answers is not None else None

    def hold(self, order: messages.Prepare, *, begins: bool = False) -> bool:
        """Hold an order back to send it with the next one; False if the engine does not take both at once.

        Args:
            order: The order.
            begins: Whether the next one is sent by `begin`.
        """
        if self.pairs is None or self.config.in_flight == "abort" or (begins and not self.pairs.can_begin):
            return False
        self._check_is_there()
        self._held = Request(id=uuid.uuid4().hex, order=order)
        self._flush_s, self.has_refused = 0.0, False
        return True

    def start_over(self) -> None:
        """Forget ranks that are gone: others answer in their place."""
        self.refit, self.version, self.is_dirty, self.num_ranks, self.lost_because = "", 0, False, 0, None

    def reports(self, replies: Sequence[Reply]) -> Sequence[RankReport]:
        """The ranks' reports, with the time the engine spent dropping caches."""
        if not self._flush_s:
            return replies[0].reports
        return [report.model_copy(update={"flush_s": self._flush_s}) for report in replies[0].reports]

    def check_is_one_policy(self, replies: Sequence[Reply]) -> None:
        """Check that every rank committed the same version.

        Raises:
            RankFailedError: They did not.
        """
        if self.is_dirty:
            held = ", ".join(f"rank {reply.rank} holds {reply.version}" for reply in replies)
            raise RankFailedError(f"the ranks serve different versions ({held}); refit again")

    async def _hear(self, answers: Awaitable[Sequence[str]], request: Request) -> list[Reply]:
        """Wait for every rank's reply to a request; see `ask`."""

        async def replies() -> list[Reply]:
            return _replies(await answers, request)

        return self._judge(await self._reach(replies()))

    async def _hear_pair(self, pair: Awaitable[PairAnswers], held: Request, request: Request) -> list[Reply]:
        """Wait for every rank's reply to the last of two requests that was sent; see `ask`."""

        async def replies() -> list[Reply]:
            told = await pair
            self._flush_s, self.has_refused = told.flush_s, told.is_refused
            return _replies(told.answers, held if told.is_refused else request)

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
