"""What a trainer has by vLLM's weight-transfer API, whichever version of vLLM it runs beside."""

from collections.abc import Callable, Iterator

from torch import Tensor
from vllm import LLM
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource


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
