"""Refuses KV caches that hold tokens of an older policy than the served one.

Compiled code checks this too, by comparing two objects by identity, so it need not be recompiled when the policy
changes.
"""

import inspect
from typing import Any, Self

import torch
from torch import nn
from transformers.cache_utils import Cache

from fp8refit.errors import StaleCacheError

_SERVED = "_fp8refit_served"
_BEGUN_UNDER = "_fp8refit_policy"


class Policy:
    """Identifies one policy. Copies of a model or a cache share it; a refit creates a new one.

    Args:
        version: The policy version.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Served:
    """The policy that a model serves now. Shared by all its layers."""

    def __init__(self) -> None:
        self.policy = Policy(0)
        self.was_refitted = False
        """Whether cached tokens of unknown origin may belong to an older policy."""


def watch_caches(model: nn.Module) -> Served:
    """Make every layer of `model` refuse caches of another policy than the served one. May be repeated."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    known = (getattr(layer, _SERVED) for layer in layers if hasattr(layer, _SERVED))
    served: Served = next(known, None) or Served()
    for layer in layers:
        if not hasattr(layer, _SERVED):
            setattr(layer, _SERVED, served)
            layer.register_forward_pre_hook(_check_cache, with_kwargs=True)
    return served


def cache_argument(module: nn.Module) -> str | None:
    """The name of the cache argument of `module.forward`; None if it takes no cache.

    It is `cache` since transformers 5.24, and `past_key_values` before.
    """
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the arguments of a layer."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def _check_cache(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook.

    Raises:
        StaleCacheError: The cache holds tokens of another policy.
    """
    cache = find_cache(args, kwargs)
    if cache is None:
        return
    served: Served = getattr(layer, _SERVED)
    policy: Policy | None = getattr(cache, _BEGUN_UNDER, None)
    if policy is served.policy:
        return
    if policy is None and not (served.was_refitted and _is_begun(cache)):
        setattr(cache, _BEGUN_UNDER, served.policy)
    else:
        _judge(cache, served)


@torch.compiler.disable(reason="the cache was begun under another policy")
def _judge(cache: Any, served: Served) -> None:
    """Refuse a cache that holds tokens of another policy. Not compiled, because the result must not be baked in."""
    policy: Policy | None = getattr(cache, _BEGUN_UNDER, None)
    if policy is not served.policy and _holds_tokens(cache):
        whose = f"of policy version {policy.version}" if policy is not None else "of an unknown policy"
        raise StaleCacheError(
            f"the KV cache holds tokens {whose}, but the model serves version {served.policy.version}; start with an empty "
            "cache"
        )
    setattr(cache, _BEGUN_UNDER, served.policy)


def _is_begun(cache: Any) -> bool:
    """Whether a cache may hold tokens, judged without reading its tensors."""
    return not hasattr(cache, "layers") or any(
        getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values())
        for layer in cache.layers
    )


def _holds_tokens(cache: Any) -> bool:
    """Whether any layer holds keys, values or a recurrent state. May synchronize with the device."""
    return not hasattr(cache, "layers") or any(
        (getattr(layer, "is_initialized", False) and int(layer.get_seq_length()) > 0)
        or any(getattr(layer, "has_previous_state", {}).values())
        for layer in cache.layers
    )
