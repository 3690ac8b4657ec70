"""The transformers engine in the rollout benchmark: too slow for real rollouts, but it exercises the whole path."""

from collections.abc import Sequence

import torch
from torch import nn

from fp8refit.bench import policies
from fp8refit.bench.rollout_engine import Precision, RolloutBoot
from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import TensorMeta
from fp8refit_transformers.convert import to_block_fp8


class TransformersRollout:
    """Implements `fp8refit.bench.rollout_engine.RolloutEngine`."""

    num_kv_tokens = None

    def __init__(self, model: nn.Module) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.candidate = model.to(self._device)
        self.settings: dict[str, object] = {"class": type(model).__name__, "device": self._device}

    def load_bf16(self, seed: int) -> None:
        """Load policy number `seed`."""
        parameters = self.candidate.named_parameters()  # tied ones once
        manifest = {name: TensorMeta.of(parameter) for name, parameter in parameters}
        self.candidate.load_state_dict(dict(policies.stream(manifest, seed, self._device)), strict=False)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue every prompt by `num_tokens` sampled tokens, ignoring end of text."""
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
        """Stop the engine and everything it started."""
        del self.candidate


def boot(wanted: RolloutBoot) -> TransformersRollout:
    """Make an engine with random weights.

    Raises:
        UnsupportedEngineError: `tp` is not 1, or engine arguments were given.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted.refuse_online("transformers")
    if wanted.tp != 1:
        raise UnsupportedEngineError(f"transformers runs on one rank, not on {wanted.tp}; leave out --tp")
    if wanted.arguments:
        raise UnsupportedEngineError(
            f"transformers has no engine that takes {', '.join(wanted.arguments)}; leave out --set"
        )
    network: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(wanted.model), dtype=torch.bfloat16
    ).eval()
    if wanted.is_fp8:
        network = to_block_fp8(network, kv_cache_dtype="fp8" if wanted.precision is Precision.FP8_KV else "auto")
    return TransformersRollout(network)
