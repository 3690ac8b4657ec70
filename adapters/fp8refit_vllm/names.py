"""What a checkpoint calls the tensors of a live vLLM model: the model's own mapping of names, turned around.

Models whose modules are called otherwise than their checkpoint's say so in a `hf_to_vllm_mapper`: wrappers of multimodal models
load `model.language_model.layers` into `language_model.model.layers`. Its rules lead one way. What is found by turning them
around counts only if the mapper itself leads from it to the live name; several names may, of older and of newer checkpoints.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn


class VllmNames:
    """A `fp8refit.layers.naming.Rename`. Fused modules are not its business.

    Args:
        model: The live model, mapped as a whole and, by models within it, in part.
    """

    def __init__(self, model: nn.Module) -> None:
        mappers = {prefix: getattr(module, "hf_to_vllm_mapper", None) for prefix, module in model.named_modules()}
        found = {
            prefix: replace(mapper, orig_to_new_stacked={}) for prefix, mapper in mappers.items() if mapper is not None
        }
        # The outer one of two that are the same is the inner one's, shown by its wrapper too.
        self._mappers = {
            prefix: mapper
            for prefix, mapper in found.items()
            if not any(inner != prefix and inner.startswith(prefix) and found[inner] == mapper for inner in found)
        }

    def __call__(self, name: str) -> tuple[str, ...]:
        """See `fp8refit.layers.naming.Rename`."""
        names = [name]
        for prefix in sorted(self._mappers, key=len, reverse=True):
            start = f"{prefix}." if prefix else ""
            if name.startswith(start):
                names = [
                    start + origin
                    for mapped in names
                    for origin in _origins(self._mappers[prefix], mapped.removeprefix(start))
                ]
        return tuple(dict.fromkeys(names))


def _origins(mapper: Any, name: str) -> Iterator[str]:
    """The names that `mapper` maps to `name`."""
    names = [name]
    for turned_around in (_before_suffix, _before_prefix, _before_substr, _before_regex):
        names = [origin for mapped in names for origin in turned_around(mapper, mapped)]
    for origin in dict.fromkeys(names):
        if mapper._map_name(origin) == name:
            yield origin


def _before_suffix(mapper: Any, name: str) -> Iterator[str]:
    for old, new in mapper.orig_to_new_suffix.items():
        if new is not None and name.endswith(new):
            yield name.removesuffix(new) + old
    yield name


def _before_prefix(mapper: Any, name: str) -> Iterator[str]:
    for old, new in mapper.orig_to_new_prefix.items():
        if new is not None and name.startswith(new):
            yield old + name.removeprefix(new)
    yield name


def _before_substr(mapper: Any, name: str) -> Iterator[str]:
    for old, new in mapper.orig_to_new_substr.items():
        if new and new in name:
            yield name.replace(new, old, 1)
    yield name


def _before_regex(mapper: Any, name: str) -> Iterator[str]:
    r"""Of rules that put one text in the place of another before the rest: `^transformer\.(.+)` to `model.\1`."""
    yield name
    for pattern, template in mapper.orig_to_new_regex.items():
        old, new = _text_before_groups(pattern.pattern, "("), _text_before_groups(template or "", r"\1")
        if old is not None and new is not None and name.startswith(new):
            yield old + name.removeprefix(new)


def _text_before_groups(expression: str, first: str) -> str | None:
    """The plain text that `expression` begins with, if nothing but groups follows."""
    text, mark, _ = re.sub(r"^(\^|\\A)", "", expression).replace("\\.", "\0").partition(first)
    return text.replace("\0", ".") if mark and not set(text) & set("[]|?*+$\\") else None
