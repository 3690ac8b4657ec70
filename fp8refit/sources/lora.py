"""The matrices of a LoRA adapter, from PEFT's names and values to those that an engine holds."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8refit.config import LORA
from fp8refit.errors import InvalidOptionError, InvalidSourceError, UnsupportedEngineError
from fp8refit.live.layout import EngineLayout
from fp8refit.live.slots import LoraAdapter
from fp8refit.sources.renamed import Names
from fp8refit.sources.source import MappingSource, Source

_OF_MODEL = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
"""Ends the name of a matrix in a model's state dict, where its adapter is in it."""
_B = ".lora_B.weight"


def names_of_adapter(name: str, names: Names | None) -> Names:
    """The engine's names for the matrices of an adapter.

    Args:
        name: The adapter's.
        names: The engine's names of modules for the trainer's; None if they are the same.
    """

    def renamed(sent: str) -> str:
        here = _OF_MODEL.sub(r".\1.weight", sent if names is None else names[sent])
        return f"{LORA}{name}.{here}"

    return Names(renamed)


def adapter_named(name: str, layout: EngineLayout) -> LoraAdapter:
    """The adapter with this name.

    Raises:
        UnsupportedEngineError: There is none, or it, or the engine, cannot be refitted.
    """
    if layout.refusals:
        raise UnsupportedEngineError("this engine cannot be refitted, and nothing was written:", layout.refusals)
    adapter = layout.adapters.get(name)
    if adapter is None:
        loaded = f"it has {', '.join(sorted(layout.adapters))}" if layout.adapters else "it has none"
        raise UnsupportedEngineError(
            f"this engine has loaded no adapter {name!r} since fp8refit watches it ({loaded}). Load it first, or anew: send a "
            "request with it, or add_lora, after remove_lora if it is there (SGLang: load_lora_adapter, unload_lora_adapter)"
        )
    if adapter.refusal:
        raise UnsupportedEngineError(f"adapter {name!r} {adapter.refusal}")
    if not adapter.shapes:
        raise UnsupportedEngineError(f"adapter {name!r} has no matrix of a module of this engine; load one that has")
    return adapter


def matrices_of(
    source: Source, *, name: str, adapter: LoraAdapter, lora_config: Any, is_ignored: Callable[[str], bool]
) -> MappingSource:
    """What an engine holds of an adapter's matrices: each `lora_B` multiplied, in the engine's dtype.

    Args:
        source: The matrices, under `names_of_adapter`.
        name: The adapter's name.
        adapter: What the engine has loaded.
        lora_config: See `fp8refit.Refitter.refit_adapter`.
        is_ignored: Whether the trainer may send a name although the adapter has no such matrix.

    Raises:
        InvalidOptionError: `lora_config` does not say by what.
        InvalidSourceError: Matrices are missing, unknown, or of another shape; lists every one.
    """
    prefix, dtype = f"{LORA}{name}.", getattr(torch, adapter.dtype)
    found: dict[str, Any] = {}
    problems: list[str] = []
    for sent, value in _pairs(source):
        key = sent.removeprefix(prefix)
        shape = adapter.shapes.get(key)
        if shape is None:
            if not is_ignored(key):
                problems.append(
                    f"{sent}: the engine's adapter has no such matrix; leave it out, or load one that has it"
                )
            continue
        if isinstance(value, Tensor) and tuple(value.shape) != shape:
            problems.append(
                f"{sent}: has shape {list(value.shape)}, the engine's adapter has {list(shape)}, whose rank stays; load an "
                "adapter of this shape instead"
            )
        scale = 1.0
        if key.endswith(_B):
            scale = adapter.scales[key]
            if lora_config is not None:
                scale = _scale_in(lora_config, key.removesuffix(_B), shape[1]) / adapter.factor
        if scale != 1 and isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().to(dtype).mul(scale)  # rounded twice, as an engine does
        found[sent] = value
    problems += [
        f"{prefix}{key}: missing; send every matrix of the adapter"
        for key in adapter.shapes
        if prefix + key not in found
    ]
    if problems:
        raise InvalidSourceError(problems)
    return MappingSource(found)


def _pairs(source: Source) -> Iterator[tuple[str, Any]]:
    """Names and values. Those of a stream may be overwritten when the next one is requested."""
    if isinstance(source, MappingSource):
        return iter(zip(source.sent_names, source.sent, strict=True))
    return ((name, tensor.detach().clone()) for name, tensor in source)


def _scale_in(lora_config: Any, module: str, rank: int) -> float:
    """By what PEFT multiplies the product of a module's matrices.

    Raises:
        InvalidOptionError: The config does not say.
    """
    said = lora_config if isinstance(lora_config, Mapping) else getattr(lora_config, "__dict__", {})
    patterns = said.get("alpha_pattern") or {}
    own = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    alpha = next(own, said.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise InvalidOptionError(
            f"lora_config ({type(lora_config).__name__}) has no number `lora_alpha`: pass one adapter's LoraConfig, such as "
            "model.peft_config[name], or what adapter_config.json holds"
        )
    return float(alpha / (math.sqrt(rank) if said.get("use_rslora") else rank))
