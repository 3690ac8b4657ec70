"""The transformers adapter: makes any Hugging Face causal LM a block-FP8 engine, and refits it in place.

Nothing is imported before it is asked for: other adapters use a module of this one where transformers may not be installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8refit_transformers.convert import to_block_fp8
    from fp8refit_transformers.engine import TransformersEngine
    from fp8refit_transformers.linear import BlockFp8Linear

__all__ = ["BlockFp8Linear", "TransformersEngine", "to_block_fp8"]

_MODULES = {"BlockFp8Linear": "linear", "TransformersEngine": "engine", "to_block_fp8": "convert"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
