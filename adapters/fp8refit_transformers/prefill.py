"""The calibration pass: runs the live decoder on token ids, and observes keys and values on their way into
attention.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.live.slots import Observe
from fp8refit_transformers.admission import exempt
from fp8refit_transformers.caches import cache_argument
from fp8refit_transformers.kv_cache import UnquantizedCache, find_decoder

MAX_TOKENS = 8192
_lock = Lock()
_eager: list[Any] = []
"""What ends the stance, once for each pass that runs."""


class DecoderPrefill:
    """Implements `fp8refit.live.slots.Prefill`: runs the decoder without LM head or KV quantization, even while the
    model refuses calls.

    It needs no hook: attention passes its keys and values to the cache that it is given, which only observes them.

    Args:
        model: A model with an FP8 KV cache.
    """

    max_tokens = MAX_TOKENS

    def __init__(self, model: nn.Module) -> None:
        self._decoder = find_decoder(model)
        self._cache_argument = cache_argument(self._decoder) or "past_key_values"
        embeddings: nn.Embedding = self._decoder.get_input_embeddings()  # type: ignore[operator]
        self.vocab_size = embeddings.num_embeddings
        self.max_length: int = self._decoder.config.max_position_embeddings  # type: ignore[union-attr, assignment]

    def __call__(self, sequences: Sequence[Tensor], observe: Observe) -> None:
        """Run all sequences. Those of equal length form one batch, so there is no padding."""
        # Not compiled: compiled code is specialized for a model that serves.
        with _evaluating(self._decoder), exempt(self._decoder), _eagerly():
            for _, batch in groupby(sorted(sequences, key=len), key=len):
                cache = {self._cache_argument: _Observed(observe)}
                self._decoder(input_ids=torch.stack(list(batch)), use_cache=True, **cache)


class _Observed(UnquantizedCache):
    """A cache that stores nothing: it passes keys and values to the observer and returns them."""

    def __init__(self, observe: Observe) -> None:
        super().__init__()
        self._observe = observe

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Observe (B, H, L, D) as (B * L, H, D)."""
        k, v = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        self._observe(layer_idx, None, k, v)
        return key_states, value_states


@contextmanager
def _eagerly() -> Iterator[None]:
    """Run nothing compiled. The stance is the whole process's, so passes of several threads share it until the last ends."""
    with _lock:
        _eager.append(_eager[0] if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            ends = _eager.pop()
            if not _eager:
                ends.__exit__(None, None, None)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: no dropout, and no gradient checkpointing, which would disable the cache."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
