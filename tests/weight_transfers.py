"""What a trainer has by vLLM's weight-transfer API, whichever version of vLLM it runs beside."""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from fp8refit_vllm.trainer import RefitTrainer, RefitTrainerInitInfo
from torch import Tensor
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory


def open_trainer(init_info: RefitTrainerInitInfo, *, client: Any, source: WeightSource) -> RefitTrainer:
    """A trainer by vLLM's API, which until 0.26 asks for the backend twice more."""
    init, more = WeightTransferTrainerFactory.trainer_init, {}
    if "config" in signature(init).parameters:
        more = {"backend": init_info.backend, "config": WeightTransferConfig(backend=init_info.backend)}
    return init(init_info=init_info, client=client, source=source, **more)


class LlmClient:
    """vLLM's four methods, of an LLM in this process."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()


class PolicySource(WeightSource):
    """A trainer's own source, which gives one tensor after another."""

    def __init__(self, policy: dict[str, Tensor], half_way: Callable[[], object] = lambda: None) -> None:
        self._policy = policy
        self._half_way = half_way

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._policy.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for place, pair in enumerate(self._policy.items()):
            if place == len(self._policy) // 2:
                self._half_way()
            yield pair
