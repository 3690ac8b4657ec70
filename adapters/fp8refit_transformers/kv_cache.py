"""An FP8 KV cache for Hugging Face decoders: keys and values are stored as E4M3 codes and dequantized for attention.

transformers still creates, grows, crops and reorders its `DynamicCache`, also in `generate`. A hook on each attention
module replaces the cache's layer with one of ours before the first token is stored. As in engines, attention also sees
the current tokens after quantization. A forward without a cache quantizes nothing, and queries are never quantized.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import FP8_DTYPE
from fp8refit_transformers.caches import cache_argument, find_cache

KINDS = ("k", "v")
DTYPE = "fp8_e4m3"
E4M3_MAX = 448.0
MODULE = "attn"
"""Name of the submodule with the scales, as in engines: `self_attn.attn.k_scale`."""


class Fp8Kv(nn.Module):
    """The FP8 cache scales of one attention layer, one for keys and one for values.

    They are non-persistent 0-d buffers that stay float32 when the model is converted to another dtype.

    Args:
        device: The model's device.
    """

    k_scale: Tensor
    v_scale: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        for kind in KINDS:
            scale = torch.ones((), dtype=torch.float32, device=device)
            self.register_buffer(f"{kind}_scale", scale, persistent=False)

    def extra_repr(self) -> str:
        """Scales, for `print(model)`."""
        return ", ".join(
            f"{name}={scale.item() if not scale.is_meta else scale}" for name, scale in self.named_buffers()
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to the model's device, but keep the dtype."""

        def keep_dtype(scale: Tensor) -> Tensor:
            moved = fn(scale)
            return moved if moved.dtype is scale.dtype else scale.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


class _Codes:
    """A cache layer that holds codes. It copies the scales when it is created, so that they always fit its codes."""

    def __init__(self, *args: Any, kv: Fp8Kv) -> None:
        super().__init__(*args)
        self.k_scale, self.v_scale = kv.k_scale.clone(), kv.v_scale.clone()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the codes of (B, H, L, D) tensors, and return all keys and values, dequantized to the given dtype."""
        grow: Callable[..., tuple[Tensor, Tensor]] = super().update  # type: ignore[misc]  # of the layer that this is mixed into
        keys, values = grow(quantize(key_states, self.k_scale), quantize(value_states, self.v_scale), *args, **kwargs)
        dtype = key_states.dtype
        return dequantize(keys, self.k_scale, dtype), dequantize(values, self.v_scale, dtype)


class Fp8Layer(_Codes, DynamicLayer):
    """`DynamicLayer` over E4M3 codes: `keys` and `values` are float8_e4m3fn (B, H, L, D)."""


class Fp8SlidingWindowLayer(_Codes, DynamicSlidingWindowLayer):
    """`DynamicSlidingWindowLayer` over E4M3 codes."""


class UnquantizedCache(DynamicCache):
    """A cache that stays unquantized on a model with FP8 caches."""


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of `x / scale`, clamped to the E4M3 range and rounded to nearest, ties to even. NaN stays NaN."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes, in `dtype`."""
    return (codes.float() * scale).to(dtype)


def use_fp8_cache(model: nn.Module) -> None:
    """Make every attention layer of `model` cache keys and values in FP8, with scales of 1. May be repeated.

    Raises:
        UnsupportedEngineError: A layer is not causal self-attention with a growing cache of keys and values.
    """
    for attention in find_attentions(model).values():
        if not isinstance(getattr(attention, MODULE, None), Fp8Kv):
            device = next(attention.parameters()).device
            attention.add_module(MODULE, Fp8Kv(device))
            attention.register_forward_pre_hook(_put_fp8_layer, with_kwargs=True)


def fp8_kvs(model: nn.Module) -> Iterator[tuple[str, Fp8Kv]]:
    """Module names and FP8 cache scales, in layer order."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Kv):
            yield name, module


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that runs the layers, without the LM head."""
    find: Callable[[], nn.Module] = getattr(model, "get_decoder", lambda: model)
    return find()


def find_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention module of every layer by name, in layer order.

    Raises:
        UnsupportedEngineError: A layer is not causal self-attention with a growing cache of keys and values.
    """
    decoder = find_decoder(model)
    config = getattr(decoder, "config", None)
    if config is None or getattr(model.config, "is_encoder_decoder", False):
        raise _unsupported(model, "it is not a decoder-only language model")
    layers = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if others:
        raise _unsupported(model, f"its cache has layers of another kind ({', '.join(sorted(others))})")
    inside = set(map(id, decoder.modules()))
    found = {
        name: module for name, module in model.named_modules() if id(module) in inside and _is_causal_attention(module)
    }
    if [module.layer_idx for module in found.values()] != [*range(config.num_hidden_layers)] or len(found) != len(
        layers
    ):
        raise _unsupported(
            model,
            f"{len(found)} of its {config.num_hidden_layers} layers have causal self-attention that caches keys and values",
        )
    return found


def _is_causal_attention(module: nn.Module) -> bool:
    """Whether `module` computes keys and values from its input, caches them and attends to them causally."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and getattr(module, "is_causal", False) is True
        and (hasattr(module, "qkv_proj") or (hasattr(module, "k_proj") and hasattr(module, "v_proj")))
        and cache_argument(module) is not None
    )


def _unsupported(model: nn.Module, reason: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f'{type(model).__name__} cannot have an FP8 KV cache: {reason}; convert it with kv_cache_dtype="auto"'
    )


def _put_fp8_layer(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: make sure that this attention's layer of the given cache is one of ours.

    Raises:
        TypeError: The cache is of a kind that cannot hold FP8.
        ValueError: It holds tokens of another dtype.
    """
    cache = find_cache(args, kwargs)
    if cache is None or isinstance(cache, UnquantizedCache):
        return
    if not isinstance(cache, DynamicCache):
        raise TypeError(
            f"this model stores its KV cache as FP8 in a DynamicCache but was given a {type(cache).__name__}; pass none"
        )
    kv, index = attention.get_submodule(MODULE), attention.layer_idx
    assert isinstance(kv, Fp8Kv) and isinstance(index, int), f"{kv=} {index=}"
    while len(cache.layers) <= index:
        cache.layers.append(DynamicLayer())
    layer = cache.layers[index]
    if layer.get_seq_length() == 0:
        cache.layers[index] = _begin_layer(layer, kv)
    elif not isinstance(layer, _Codes):
        raise ValueError(
            "this model stores its KV cache as FP8, but the given cache holds tokens of another dtype; start with an empty "
            "cache"
        )


def _begin_layer(layer: DynamicLayer, kv: Fp8Kv) -> DynamicLayer:
    """An empty FP8 layer to replace the empty `layer`."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return Fp8Layer(kv=kv)
    sliding = Fp8SlidingWindowLayer(layer.sliding_window, kv=kv)
    sliding.record_past = layer.record_past
    return sliding
