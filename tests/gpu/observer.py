"""Looks at one rank's live model inside its vLLM worker, without fp8refit: `worker_extension_cls="observer.Observer"`."""

import live_model
from torch import Tensor


class Observer:
    """Methods that `collective_rpc` reaches on every rank. What they tell is said in `live_model`."""

    def observe_live_bytes(self) -> dict[str, str]:
        return live_model.hash_bytes(self._observed_state())

    def observe_checksum(self) -> int:
        return live_model.checksum(self._observed_state())

    def observe_places(self) -> dict[str, int]:
        return live_model.places(self._observed_state())

    def observe_replays(self) -> int:
        return live_model.num_replays()

    def observe_memory(self) -> dict[str, int]:
        return live_model.memory()

    def _observed_state(self) -> dict[str, Tensor]:
        return self.model_runner.get_model().state_dict()
