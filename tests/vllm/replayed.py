"""What workers of trainers do that have no wheel, in our words: an extension of vLLM's workers."""

from pathlib import Path
from typing import Any

import torch


class Replayed:
    model_runner: Any

    def pause_and_begin(self) -> None:
        """prime-rl's first call."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.model)

    def load_file(self, path: str) -> None:
        """The buckets of a file. prime-rl's second call; all of NeMo RL's."""
        for bucket in torch.load(path):
            self.model_runner.model.load_weights(weights=bucket)

    def update_weights_from_ipc(self, path: str, answered: str) -> None:
        """As verl's: each bucket is answered once it is loaded, and the trainer waits for each answer."""
        for number, bucket in enumerate(torch.load(path), start=1):
            self.model_runner.model.load_weights(weights=bucket)
            Path(answered).write_text(str(number))

    def end_and_resume(self) -> None:
        """prime-rl's third call."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.model, self.model_runner.model_config)
