"""Replicas behind one client: their ranks vote together, as those of one engine, so that all commit a policy or none does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from pydantic import Field

from fp8refit.config import LONGEST_WAIT_S
from fp8refit.errors import EngineLostError, TransportError
from fp8refit.ranks.rank import Rank
from fp8refit.remote.rank_server import RankServer
from fp8refit.transport.collective.board import Address
from fp8refit.transport.collective.store import find_store, open_store
from fp8refit.transport.process_group import ProcessGroupExchange
from fp8refit.transport.vote import Group


class Gathering(Address, frozen=True):
    """Where the ranks of all replicas meet. The place is the same for all; each replica has ranks of its own."""

    size: int = Field(ge=2, le=1 << 16)
    """Number of ranks of all replicas."""
    first: int = Field(ge=0)
    """Number of the replica's first rank among them."""
    timeout_s: float
    """How long to wait for the others."""

    def join(self, rank: int) -> Group:
        """Meet the others, as one of a replica's ranks.

        Args:
            rank: Its number among the replica's ranks.

        Raises:
            EngineLostError: A rank did not come.
        """
        from torch.distributed import ProcessGroupGloo

        number = self.first + rank
        try:
            store = find_store(host=self.host, port=self.port, token=self.token, timeout_s=self.timeout_s)
            group = ProcessGroupGloo(store, number, self.size, timedelta(seconds=self.timeout_s))
        except (TransportError, RuntimeError) as error:
            raise EngineLostError(
                f"rank {number} of {self.size} did not reach the ranks of the other replicas within {self.timeout_s:g} s "
                f"({error}); they have to reach each other by TCP. If a replica is gone, restart the engine"
            ) from error
        if hasattr(group, "_set_default_timeout"):  # from now on, each vote has a limit of its own
            group._set_default_timeout(timedelta(seconds=LONGEST_WAIT_S))
        return ProcessGroupExchange(group)


def gathered(rank: Callable[[], Rank], place: str, number: int, *, before: RankServer | None) -> RankServer:
    """Answers requests to a rank of a replica as one of all replicas, which meet at the first. Its own updates go on alone.

    Args:
        rank: The rank among those of its replica.
        place: The `Gathering`.
        number: Of the rank, among those that got the same place.
        before: What an earlier driver has left.
    """

    def meet() -> Rank:
        if before is not None and before.orders is not None:
            before.orders.forget()
        return Rank(rank().target, Gathering.model_validate_json(place).join(number))

    return RankServer(meet)


@contextmanager
def gathering(num_replicas: int, num_ranks: int, *, host: str, timeout_s: float) -> Iterator[list[Gathering]]:
    """Open a place for the ranks of replicas to meet, until all have met.

    Args:
        num_replicas: How many replicas there are.
        num_ranks: How many ranks each has.
        host: An address of this host that all of them reach.
        timeout_s: How long they wait for each other.

    Yields:
        What to send to the ranks of each replica.

    Raises:
        TransportError: The address is not one of this host's.
    """
    size = num_replicas * num_ranks
    store, token, port = open_store(host=host, port=0, timeout_s=timeout_s)
    at = Gathering(host=host, port=port, token=token, size=size, first=0, timeout_s=timeout_s)
    yield [at.model_copy(update={"first": first}) for first in range(0, size, num_ranks)]
    del store  # which ends with the last of its users
