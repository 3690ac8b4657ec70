"""A `WeightSynchronizer` for NeMo RL that refits. Runs anywhere: python examples/nemo_rl_synchronizer.py

NeMo RL's training loop calls `sync_weights` before it generates and asks for nothing else. `RefitSynchronizer` takes any
engine that `Refitter` takes, such as the address of a vLLM or SGLang server, and a function that gives the policy's weights
under the names of its checkpoint. Pass it in place of what `create_weight_synchronizer` makes. With NeMo RL installed it is a
subclass of its interface, without it a class of the same form; `main` shows it on a small model.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from fp8refit_transformers import to_block_fp8
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from fp8refit import RefitError, Refitter

try:
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer  # type: ignore[import-not-found]
except ImportError:
    WeightSynchronizer = object


class RefitSynchronizer(WeightSynchronizer):  # type: ignore[misc]
    """Refits an engine with the policy's weights, all or nothing."""

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], engine: Any, **options: Any) -> None:
        self._weights, self._engine, self._options = weights, engine, options
        self._refitter: Refitter
        self._is_stale = True

    def init_communicator(self) -> None:
        """Attach to the engine."""
        self._refitter = Refitter(self._engine, **self._options)

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> dict[str, float]:
        """Write the policy into the engine. If it does not fit, the engine keeps the old one or refuses requests."""
        self._is_stale = True
        with timer.time("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
            try:
                report = self._refitter.refit(self._weights(), kv_scales=kv_scales)
            except RefitError as error:  # the kind that NeMo RL expects
                raise RuntimeError(f"weight sync failed: {error}") from error
        self._is_stale = False
        return {"refit_version": float(report.version), "refit_s": report.total_s}

    @property
    def is_stale(self) -> bool:
        """Whether the engine's weights are older than the policy's, as far as known here."""
        return self._is_stale

    def shutdown(self) -> None:
        """Let go of the engine."""
        self._refitter.close()


def main() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    policy = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    synchronizer = RefitSynchronizer(policy.state_dict, to_block_fp8(copy.deepcopy(policy)))
    synchronizer.init_communicator()
    for _ in range(3):
        for weight in policy.parameters():
            weight.data.add_(torch.randn_like(weight), alpha=1e-3)
        print(f"version {synchronizer.sync_weights()['refit_version']:.0f}, stale: {synchronizer.is_stale}")
    policy.lm_head.weight.data[0, 0] = torch.nan
    try:
        synchronizer.sync_weights()
    except RuntimeError as error:
        print(f"refused, stale: {synchronizer.is_stale}: {error}")
    synchronizer.shutdown()


if __name__ == "__main__":
    main()
