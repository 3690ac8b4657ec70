"""Refuses calls to any module of a model, and finds calls in progress.

A hook would not work, because compiled code ignores hooks that are added later. But it checks the class of every module
it runs, so a refused module gets another class until it is admitted again.
"""

import copyreg
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, new_class
from typing import Any, cast

import torch
from torch import nn

from fp8refit.errors import EngineDirtyError

_REFUSAL = "_fp8refit_refusal"
_CALLS = frozenset({"_call_impl", "_wrapped_call_impl", "generate", "generate_batch"})
"""Functions of `torch.nn.Module` and transformers that are on a thread's stack while it runs a model."""
_BATCHING_LOOP = "_run_generation_loop"
"""The function that runs in the thread of transformers' continuous batching."""


@dataclass(slots=True)
class _Refusal:
    """Why the modules of one model are refused."""

    reason: str
    exempt: int | None = None
    """The thread that may still run the model, to calibrate it."""


class _Refused:
    """Mixed in before a module's own class while the module is refused."""

    @torch.compiler.disable(reason="the model refuses requests until a refit succeeds")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the class that this is mixed into

    @torch.compiler.disable(reason="the model refuses requests until a refit succeeds")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the class that this is mixed into

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are refused too, even in a process that has not created the class yet."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            return _make_refused, (_own_class(type(self)),), *state
        return make, arguments, *state


def refuse(model: nn.Module, reason: str) -> None:
    """Make every module of `model` raise `EngineDirtyError`, also in compiled code. May be repeated to change the
    reason.
    """
    refusal = _Refusal(reason)
    for module in model.modules():
        vars(module)[_REFUSAL] = refusal
        if not issubclass(type(module), _Refused):
            # Plain assignment would set it on the module inside a compiled module's wrapper.
            object.__setattr__(module, "__class__", _refused_class(cast(Any, type(module))))


def admit(model: nn.Module) -> None:
    """Undo `refuse`. The model itself is admitted last."""
    for module in reversed(list(model.modules())):
        if issubclass(type(module), _Refused):
            object.__setattr__(module, "__class__", _own_class(type(module)))
        vars(module).pop(_REFUSAL, None)


def refusal_of(model: nn.Module) -> str | None:
    """Why `model` or one of its modules is refused; None if none is."""
    for module in model.modules():
        if issubclass(type(module), _Refused):
            return _reason(module)
    return None


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` when it is not refused."""
    kind = type(module)
    return _own_class(kind) if issubclass(kind, _Refused) else kind


@contextmanager
def exempt(model: nn.Module) -> Iterator[None]:
    """Let this thread run `model` while it is refused."""
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
    """Name a call of `model` that some thread (including this one) is in, found on the threads' stacks; None if there
    is none.

    A user's function that was compiled as a whole, with the model inside, is not found: its stack has no frame of the
    model.
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
    return refusal.reason if refusal is not None else "it is part of a model that does"


@functools.cache
def _refused_class(kind: type) -> type:
    """The refused class for `kind`: always the same one, so that code is compiled only once for it."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update({name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")})

    return new_class(kind.__name__, (_Refused, kind), {"metaclass": type(kind)}, fill)


def _own_class(kind: type) -> type:
    own: type = kind.__bases__[1]
    return own


def _make_refused(kind: type) -> Any:
    return object.__new__(_refused_class(kind))
