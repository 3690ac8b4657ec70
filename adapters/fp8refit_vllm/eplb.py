"""Experts that vLLM moves between ranks while it runs (EPLB): which are where, and whether any have moved.

It moves them in a step, on the thread that also refits. In the background it may copy some apart, between steps, for a later
step to take. After a refit, those would be an older policy's.
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from fp8refit.errors import EngineLostError
from fp8refit.live.slots import Refusal
from fp8refit.tracing.stored import is_experts
from fp8refit.transport.memory.cuda_driver import is_mapped

_ELASTIC = "moves experts to other numbers of ranks", "Boot without enable_elastic_ep"
_BACKGROUND = (
    "moves experts in the background",
    'Boot with eplb_config={"use_async": False}, or a vLLM that has `drain_async`',
)
_OF_DRAFT = "moves those of its draft too", "Boot without enable_eplb or speculative_config"
_LOST = "no longer knows where its experts are", "Sleep at level 1, or boot without enable_eplb"


class ExpertPlaces:
    """Where the experts of a rank were when this was made.

    Args:
        worker: A vLLM worker whose model is loaded.
    """

    def __init__(self, worker: Any) -> None:
        self._state = _state_of(worker)
        self._maps = self._read()
        layers = [
            (each.model, layer, experts)
            for each, places in zip(self._models, self._maps or (), strict=False)
            for layer, experts in zip(each.model.moe_layers, places, strict=True)
        ]
        self._are_lost = any(set(experts) != set(range(model.num_logical_experts)) for model, _, experts in layers)
        found = ((module, experts) for _, layer, experts in layers for module in layer.modules() if is_experts(module))
        self.held = {} if self._are_lost else {module: _own(module, experts) for module, experts in found}
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
        reasons = {
            _ELASTIC: self._state.parallel_config.enable_elastic_ep,
            _BACKGROUND: self._state.is_async and not hasattr(self._state, "drain_async"),
            _OF_DRAFT: not self.held.keys().isdisjoint(module for draft in drafts for module in draft.modules()),
            _LOST: self._are_lost,
        }
        return tuple(
            Refusal(module="experts", reason=why, remedy=remedy) for (why, remedy), is_so in reasons.items() if is_so
        )

    def have_moved(self) -> bool:
        """Whether any expert has moved since."""
        now = self._read()
        return now is not None and now != self._maps

    def _read(self) -> list[list[list[int]]] | None:
        """Return the expert at each place among all ranks, by model and layer; None while vLLM's maps are asleep."""
        maps = [each.physical_to_logical_map for each in self._models]
        is_asleep = any(each.is_cuda and not is_mapped(each.data_ptr()) for each in maps)
        return None if is_asleep else [each.tolist() for each in maps]

    @property
    def _models(self) -> list[Any]:
        return [] if self._state is None else list(self._state.model_states.values())


def check_mover(worker: Any) -> None:
    """Check that what was begun in the background will end.

    Raises:
        EngineLostError: Its thread has died.
    """
    state = _state_of(worker)
    thread = getattr(state, "async_worker", None)
    is_moving = any(getattr(each, "rebalanced", False) for each in getattr(state, "model_states", {}).values())
    if is_moving and thread is not None and not thread.is_alive():
        raise EngineLostError(
            "vLLM's thread that moves experts (EPLB) has died, in the middle of a move; restart the engine"
        )


def end_moves(worker: Any) -> None:
    """Discard what was copied apart in the background. Every rank calls this, between steps."""
    state = _state_of(worker)
    if state is not None and state.is_async:
        state.drain_async()


def _state_of(worker: Any) -> Any:
    """VLLM's `EplbState`; None if experts do not move."""
    return getattr(worker.model_runner, "eplb_state", None)


def _own(module: Any, experts: Sequence[int]) -> list[int]:
    """Those of a layer's experts that this rank holds."""
    return [expert for expert, row in zip(experts, module._expert_map.tolist(), strict=True) if row >= 0]
