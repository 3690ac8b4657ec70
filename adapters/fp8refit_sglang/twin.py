"""Builds this rank's SGLang model again on the meta device, to trace its loader. Leaves SGLang's own state unchanged."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from fp8refit_transformers.naming import namings_of, plain_config, twin_or_refusal
from torch import nn

from fp8refit.live.slots import Refusal
from fp8refit.tracing.twin import EmptyOnMeta, Twin, format_stored, trace_as_named
from fp8refit_sglang.compat import draft_scope
from fp8refit_sglang.drafts import Draft

_MAY_DOWNCAST = "SGLANG_QUANT_ALLOW_DOWNCASTING"
"""Without it, some loaders reject BF16 tensors for FP8 weights."""


def twin_of(
    config: Any,
    load_config: Any,
    *,
    num_ranks: int,
    draft: Draft | None = None,
    is_beside: Callable[[str], bool] = lambda _: False,
) -> Twin | Refusal:
    """Trace the loader of this rank's model, or of its draft; a refusal if that is impossible.

    Args:
        config: SGLang's `ModelConfig`.
        load_config: Its `LoadConfig`.
        num_ranks: Number of ranks that share a checkpoint.
        draft: The draft, if the others are its.
        is_beside: Whether the target's checkpoints hold a name beside the target.
    """
    naming = None if draft is None or draft.is_plain else draft.naming(is_beside)
    if isinstance(naming, Refusal):
        return naming

    @contextmanager
    def built(mode: EmptyOnMeta) -> Iterator[tuple[nn.Module, Any]]:
        scope = nullcontext() if draft is None else draft_scope(is_plain=draft.is_plain)
        with scope, _built(config, load_config, mode) as found:
            yield found

    @contextmanager
    def build(mode: EmptyOnMeta) -> Iterator[nn.Module]:
        with built(mode) as (model, _):
            yield model

    def trace() -> Twin | None:
        mode = EmptyOnMeta()
        with built(mode) as (model, quantization):
            options = {"num_ranks": num_ranks, "build": build, "mode": mode, **format_stored(quantization, model)}
            if draft is not None and naming is not None:
                return draft.trace(model, naming, is_beside, **options)
            return trace_as_named(model, namings_of(_plain_config(config)), **options)

    return twin_or_refusal(config.hf_config, trace)


def _plain_config(config: Any) -> Any:
    """The Hugging Face config before SGLang adapted it to its own models."""
    overrides = config.model_override_args or {}
    options = {"revision": config.revision, "trust_remote_code": False}
    return plain_config(config.model_path, config.hf_config, overrides, **options)


@contextmanager
def _built(config: Any, load_config: Any, mode: EmptyOnMeta) -> Iterator[tuple[nn.Module, Any]]:
    """Build the model on the meta device, but for what `mode` says, without processing after loading.

    Yields it with its quantization config.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader import loader

    config = copy.deepcopy(config)
    known, dtype = dict(factory._ROPE_DICT), torch.get_default_dtype()
    may_downcast = os.environ.get(_MAY_DOWNCAST)
    factory._ROPE_DICT.clear()
    try:
        os.environ[_MAY_DOWNCAST] = "true"
        torch.set_default_dtype(config.dtype)
        quantization = loader._get_quantization_config(config, load_config)
        with mode:
            model = loader._initialize_model(config, load_config, quantization)
        for module in model.modules():
            if hasattr(module, "post_load_weights"):  # absorbs latent projections, which needs values
                module.post_load_weights = lambda *_, **__: None
        yield model, quantization
    finally:
        os.environ.pop(_MAY_DOWNCAST, None)
        if may_downcast is not None:
            os.environ[_MAY_DOWNCAST] = may_downcast
        torch.set_default_dtype(dtype)
        factory._ROPE_DICT.clear()
        factory._ROPE_DICT.update(known)
