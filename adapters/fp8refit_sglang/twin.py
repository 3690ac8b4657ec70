"""Builds this rank's SGLang model again on the meta device, to trace its loader. Leaves SGLang's own state unchanged."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fp8refit_transformers.naming import namings_of, plain_config, twin_or_refusal
from torch import nn

from fp8refit.live.slots import Refusal
from fp8refit.tracing.twin import EmptyOnMeta, Twin, format_stored, trace_as_named

_MAY_DOWNCAST = "SGLANG_QUANT_ALLOW_DOWNCASTING"
"""Without it, some loaders reject BF16 tensors for FP8 weights."""


def twin_of(config: Any, load_config: Any, *, num_ranks: int) -> Twin | Refusal:
    """Trace the loader of this rank's model; a refusal if that is impossible.

    Args:
        config: SGLang's `ModelConfig`.
        load_config: Its `LoadConfig`.
        num_ranks: Number of ranks that share a checkpoint.
    """

    @contextmanager
    def build(mode: EmptyOnMeta) -> Iterator[nn.Module]:
        with _built(config, load_config, mode) as (model, _):
            yield model

    def trace() -> Twin | None:
        overrides = config.model_override_args or {}
        options = {"revision": config.revision, "trust_remote_code": False}
        namings = namings_of(plain_config(config.model_path, config.hf_config, overrides, **options))
        mode = EmptyOnMeta()
        with _built(config, load_config, mode) as (model, quantization):
            options = format_stored(quantization, model)
            return trace_as_named(model, namings, num_ranks=num_ranks, build=build, mode=mode, **options)

    return twin_or_refusal(config.hf_config, trace)


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
