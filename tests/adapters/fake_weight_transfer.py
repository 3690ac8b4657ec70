"""A fake vLLM engine with several ranks and vLLM's four weight-transfer methods, of which our side is real.

What is vLLM's is as in 0.32: flags of a worker's update, and a channel to the workers that is out of step for good once a rank
raised that is not the last.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from fp8refit_vllm.transfer_rank import TransferRank

from fp8refit.remote.rank_server import RankServer
from tests.fake_ranks import Cluster, together


class Worker:
    """One of vLLM's."""

    def __init__(self, rank: int, num_ranks: int, server: RankServer, check: Callable[[], None]) -> None:
        self.rank = rank
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=num_ranks))
        self._weight_update_active = False
        self.transfer = TransferRank(self, server.handle, check)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.transfer.invite(init_info)

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.transfer.receive(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.transfer.finish()
        self._weight_update_active = False


class Engine:
    """Implements `Client`, for a trainer in this process.

    Args:
        cluster: The ranks.
        check: See `TransferRank`.
    """

    def __init__(self, cluster: Cluster, check: Callable[[], None] = lambda: None) -> None:
        self.cluster = cluster
        self.events: list[str] = []
        self.weight_version: str | None = None
        self.before: Callable[[str, Any], object] = lambda method, argument: None
        self.reached = list(range(len(cluster.ranks)))
        self._replies: list[deque[tuple[int, Any]]] = [deque() for _ in cluster.ranks]
        servers = [RankServer(lambda rank=rank: rank) for rank in cluster.ranks]
        self.workers = [Worker(rank, len(servers), server, check) for rank, server in enumerate(servers)]
        self._line = threading.Lock()

    @property
    def is_in_step(self) -> bool:
        """Whether every rank's answers are read."""
        return not any(self._replies)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")
        self.weight_version = weight_version if weight_version is not None else self.weight_version

    def _call(self, method: str, *arguments: Any) -> None:
        with self._line:
            self.events.append(method)
            self.before(method, *(arguments or (None,)))
            calls = [partial(getattr(self.workers[rank], method), *arguments) for rank in self.reached]
            for rank, outcome in zip(self.reached, together(calls), strict=True):
                self._replies[rank].append((len(self.events), outcome))
            for rank in self.reached:
                number, outcome = self._replies[rank].popleft()
                assert number == len(self.events), "the channel lost step"
                if isinstance(outcome, BaseException):
                    raise RuntimeError(f"Worker failed with error {outcome!r}")  # noqa: TRY004 - as vLLM does
