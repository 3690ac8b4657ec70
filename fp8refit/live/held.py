"""Finds every tensor that the modules of a model and their helpers hold, wherever they keep it.

Engines keep tensors in plain attributes, containers, kernel objects, closures, default arguments, and caches of functions and
classes. Not looked at: variables of Python modules, memory that only C++ knows, and what torch.compile keeps: its code takes
weights as arguments, and its CUDA graphs write what they put out anew.
"""

import gc
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from itertools import chain
from logging import Logger
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from fp8refit.live.names import without_numbers

_PLAIN = frozenset((bool, bytes, complex, float, int, str, type(None), torch.device, torch.dtype, torch.Size))
_OPAQUE = (BuiltinFunctionType, CodeType, Enum, Logger, ModuleType, ReferenceType)
_TENSORS = (Tensor, np.ndarray)
_FIXED = (FunctionType, MethodType, frozenset, partial, property, tuple)
_FOREIGN = frozenset(
    "abc builtins collections dataclasses enum functools numpy pydantic torch transformers typing".split()  # noqa: SIM905
)
"""Packages whose classes keep no tensors of a model."""
_OURS = "_fp8refit"
_APART = object()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """A tensor, and where it was found first."""

    module: str
    """Name of the module that leads to it."""
    path: str
    """The way from there, such as `impl.sinks`."""
    tensor: Tensor
    """For an array of numpy, a tensor in the same memory."""

    @property
    def name(self) -> str:
        """The whole way."""
        return f"{self.module}.{self.path}" if self.module else self.path


class _Watched:
    """Objects on the way to tensors, what they hold, and whether that is as it was when it was last noted."""

    def __init__(self) -> None:
        self.dicts: list[dict[object, object]] = []
        self.others: list[object] = []
        self.tensors: list[ReferenceType[object]] = []
        self._empty: list[object] = []
        """Most of the dicts: modules have one for each kind of hook."""
        self._known: list[object] = []
        """All that these hold. It stays alive, so that nothing else can get its identity, but for what may be large: tensors
        and what is left out."""
        self._identities = b""

    def note(self, kept: Collection[int]) -> None:
        """Note what they hold now.

        Args:
            kept: Identities of what is left out.
        """
        self._empty = [each for each in self.dicts if not each]
        self.dicts = [each for each in self.dicts if each]
        self._identities = self._look()
        self._known = [_APART if isinstance(part, _TENSORS) or id(part) in kept else part for part in self._parts()]

    def has_changed(self) -> bool:
        """Whether one holds something else."""
        if any(self._empty) or any(each() is None for each in self.tensors):
            return True
        identities = self._look()
        if identities == self._identities:
            return False
        if len(identities) != len(self._identities):
            return True
        parts = list(self._parts())
        now, then = (np.frombuffer(each, np.intp) for each in (identities, self._identities))
        for place in np.flatnonzero(now != then).tolist():
            if not {type(parts[place]), type(self._known[place])} <= _PLAIN:
                return True
            self._known[place] = parts[place]  # only a number or a word is another
        self._identities = identities
        return False

    def _look(self) -> bytes:
        """The addresses of all parts, which is what numpy keeps of objects."""
        return np.fromiter(self._parts(), object).tobytes()

    def _parts(self) -> Iterator[object]:
        # The collector would list what dictionaries hold in less time, but from Python 3.13 on nothing of an object's own.
        return chain(chain.from_iterable(map(dict.values, self.dicts)), gc.get_referents(*self.others))


class Holdings:
    """What a model holds, its parameters and buffers too. It is searched again only if something on a way has changed.

    Args:
        model: The model.
        kept: Returns the attributes of a module that are left out, or of a helper of its, such as `impl.sinks`.
        apart: Other models that can be reached from it and are left out.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: Callable[[nn.Module], Collection[str]] = lambda _: (),
        apart: Collection[nn.Module] = (),
    ) -> None:
        self._model, self._kept, self._apart = model, kept, apart
        self._first, self._rest = _Watched(), _Watched()
        """Of the first of all modules that have the same name, numbers apart, and the same class; and of the others."""
        self._firsts: frozenset[str] = frozenset()
        self._is_searched = False

    def have_changed(self, *, at_a_glance: bool = False) -> bool:
        """Whether an object on the way to a tensor holds something else than at the last `search`.

        Takes 2 to 8 ms for 36 layers, most of it for memory that is in no cache.

        Args:
            at_a_glance: Look at one of several layers that are alike.
        """
        watched = (self._first,) if at_a_glance else (self._first, self._rest)
        return not self._is_searched or any(each.has_changed() for each in watched)

    def search(self) -> list[Held]:
        """Return the tensors of all modules, each once."""
        self._first, self._rest = _Watched(), _Watched()
        found: list[Held] = []
        modules = dict(self._model.named_modules())
        firsts = {(without_numbers(name), type(module)): name for name, module in reversed(modules.items())}
        self._firsts = frozenset(firsts.values())
        own = {name: vars(module) | module._parameters | module._buffers for name, module in modules.items()}
        kept = {
            id(each): each
            for name, module in modules.items()
            for key in self._kept(module)
            if (each := _at(own[name], key)) is not None
        }
        others = (module for other in self._apart for module in other.modules())
        seen: dict[int, object] = {**kept, **{id(module): module for module in (*modules.values(), *others)}}
        classes: dict[type, str] = {}
        for owned in ("_buffers", "_parameters", "__dict__"):  # a tensor is named after its buffer, if it is one
            for name, module in modules.items():
                found += self._walk(name, _items(getattr(module, owned)), seen, classes)
        for name, module in modules.items():
            self._watched(name).dicts.append(module.__dict__)
            classes.setdefault(type(module), name)
        while classes:  # they may keep tensors for modules of other models too, which are not looked into
            kind, name = classes.popitem()
            if id(kind) not in seen and kind.__module__.partition(".")[0] not in _FOREIGN:
                found += self._walk(name, [("", kind)], seen, classes, nn.Module)
        for watched in (self._first, self._rest):
            watched.note(kept.keys())
        self._is_searched = True
        return found

    def _watched(self, module: str) -> _Watched:
        return self._first if module in self._firsts else self._rest

    def _walk(
        self,
        module: str,
        stack: list[tuple[str, object]],
        seen: dict[int, object],
        classes: dict[type, str],
        *closed: type,
    ) -> Iterator[Held]:
        stack.reverse()
        watched = self._watched(module)
        while stack:
            path, value = stack.pop()
            if type(value) in _PLAIN or isinstance(value, _OPAQUE + closed) or id(value) in seen:
                continue
            if _is_ours(value) or _is_compiler(value):
                continue
            if isinstance(value, type) and path:
                classes.setdefault(value, module)
                continue
            seen[id(value)] = value
            if isinstance(value, _TENSORS):
                watched.tensors.append(ref(value))
                tensor = value if isinstance(value, Tensor) else _tensor_of(value)
                yield Held(module=module, path=path.lstrip("."), tensor=tensor)
            elif not isinstance(value, (dict, type, *_FIXED)):
                watched.others.append(value)
            if (held := _dict_of(value)) is not None:
                watched.dicts.append(held)
            stack += [(path + way, part) for way, part in _parts(value)][::-1]


def _is_ours(value: object) -> bool:
    """Whether fp8refit attached it, such as the drop-in's `load_weights`. Modules of a model are looked into all the same."""
    place = value.__globals__.get("__name__") if isinstance(value, FunctionType) else type(value).__module__
    return str(place).partition(".")[0].startswith("fp8refit")


def _is_compiler(value: object) -> bool:
    """Whether it is the part of a compiled function that compiles. The function itself is looked into."""
    return str(type(value).__module__).startswith("torch._dynamo.")


def _tensor_of(array: "np.ndarray[Any, Any]") -> Tensor:
    try:
        return torch.as_tensor(array)
    except TypeError:  # such as text
        return torch.empty(0)


def _dict_of(value: object) -> dict[object, object] | None:
    if isinstance(value, type):  # what is behind the proxy
        held = gc.get_referents(vars(value))[0]
    else:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What an object holds, and how to write the way there."""
    if isinstance(value, FunctionType):  # everything but its module's variables
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f".{name}", cell
        yield from (("", each) for each in (value.__defaults__, value.__kwdefaults__, vars(value)))
    elif isinstance(value, type):
        yield from ((f".{key}", each) for key, each in list(vars(value).items()) if not key.startswith("__"))
        yield from (("", base) for base in value.__bases__)
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in _items(value))
        yield from (("", key) for key in list(value))
    else:
        held = _dict_of(value)
        if isinstance(value, list | tuple):
            yield from ((f"[{index}]", each) for index, each in enumerate(value))
        elif held is not None:
            yield from ((f".{key}", each) for key, each in _items(held))
        yield from (("", each) for each in gc.get_referents(value) if each is not held)


def _at(own: dict[str, Any], path: str) -> object:
    """What a module's attribute is, or that of its attribute; None if there is none."""
    key, *rest = path.split(".")
    return reduce(lambda each, name: getattr(each, name, None), rest, own.get(key))


def _items(held: dict[Any, object]) -> list[tuple[Any, object]]:
    """Without what fp8refit itself attached."""
    return [(key, each) for key, each in list(held.items()) if not (isinstance(key, str) and key.startswith(_OURS))]
