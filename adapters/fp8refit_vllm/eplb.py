"""Experts that vLLM moves between ranks while it runs (EPLB): which are where, and whether any have moved.

vLLM moves them in a step, on the thread that also refits. Only what moves them in the background begins between steps: it copies
experts apart, and a later step takes the copies. Those of an older policy must not be taken after a refit.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fp8refit.live.slots import Refusal
from fp8refit.tracing.stored import is_experts
from fp8refit.transport.memory.cuda_driver import is_mapped

_REMEDY = 'Boot with eplb_config={"use_async": False}, or without enable_eplb'


class ExpertPlaces:
    """Where the experts of a rank were when this was made.

    Args:
        worker: A vLLM worker whose model is loaded.
    """

    def __init__(self, worker: Any) -> None:
        self._state = getattr(worker.model_runner, "eplb_state", None)
        self._maps = self._read()
        self.held = dict(self._find())
        """Layers of experts that may move, and the number of the expert in each row of their stacks."""

    @property
    def moving(self) -> tuple[Tensor, ...]:
        """The tensors that hold them."""
        return tuple(parameter for module in self.held for parameter in module.parameters())

    def refusals(self, drafts: Collection[nn.Module]) -> tuple[Refusal, ...]:
        """Why they cannot be followed.

        Args:
            drafts: Models that draft tokens.
        """
        if self._state is None:
            return ()
        reasons = {"moves experts to other numbers of ranks": self._state.parallel_config.enable_elastic_ep}
        if not hasattr(self._state, "drain_async"):
            reasons["moves experts in the background, which this vLLM cannot end"] = self._state.is_async
        reasons["moves those of its draft too"] = any(not self.held.keys().isdisjoint(d.modules()) for d in drafts)
        return tuple(Refusal(module="experts", reason=why, remedy=_REMEDY) for why, is_so in reasons.items() if is_so)

    def have_moved(self) -> bool:
        """Whether any expert has moved since."""
        now = self._read()
        return now is not None and now != self._maps

    def _read(self) -> list[list[list[int]]] | None:
        """vLLM's maps: for each model, layer and place among all ranks, the expert. None if they sleep."""
        maps = [each.physical_to_logical_map for each in self._models]
        return None if any(each.is_cuda and not is_mapped(each.data_ptr()) for each in maps) else list(map(_listed, maps))

    @property
    def _models(self) -> list[Any]:
        return [] if self._state is None else list(self._state.model_states.values())

    def _find(self) -> Iterator[tuple[nn.Module, list[int]]]:
        for model, places in zip(self._models, self._maps or (), strict=False):
            for layer, experts in zip(model.model.moe_layers, places, strict=True):
                for module in filter(is_experts, layer.modules()):
                    yield module, _own(module, experts)


def end_moves(worker: Any) -> None:
    """Discard what is being moved in the background. Every rank calls this, between steps."""
    state = getattr(worker.model_runner, "eplb_state", None)
    if state is not None and state.is_async:
        state.drain_async()


def _own(module: Any, experts: Sequence[int]) -> list[int]:
    """Those of a layer's experts that this rank holds."""
    return [expert for expert, row in zip(experts, module._expert_map.tolist(), strict=True) if row >= 0]


def _listed(places: Tensor) -> list[list[int]]:
    found: list[list[int]] = places.tolist()
    return found
