"""Measures the inputs of live attention layers during a pass that computes attention without the KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8refit.live.slots import Observe
from fp8refit.ranks.kv.attention import PackedSequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The attention heads of one rank's part of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    """A token attends to itself and the `window - 1` tokens before it; None for all."""
    soft_cap: float | None = None


@contextmanager
def measured(layers: Sequence[tuple[nn.Module, Heads]], sequences: PackedSequences, observe: Observe) -> Iterator[None]:
    """Within this context, pass the queries, keys and values of every layer to `observe`, and attend without
    quantization.

    Layers are called as `layer(q, k, v, ...)` with (N, H * D) or (N, H, D), as vLLM and SGLang do. Their own code is
    restored when the context ends.

    Args:
        layers: Attention modules; their index in this list is passed to `observe`.
        sequences: The sequences of the pass.
        observe: Takes a layer's index and its q, k and v.
    """
    own = [module.__dict__.get("forward") for module, _ in layers]
    try:
        for index, (module, heads) in enumerate(layers):
            module.__dict__["forward"] = _StandIn(index, heads, sequences, observe)
        yield
    finally:
        for (module, _), forward in zip(layers, own, strict=True):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


class _StandIn:
    """Replaces one layer's `forward`."""

    def __init__(self, index: int, heads: Heads, sequences: PackedSequences, observe: Observe) -> None:
        self._index, self._heads, self._sequences, self._observe = index, heads, sequences, observe

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        heads, num_tokens = self._heads, q.shape[0]
        q = q.view(num_tokens, heads.num_heads, heads.head_dim)
        k = k.view(num_tokens, heads.num_kv_heads, heads.head_dim)
        v = v.view(num_tokens, heads.num_kv_heads, heads.v_head_dim)
        self._observe(self._index, q, k, v)
        attended = self._sequences.attend(q, k, v, scale=heads.scale, window=heads.window, soft_cap=heads.soft_cap)
        return attended.reshape(num_tokens, heads.num_heads * heads.v_head_dim)
