"""Builds this rank's vLLM model again on the meta device, to trace its loader. Leaves vLLM's own state unchanged."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fp8refit_transformers.naming import namings_of, plain_config, twin_or_refusal
from torch import nn

from fp8refit.live.slots import Refusal
from fp8refit.tracing.twin import EmptyOnMeta, Twin, format_stored, trace_as_named
from fp8refit_vllm.compat import holds_nvfp4
from fp8refit_vllm.drafts import Draft


def twin_of(
    config: Any, draft: Draft | None = None, is_beside: Callable[[str], bool] = lambda _: False
) -> Twin | Refusal:
    """Trace the loader of this rank's model, or of its draft; a refusal if that is impossible.

    Args:
        config: The worker's `VllmConfig`.
        draft: The draft.
        is_beside: Whether the target's checkpoints hold a name beside the target.
    """
    own, model_config, prefix = config, config.model_config, ""
    if draft is not None:
        own, model_config, prefix = draft.config, draft.model_config, draft.prefix
    naming = None if draft is None or draft.is_plain else draft.naming(is_beside)
    if isinstance(naming, Refusal):
        return naming
    from vllm.config import set_current_vllm_config

    @contextmanager
    def build(mode: EmptyOnMeta) -> Iterator[nn.Module]:
        apart = _apart(own)
        built_of = apart.model_config if model_config is own.model_config else model_config
        # Models of the Transformers backend need it while they are built.
        with set_current_vllm_config(apart), _built(apart, built_of, prefix, mode) as model:
            yield model

    def trace() -> Twin | None:
        mode = EmptyOnMeta()
        with build(mode) as model:
            options = {"num_ranks": config.parallel_config.world_size_across_dp, "build": build, "mode": mode}
            options |= format_stored(own.quant_config, model)
            if draft is not None and naming is not None:
                return draft.trace(model, naming, is_beside, **options)
            return trace_as_named(model, namings_of(_plain_config(model_config)), **options)

    return twin_or_refusal(model_config.hf_config, trace)


def _apart(config: Any) -> Any:
    """A copy of the configuration that compiles nothing, and in which the twin's layers can register themselves.

    Without NVFP4: a BF16 tensor fits a weight of BF16, as it fits one of FP8.
    """
    config = copy.copy(config)
    if holds_nvfp4(config.quant_config):
        config.quant_config, config.model_config = None, copy.copy(config.model_config)
        config.model_config.quantization = None  # of which versions before 0.32 make another one for parts of a model
    config.quant_config = copy.deepcopy(config.quant_config)
    config.compilation_config = compilation = copy.copy(config.compilation_config)
    compilation.mode = type(compilation.mode)(0)  # none
    compilation.static_forward_context = {}
    if hasattr(compilation, "static_all_moe_layers"):
        compilation.static_all_moe_layers = []
    return config


def _plain_config(config: Any) -> Any:
    """The Hugging Face config before vLLM adapted it to its own models."""
    return plain_config(
        config.hf_config_path or config.model,
        config.hf_config,
        config.hf_overrides,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
    )


@contextmanager
def _built(config: Any, model_config: Any, prefix: str, mode: EmptyOnMeta) -> Iterator[nn.Module]:
    """Build the model on the meta device, but for what `mode` says."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    known, dtype = dict(rotary_embedding._ROPE_DICT), torch.get_default_dtype()
    rotary_embedding._ROPE_DICT.clear()
    logger = logging.getLogger("vllm.model_executor.models.utils")
    logger.addFilter(_keep_none)  # it warns about every tensor whose dtype differs from its parameter's
    try:
        torch.set_default_dtype(model_config.dtype)
        with mode:
            model = initialize_model(vllm_config=config, model_config=model_config, prefix=prefix)
            if type(model).__module__.startswith("vllm.model_executor.models.transformers"):
                _register_head_bias(model)
        for parameter in model.parameters():
            loader: Any = getattr(parameter, "weight_loader", None)
            if hasattr(loader, "__wrapped__"):  # online quantization, which wraps the loader
                parameter.weight_loader = inspect.unwrap(loader)
        yield model
    finally:
        logger.removeFilter(_keep_none)
        torch.set_default_dtype(dtype)
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(known)


def _register_head_bias(model: nn.Module) -> None:
    """Register what the Transformers backend registers while it loads a checkpoint that has it."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "_register_bias"):
            module._register_bias()
            module._register_bias = lambda: None


def _keep_none(_: logging.LogRecord) -> bool:
    return False
