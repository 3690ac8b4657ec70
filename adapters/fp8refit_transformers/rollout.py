"""The embedded engine in the benchmark of rollouts: no engine that anybody would roll out with, but the whole path."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from fp8refit.bench.rollout import Precision
from fp8refit.errors import UnsupportedEngineError
from fp8refit_transformers.convert import to_block_fp8


class TransformersRollout:
    """See `fp8refit.bench.rollout.RolloutEngine`."""

    num_kv_tokens = None

    def __init__(self, model: nn.Module) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.candidate = model.to(self._device)
        self.settings: dict[str, object] = {"class": type(model).__name__, "device": self._device}

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """See `fp8refit.bench.rollout.RolloutEngine`."""
        ids = torch.tensor(prompts, device=self._device)
        network = self.candidate
        network.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=True,
        )

    def close(self) -> None:
        """See `fp8refit.bench.rollout.RolloutEngine`."""
        del self.candidate


def boot(
    model: Path, *, tp: int, precision: Precision, max_length: int, max_batch: int, arguments: Mapping[str, object]
) -> TransformersRollout:
    """A model of random weights. A model takes sequences of any length and number.

    Raises:
        UnsupportedEngineError: More than one rank was asked for, or something that only engines have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if tp != 1:
        raise UnsupportedEngineError(f"transformers runs on one rank, not on {tp}; leave out --tp")
    if arguments:
        raise UnsupportedEngineError(f"transformers has no engine that takes {', '.join(arguments)}; leave out --set")
    network: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(model), dtype=torch.bfloat16
    ).eval()
    if precision is not Precision.BF16:
        network = to_block_fp8(network, kv_cache_dtype="fp8" if precision is Precision.FP8_KV else "auto")
    return TransformersRollout(network)
