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
    """The names that `mapper` maps to `name`, those that more of its rules have changed first."""
    names = [name]
    for rules, turned_around in (
        (mapper.orig_to_new_suffix, _before_suffix),
        (mapper.orig_to_new_prefix, _before_prefix),
        (mapper.orig_to_new_substr, _before_substr),
        (mapper.orig_to_new_regex, _before_regex),
    ):
        for old, new in reversed(rules.items()):
            if new is not None:
                origins = [origin for mapped in names if (origin := turned_around(old, new, mapped)) is not None]
                names = names + origins if turned_around is _before_regex else origins + names
    for origin in dict.fromkeys(names):
        if mapper._map_name(origin) == name:
            yield origin


def _before_suffix(old: str, new: str, name: str) -> str | None:
    return name.removesuffix(new) + old if name.endswith(new) else None


def _before_prefix(old: str, new: str, name: str) -> str | None:
    return old + name.removeprefix(new) if name.startswith(new) else None


def _before_substr(old: str, new: str, name: str) -> str | None:
    return name.replace(new, old, 1) if new and new in name else None


def _before_regex(old: re.Pattern[str], new: str, name: str) -> str | None:
    r"""Of rules that put one text in the place of another before the rest: `^transformer\.(.+)` to `model.\1`."""
    text, mapped = _text_before_groups(old.pattern, "("), _text_before_groups(new, r"\1")
    return None if text is None or mapped is None else _before_prefix(text, mapped, name)


def _text_before_groups(expression: str, first: str) -> str | None:
    """The plain text that `expression` begins with, if nothing but groups follows."""
    text, mark, _ = re.sub(r"^(\^|\\A)", "", expression).replace("\\.", "\0").partition(first)
    return text.replace("\0", ".") if mark and not set(text) & set("[]|?*+$\\") else None
