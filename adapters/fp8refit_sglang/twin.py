"""An SGLang model built once more without memory, as the engine's own loader builds it, and nothing left behind."""

import concurrent.futures
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from fp8refit_transformers.naming import naming_of
from torch import nn

from fp8refit.layers.twin import EmptyOnMeta, Twin, trace_twin
from fp8refit.slots import Refusal


class _Inline(concurrent.futures.Executor):
    """Loads in the thread of the caller, where it is seen."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(function(*arguments, **named))
        return future


def twin_of(runner: Any, num_ranks: int) -> Twin | Refusal:
    config = runner.model_config
    name = ", ".join(config.hf_config.architectures or ())
    try:
        naming = naming_of(_plain_config(config))
        if naming is None:
            return Refusal(module=name, reason="no class", remedy="x")
        with _built(runner) as model, patch("concurrent.futures.ThreadPoolExecutor", _Inline):
            return trace_twin(model, naming, num_ranks=num_ranks)
    except Exception as error:  # noqa: BLE001
        import traceback
        traceback.print_exc()
        return Refusal(module=name, reason=f"{type(error).__name__}: {error}", remedy="x")


def _plain_config(config: Any) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.model_path)
    except (OSError, ValueError):
        return config.hf_config


@contextmanager
def _built(runner: Any) -> Iterator[nn.Module]:
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader import loader

    known, dtype = dict(factory._ROPE_DICT), torch.get_default_dtype()
    factory._ROPE_DICT.clear()
    try:
        torch.set_default_dtype(runner.model_config.dtype)
        config = copy.deepcopy(runner.model_config)
        quantization = loader._get_quantization_config(config, runner.load_config if hasattr(runner, "load_config") else loader.LoadConfig())
        with EmptyOnMeta():
            load_config = runner.load_config if hasattr(runner, "load_config") else loader.LoadConfig()
            model = loader._initialize_model(config, load_config, quantization)
        for hook in ("post_load_weights",):
            if hasattr(model, hook):
                setattr(model, hook, lambda *_, **__: None)
        yield model
    finally:
        torch.set_default_dtype(dtype)
        factory._ROPE_DICT.clear()
        factory._ROPE_DICT.update(known)
