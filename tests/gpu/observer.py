"""Looks at one rank's live model inside its vLLM worker, without fp8refit: `worker_extension_cls="observer.Observer"`. It also
has the rank compile fp8refit's kernels, if asked.
"""

from collections.abc import Iterator
from pathlib import Path

import live_model
from safetensors import safe_open
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

    def observe_compile(self) -> float:
        import warm_kernels

        return warm_kernels.compile_kernels()

    def observe_reload(self, folder: str) -> None:
        """vLLM's own reload, from the files of a checkpoint: an engine of noise does not take their path."""
        self.reload_weights(weights_iterator=_read(Path(folder)))

    def _observed_state(self) -> dict[str, Tensor]:
        return self.model_runner.get_model().state_dict()


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a handle, not a mapping
                yield name, tensors.get_tensor(name)
