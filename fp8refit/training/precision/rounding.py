"""Makes a trainer's norms and rotary embeddings round as an engine's kernels do: compute in float32, and round once.

The modules of transformers round every product to BF16. An activation that lies between two FP8 codes may then round to a
different one than in the engine, and every layer amplifies the difference.
"""

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

_ROTARY = "apply_rotary_pos_emb"
"""The function with which attention layers of transformers rotate queries and keys."""


def round_once(model: nn.Module) -> None:
    """Change the norms and attention layers of `model` in place: same modules, same parameters."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm"):
            module.__class__ = _norm(kind)
        elif _ROTARY in getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_names", ()):
            module.__class__ = _attention(kind)


@functools.cache
def _norm(kind: Any) -> Any:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = kind.forward(module, x.float())
        return y.to(x.dtype)

    return type(kind.__name__, (kind,), {"__module__": __name__, "forward": forward})


@functools.cache
def _attention(kind: Any) -> Any:
    """Return a subclass of the layer, whose code calls another function by the name of the rotary embedding."""
    return type(kind.__name__, (kind,), {"__module__": __name__, "forward": _rotating_once(kind.forward)})


def _rotating_once(old: Any) -> FunctionType:
    """Return a copy of a forward, inside copies of its decorators, which rename arguments since transformers 5.24."""
    inner = getattr(old, "__wrapped__", None)
    if inner is None:
        # Without `__name__`, by which torch.compile would look the names up in the module itself.
        names = {name: value for name, value in old.__globals__.items() if name != "__name__"}
        names[_ROTARY] = _in_float32(names[_ROTARY])
        cells = old.__closure__
    else:
        names = old.__globals__
        copy = _rotating_once(inner)
        cells = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in old.__closure__)
    forward = FunctionType(old.__code__, names, old.__name__, old.__defaults__, cells)
    forward.__kwdefaults__ = old.__kwdefaults__
    return forward


@functools.cache
def _in_float32(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate_once(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        wide = [arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        rotated_q, rotated_k = rotate(q.float(), k.float(), *wide, **kwargs)
        return rotated_q.to(q.dtype), rotated_k.to(k.dtype)

    return rotate_once
