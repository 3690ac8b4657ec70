"""A fake vLLM engine with several ranks and vLLM's four weight-transfer methods, of which our side is real.

What is vLLM's is as in 0.32: flags of a worker's update, and a channel to the workers that is out of step for good once a rank
raised that is not the last.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar
from unittest.mock import MagicMock, patch

import torch
from fp8refit_vllm import weight_source
from fp8refit_vllm.transfer_driver import TransferDriver
from torch import nn

from fp8refit import RefitConfig
from fp8refit.ranks.rank import Rank
from fp8refit.report import RefitReport
from tests.fake_ranks import Cluster, together

InitInfo, UpdateInfo = TypeVar("InitInfo"), TypeVar("UpdateInfo")


@dataclass
class TrainerInitInfo:
    """As vLLM's."""

    rank: int = 0

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(Generic[InitInfo, UpdateInfo]):
    """As vLLM's."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.vllm_config = vllm_config


def with_names(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module


BASE = "vllm.distributed.weight_transfer.base"
_modules = {
    BASE: with_names(
        BASE,
        TrainerInitInfo=TrainerInitInfo,
        TrainerWeightTransferEngine=object,
        ModuleSource=object,
        WeightTransferEngine=WeightTransferEngine,
    ),
    **{name: MagicMock() for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer")},
}
with patch.dict(sys.modules, _modules):
    from fp8refit_vllm import transfer
    from fp8refit_vllm.trainer import RefitTrainer, RefitTrainerInitInfo


class Trainer(RefitTrainer):
    """Ours, with a policy for each update: a dict is what a module has, and another source a `WeightSource`."""

    def __init__(self, engine: "Engine", config: RefitConfig, *, port: int = 0, rank: int = 0) -> None:
        super().__init__(RefitTrainerInitInfo(config=config, port=port, rank=rank), client=engine, source=None)

    @property
    def driver(self) -> TransferDriver:
        assert self._driver is not None, "it sends"
        return self._driver

    def send(self, source: Any, **options: Any) -> RefitReport | None:
        self.source = source
        with patch.object(weight_source, "module_of", module_of):
            return self.send_weights(**options)


def module_of(source: Any) -> Any:
    return SimpleNamespace(state_dict=lambda: source) if isinstance(source, Mapping) else None


class Worker:
    """One of vLLM's."""

    def __init__(self, rank: Rank, num_replicas: int) -> None:
        self.rank = rank.group.rank
        told = {"data_parallel_size": 1, "data_parallel_index": num_replicas - 1, "data_parallel_external_lb": False}
        sizes = SimpleNamespace(world_size=rank.group.size, **told)
        self.vllm_config = SimpleNamespace(parallel_config=sizes)
        self.model_runner = SimpleNamespace(_fp8refit_rank=rank)
        self._weight_update_active = False
        with patch.object(transfer, "booting_worker", lambda: self):
            self.transfer = transfer.RefitTransferEngine(None, self.vllm_config, torch.device("cpu"), nn.Module())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.transfer.init_transfer_engine(self.transfer.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.transfer.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.transfer.finish_weight_update()
        self._weight_update_active = False


class Engine:
    """Implements `Client`, for a trainer in this process.

    Args:
        cluster: The ranks.
        num_replicas: How many there are of it behind its client.
    """

    def __init__(self, cluster: Cluster, num_replicas: int = 1) -> None:
        self.cluster = cluster
        self.events: list[str] = []
        self.weight_version: str | None = None
        self.before: Callable[[str, Any], object] = lambda method, argument: None
        self.reached = list(range(len(cluster.ranks)))
        self._replies: list[deque[tuple[int, Any]]] = [deque() for _ in cluster.ranks]
        self.workers = [Worker(rank, num_replicas) for rank in cluster.ranks]
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
