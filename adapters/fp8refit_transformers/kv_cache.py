"""An FP8 KV cache for Hugging Face decoders: keys and values are kept as E4M3 codes, and attention sees what the codes mean.

transformers creates, grows, crops and reorders its `DynamicCache` as ever, also for `generate`: a hook of each attention
module puts one of our layers into it before the first token is cached there. As in engines, the tokens of the current forward
are seen through their codes too; a forward without a cache quantizes nothing. Queries are never quantized.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.slots import FP8_DTYPE
from fp8refit_transformers.caches import find_cache

KINDS = ("k", "v")
DTYPE = "fp8_e4m3"
E4M3_MAX = 448.0
MODULE = "attn"
"""Where in an attention module the scales are: engines spell them `self_attn.attn.k_scale`."""


class Fp8Kv(nn.Module):
    """What one attention layer knows of its FP8 cache: a scale for its keys and one for its values.

    The scales are buffers that no state dict holds: 0-d, float32 even if the model is converted to another dtype.

    Args:
        device: Where the model is.
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
        """Follow the model to its device, but not to its dtype."""

        def keep_dtype(scale: Tensor) -> Tensor:
            moved = fn(scale)
            return moved if moved.dtype is scale.dtype else scale.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self


class _Codes:
    """A layer of a cache that holds codes, under the scales that it was begun with: they never change beneath its codes."""

    def __init__(self, *args: Any, kv: Fp8Kv) -> None:
        super().__init__(*args)
        self.k_scale, self.v_scale = kv.k_scale.clone(), kv.v_scale.clone()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append codes of (B, H, L, D), and give what all codes mean, in the dtype that came."""
        grow: Callable[..., tuple[Tensor, Tensor]] = super().update  # type: ignore[misc]  # of the layer that this is mixed into
        keys, values = grow(quantize(key_states, self.k_scale), quantize(value_states, self.v_scale), *args, **kwargs)
        dtype = key_states.dtype
        return dequantize(keys, self.k_scale, dtype), dequantize(values, self.v_scale, dtype)


class Fp8Layer(_Codes, DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """`DynamicLayer` over E4M3 codes: `keys` and `values` are float8_e4m3fn (B, H, L, D)."""


class Fp8SlidingWindowLayer(_Codes, DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is not typed
    """`DynamicSlidingWindowLayer` over E4M3 codes."""


class UnquantizedCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that is let be, on a model whose caches are FP8 otherwise."""


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of `x / scale`, clamped to what E4M3 holds and rounded to the nearest, ties to even. NaN stays NaN."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What the codes mean."""
    return (codes.float() * scale).to(dtype)


def use_fp8_cache(model: nn.Module) -> None:
    """Let every attention layer of `model` keep its keys and values as FP8, with scales of 1. May be repeated.

    Raises:
        UnsupportedEngineError: Some layer is no causal self-attention with a growing cache of keys and values.
    """
    for attention in find_attentions(model).values():
        if not isinstance(getattr(attention, MODULE, None), Fp8Kv):
            device = next(attention.parameters()).device
            attention.add_module(MODULE, Fp8Kv(device))
            attention.register_forward_pre_hook(_put_fp8_layer, with_kwargs=True)


def fp8_kvs(model: nn.Module) -> Iterator[tuple[str, Fp8Kv]]:
    """Every FP8 cache's scales by the name of their module, in the order of layers."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Kv):
            yield name, module


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that runs the layers, without the LM head."""
    find: Callable[[], nn.Module] = getattr(model, "get_decoder", lambda: model)
    return find()


def find_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention module of every layer by name, in the order of layers.

    Raises:
        UnsupportedEngineError: Not every layer is causal self-attention with a growing cache of keys and values.
    """
    decoder = find_decoder(model)
    config = getattr(decoder, "config", None)
    if config is None or getattr(model.config, "is_encoder_decoder", False):
        raise _unsupported(model, "it is no decoder-only language model")
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
        and "past_key_values" in inspect.signature(module.forward).parameters
    )


def _unsupported(model: nn.Module, reason: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f'{type(model).__name__} cannot have an FP8 KV cache: {reason}; convert it with kv_cache_dtype="auto"'
    )


def _put_fp8_layer(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: see that the attention's layer of the cache that it is given is one of ours.

    Raises:
        TypeError: It is a kind of cache that holds no FP8.
        ValueError: It holds tokens of another dtype.
    """
    cache = find_cache(args, kwargs)
    if cache is None or isinstance(cache, UnquantizedCache):
        return
    if not isinstance(cache, DynamicCache):
        raise TypeError(
            f"this model keeps its KV cache as FP8 in a DynamicCache, and was given a {type(cache).__name__}; pass none"
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
            "this model keeps its KV cache as FP8, and past_key_values holds tokens of another dtype; begin with an empty cache"
        )


def _begin_layer(layer: DynamicLayer, kv: Fp8Kv) -> DynamicLayer:
    """An empty layer of FP8 instead of an empty one."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return Fp8Layer(kv=kv)
    sliding = Fp8SlidingWindowLayer(layer.sliding_window, kv=kv)
    sliding.record_past = layer.record_past
    return sliding
