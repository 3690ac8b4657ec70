"""The ranks of one engine, as they take part in a broadcast."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from fp8refit.config import Job
from fp8refit.live.layout import EngineLayout
from fp8refit.remote.host.host_route import HostRoute
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.channel import NUM_VOTES, RankClient
from fp8refit.report import RankReport


class BroadcastPeer:
    """Makes the ranks of one engine check a broadcast, and take it.

    Args:
        client: Sends them orders.
        host_route: Knows what they have mapped of this process. A failed broadcast makes them unmap it.
        named: Notes on an error which engine it comes from.
    """

    def __init__(
        self,
        client: RankClient,
        host_route: HostRoute,
        *,
        named: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.client = client
        self.host_route = host_route
        self._named = named
        self._num_buckets = 0
        self._first: tuple[messages.Order, ...] = ()
        """What is sent together with the order to take a policy, so that the engine drops its caches in between: the order to
        check the offer, or one that changes nothing.
        """

    async def layouts(self) -> list[EngineLayout]:
        """Each rank's layout, in rank order."""
        replies = sorted(await self.client.ask(messages.Do(step="describe")), key=lambda reply: reply.rank)
        return [reply.layout for reply in replies if reply.layout is not None]

    async def prepare(self, offer: messages.Broadcast, *, refit: str, job: Job, may_wait: bool) -> bool:
        """Make them check an offer: now, or together with `take`.

        Args:
            offer: The offer. What is sent ahead is checked now.
            refit: Id of the refit.
            job: What is done with it.
            may_wait: Whether something may be sent together with `take`.

        Returns:
            Whether that is done, so that `take` makes the engine drop its caches.
        """
        client, client.refit = self.client, refit
        self._num_buckets = offer.num_buckets
        order = messages.Prepare(refit=refit, job=job, source=offer, keeps=self.host_route.keeps())
        waits = may_wait and client.takes_pairs()
        order = order.model_copy(update={"is_under_way": waits or offer.is_ahead})
        first = messages.Do(step="hello") if offer.is_ahead else order
        self._first = (first,) if waits else ()
        if not waits or offer.is_ahead:
            with self._named():
                await self.host_route.or_abandon(client.ask(order))
        return waits

    async def take(self, version: int) -> Sequence[RankReport]:
        """Make them receive, write and commit the policy, with this version or a later one."""
        client, client.is_dirty = self.client, True
        # One time limit for each bucket, for each vote of these ranks, and for each vote of the other engines.
        num_votes = self._num_buckets + 2 * NUM_VOTES
        order = messages.Take(refit=client.refit, version=version)
        replies = await self.host_route.or_abandon(client.ask(*self._first, order, num_votes=num_votes))
        client.check_is_one_policy(replies)
        client.refit = ""
        return client.reports(replies)
