"""The rank's side of an engine in other processes: answers requests one by one, errors as values."""

import logging
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from fp8refit import __version__
from fp8refit.errors import RankFailedError, RefitError
from fp8refit.live.collector import collector_paused
from fp8refit.ranks.rank import Rank
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Reply, Request
from fp8refit.remote.rank_orders import RankOrders
from fp8refit.transport.vote import ErrorRecord

logger = logging.getLogger(__name__)


class RankServer:
    """Answers a driver's requests to one rank.

    Args:
        make_rank: Creates the rank; called at the first request.
    """

    def __init__(self, make_rank: Callable[[], Rank]) -> None:
        self._make_rank = make_rank
        self.orders: RankOrders | None = None
        """Carries out the orders; None before the first request."""

    def handle(self, message: str) -> str:
        """Answer one request. Errors are returned as values: an exception that crosses an engine's RPC may end the
        engine.
        """
        request_id = ""
        try:
            request = _read(message)
            request_id = request.id
            if self.orders is None:
                self.orders = RankOrders(self._make_rank())
            answer = self.orders.execute(request.order)
        except Exception as error:
            if not isinstance(error, RefitError):
                logger.exception("a refit failed on this rank")
            return self._reply(request_id, error=ErrorRecord.of(error)).encode()
        return self._reply(request_id, **answer).encode()

    def _reply(self, request_id: str, **fields: Any) -> Reply:
        if self.orders is None:
            return Reply(id=request_id, package_version=__version__, **fields)
        rank = self.orders.rank
        return Reply(
            id=request_id,
            rank=rank.group.rank,
            num_ranks=rank.group.size,
            version=rank.target.version,
            is_dirty=rank.target.is_dirty,
            package_version=__version__,
            **fields,
        )


@collector_paused()
def _read(message: str) -> Request:
    """Parse a request.

    Raises:
        RankFailedError: This version cannot read it.
    """
    try:
        request = Request.model_validate_json(message)
    except ValidationError as error:
        raise RankFailedError(
            f"this rank (fp8refit {__version__}) cannot read the driver's message; install the same version on both sides "
            f"({messages.first_problem(error)})"
        ) from error
    if request.protocol != messages.PROTOCOL:
        raise RankFailedError(
            f"the driver speaks protocol {request.protocol} and this rank, fp8refit {__version__}, speaks "
            f"{messages.PROTOCOL}; install the same version on both sides"
        )
    return request
