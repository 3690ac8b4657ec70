"""Converts a Hugging Face causal LM into a block-FP8 engine, in place."""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from torch import nn

from fp8refit.errors import UnsupportedEngineError
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit_transformers.caches import watch_caches
from fp8refit_transformers.kv_cache import find_attentions, use_fp8_cache
from fp8refit_transformers.linear import BlockFp8Linear

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of modules that choose experts. They are small and lose too much by quantization."""
IGNORE_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Keys of `quantization_config` under which checkpoints list modules that are not quantized."""

Model = TypeVar("Model", bound=nn.Module)


def to_block_fp8(
    model: Model,
    *,
    block_size: tuple[int, int] = (128, 128),
    scale_format: str = ScaleFormat.FP32,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
) -> Model:
    """Replace every `nn.Linear` of `model` with a `BlockFp8Linear` of the same weights, in place.

    The LM head, MoE routers, experts in one stacked parameter, and modules that `model.config`'s quantization config
    ignores keep their dtype. After a refit, KV caches from before it are refused. Peak extra memory: one layer.

    Args:
        model: A Hugging Face causal LM.
        block_size: Rows and columns of one block.
        scale_format: `"fp32"` or `"ue8m0"`.
        kv_cache_dtype: `"auto"` keeps caches in the model's dtype. With `"fp8"`, every `DynamicCache` of the model,
            including those of `generate`, holds float8_e4m3fn, with one scale per layer for keys and one for values.
            They are 1.0 until a `Refitter` writes them.

    Returns:
        `model`.

    Raises:
        UnsupportedEngineError: There is no `nn.Linear` to replace, or a layer cannot have an FP8 KV cache; nothing was
            replaced.
        NonFiniteError: A weight holds NaN or Inf; the layers before it have been replaced.

    Examples:
        >>> engine = to_block_fp8(AutoModelForCausalLM.from_pretrained(path))   # doctest: +SKIP
        >>> Refitter(engine).refit(policy.state_dict())                         # doctest: +SKIP
    """
    names = list(_quantizable(model))
    if not names and not any(isinstance(module, BlockFp8Linear) for module in model.modules()):
        raise UnsupportedEngineError(f"{type(model).__name__} has no nn.Linear to make block FP8 besides its LM head")
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ValueError(f'{kv_cache_dtype=}; give "auto" or "fp8"')
    if kv_cache_dtype == "fp8":
        find_attentions(model)
    block_format = BlockFormat(scale_format=ScaleFormat(scale_format), block_size=block_size)
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), f"{name=}"
        layer = BlockFp8Linear.from_linear(linear, block_format)
        model.set_submodule(name, layer)
    if kv_cache_dtype == "fp8":
        use_fp8_cache(model)
    watch_caches(model)
    return model


def _quantizable(model: nn.Module) -> Iterable[str]:
    """Names of the modules to replace."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ignored = _ignore_list(model)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module is head:
            continue
        if not ROUTERS & set(name.split(".")) and not any(_matches(name, entry) for entry in ignored):
            yield name


def _ignore_list(model: nn.Module) -> list[str]:
    quantization: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantization is None:
        return []
    settings = quantization if isinstance(quantization, Mapping) else vars(quantization)
    return [entry for key in IGNORE_LISTS for entry in settings.get(key) or ()]


def _matches(name: str, entry: str) -> bool:
    """Whether an ignore-list entry matches module `name`: its name or a parent's, a part of them, or a pattern."""
    return f".{entry}." in f".{name}." or fnmatch.fnmatchcase(name, entry)
