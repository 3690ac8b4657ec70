"""Measures the inputs of live attention layers during a pass that computes attention without the KV cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.live.slots import Observe, Refusal
from fp8refit.ranks.kv.attention import PackedSequences
from fp8refit.tracing.rules import Why

_GIVE_SCALES = "Give the scales instead (kv_scales=)"


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


@dataclass(kw_only=True, slots=True)
class LivePrefill:
    """Implements `fp8refit.live.slots.Prefill` on an engine's live model: eagerly, without requests or KV cache.

    With tensor parallelism, all ranks must run it together.
    """

    attentions: Sequence[nn.Module]
    """Every attention layer of the model."""
    heads_of: Callable[[Any], Heads]
    """Returns the heads of a layer."""
    forward: Callable[[Tensor, Tensor, list[int]], None]
    """Runs the model on token ids and their positions, both (N,) int64, given the length of each sequence."""
    vocab_size: int
    max_length: int
    max_tokens: int

    def __call__(self, sequences: Sequence[Tensor], observe: Observe) -> None:
        """Run one pass over `sequences`, each (L,) int64 on the engine's device, and remove all hooks."""
        token_ids, lengths = torch.cat(list(sequences)), [len(sequence) for sequence in sequences]
        packed = PackedSequences(lengths, token_ids.device)
        layers = [(module, self.heads_of(module)) for module in self.attentions]
        with measured(layers, packed, observe):
            self.forward(token_ids, packed.positions, lengths)


def refusals_to_measure(found: Iterable[tuple[str, str | None]]) -> tuple[Refusal, ...]:
    """Refuse what plain causal attention would not compute as the engine does.

    Args:
        found: Names of modules, each with a reason; None if there is none.
    """
    return one_for_each_reason((name, (reason, _GIVE_SCALES) if reason else None) for name, reason in found)


def one_for_each_reason(found: Iterable[tuple[str, Why]]) -> tuple[Refusal, ...]:
    """One refusal per reason, naming the first module it applies to."""
    firsts: dict[tuple[str, str], str] = {}
    for name, why in found:
        if why is not None:
            firsts.setdefault(why, name)
    return tuple(Refusal(module=name, reason=reason, remedy=remedy) for (reason, remedy), name in firsts.items())


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
