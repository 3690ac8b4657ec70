"""Refuses requests to a model, whichever of its modules they enter, and finds those that are under way.

A hook would not do: compiled code does not look at hooks that come later. It does look at the class of every module that it
runs, so a refused module has another class for as long as it is refused, and an admitted one carries nothing.
"""

import copyreg
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, new_class
from typing import Any

import torch
from torch import nn

from fp8refit.errors import EngineDirtyError

_REFUSAL = "_fp8refit_refusal"
_CALLS = frozenset({"_call_impl", "_wrapped_call_impl", "generate", "generate_batch"})
"""Functions of `torch.nn.Module` and transformers that stand on the stack of a thread while a model works for it."""
_BATCHING_LOOP = "_run_generation_loop"
"""The thread of transformers' continuous batching."""


@dataclass(slots=True)
class _Refusal:
    """Why the modules of one model are refused."""

    reason: str
    exempt: int | None = None
    """The thread that measures the model meanwhile."""


class _Refused:
    """What a module's class begins with while the module is refused."""

    @torch.compiler.disable(reason="the model refuses requests until a refit succeeds")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the class that this is mixed into

    @torch.compiler.disable(reason="the model refuses requests until a refit succeeds")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class that this is mixed into

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is refused too, also in a process that has not made the class yet."""
        make, arguments, *state = super().__reduce_ex__(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _make_refused, (_own_class(type(self)),), *state
        return make, arguments, *state


def refuse(model: nn.Module, reason: str) -> None:
    """Let every module of `model` raise `EngineDirtyError`, in compiled code too. May be repeated: the last reason is told."""
    refusal = _Refusal(reason)
    for module in model.modules():
        vars(module)[_REFUSAL] = refusal
        if not issubclass(type(module), _Refused):
            # Not as an attribute: the wrapper of a compiled module would give it to the module inside.
            object.__setattr__(module, "__class__", _refused_class(type(module)))


def admit(model: nn.Module) -> None:
    """End what `refuse` began. The model itself is the last module that is admitted."""
    for module in reversed(list(model.modules())):
        if issubclass(type(module), _Refused):
            object.__setattr__(module, "__class__", _own_class(type(module)))
        vars(module).pop(_REFUSAL, None)


def refusal_of(model: nn.Module) -> str | None:
    """Why `model`, or a module of it, is refused; None if none is."""
    for module in model.modules():
        if issubclass(type(module), _Refused):
            return _reason(module)
    return None


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that `module` has while it is not refused."""
    kind = type(module)
    return _own_class(kind) if issubclass(kind, _Refused) else kind


@contextmanager
def exempt(model: nn.Module) -> Iterator[None]:
    """Let this thread run `model` although it is refused."""
    refusal: _Refusal | None = vars(model).get(_REFUSAL)
    if refusal is None:
        yield
        return
    refusal.exempt = threading.get_ident()
    try:
        yield
    finally:
        refusal.exempt = None


def find_call(model: nn.Module) -> str | None:
    """What some thread, this one too, runs on `model` now, read off the threads' stacks; None if nothing.

    A function that was compiled as a whole and only mentions the model is not seen: nothing on its stack is the model's.
    """
    inside = set(map(id, model.modules()))
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None:
            name = frame.f_code.co_name
            owner = frame.f_locals.get("self") if name in _CALLS or name == _BATCHING_LOOP else None
            if id(owner) in inside or (name == _BATCHING_LOOP and getattr(owner, "model", None) is model):
                names = {one.ident: one.name for one in threading.enumerate()}
                call = "a forward" if name.endswith("_call_impl") else name.strip("_")
                return f"{call} in thread {names.get(thread, str(thread))}"
            frame = frame.f_back
    return None


def _check(module: object) -> None:
    refusal: _Refusal | None = vars(module).get(_REFUSAL)
    if refusal is None or refusal.exempt != threading.get_ident():
        raise EngineDirtyError(f"this model refuses requests: {_reason(module)}")


def _reason(module: object) -> str:
    refusal: _Refusal | None = vars(module).get(_REFUSAL)
    return refusal.reason if refusal is not None else "it is a part of a model that does"


@functools.cache
def _refused_class(kind: type) -> type:
    """`kind`, refused. One class for each, so that compiled code is compiled once for it."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")})

    return new_class(kind.__name__, (_Refused, kind), {"metaclass": type(kind)}, fill)


def _own_class(kind: type) -> type:
    own: type = kind.__bases__[1]
    return own


def _make_refused(kind: type) -> Any:
    return object.__new__(_refused_class(kind))
