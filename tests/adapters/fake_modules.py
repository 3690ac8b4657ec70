"""Modules of an engine that hold nothing but what is named."""

import re
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

from fp8refit.live.seams import Seam


def names_in(seams: Iterable[Seam]) -> list[str]:
    """Dotted names of what seams reach for, of alternatives the first."""
    return list(dict.fromkeys(re.match(r"[\w.]+", name)[0] for seam in seams for name in seam.names))


def put_modules(monkeypatch, names: Iterable[str], **members: Any) -> dict[str, ModuleType]:
    """Put modules in the place of an engine's; gives them by name.

    Args:
        monkeypatch: Pytest's.
        names: Dotted names of what they hold: functions, and classes, which begin with a capital, with what these hold.
        **members: Of the package itself.
    """
    modules: dict[str, ModuleType] = {}
    for name in names:
        parts = name.split(".")
        depth = next((place for place, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
        for end in range(1, depth + 1):
            modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        holder: Any = modules[".".join(parts[:depth])]
        for part in parts[depth:-1]:
            if not hasattr(holder, part):
                setattr(holder, part, type(part, (), {}))
            holder = getattr(holder, part)
        if not hasattr(holder, parts[-1]):
            setattr(holder, parts[-1], type(parts[-1], (), {}) if parts[-1][0].isupper() else _method)
    package = next(iter(modules)).partition(".")[0]
    vars(modules[package]).update(members)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    return modules


def contents(modules: dict[str, ModuleType]) -> dict[str, object]:
    """Everything that modules and their classes hold, to be compared."""
    found: dict[str, object] = {}
    for name, module in modules.items():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, type):
                found |= {f"{name}.{key}.{inner}": held for inner, held in vars(value).items() if inner[:2] != "__"}
    return found


def _method(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace()
