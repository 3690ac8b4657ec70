"""Import paths that moved. The old ones work until the release that removes them, and warn."""

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

REMOVED_IN = "0.4"
MOVED = {
    "fp8refit.correction": "fp8refit.training.correction",
    "fp8refit.megatron": "fp8refit.training.megatron",
    "fp8refit.peft": "fp8refit.training.peft",
    "fp8refit.precision": "fp8refit.training.precision",
    "fp8refit.live.tracing": "fp8refit.tracing",
    "fp8refit.live.tracing.inventory": "fp8refit.tracing.inventory",
    "fp8refit.live.tracing.proof": "fp8refit.tracing.proof",
    "fp8refit.live.tracing.reading": "fp8refit.tracing.reading",
    "fp8refit.live.tracing.rules": "fp8refit.tracing.rules",
    "fp8refit.live.tracing.twin": "fp8refit.tracing.twin",
    "fp8refit.remote.channel": "fp8refit.remote.protocol.channel",
}
"""What [API](../docs/api.md) calls public and what [Writing an adapter](../docs/adapters.md) names; a package before its
modules."""


class _OldPath(ModuleType):
    """Stands under a module's old name, and imports the module when something is taken from it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # asked by the import system and by whoever looks at all modules
            raise AttributeError(name)
        new = MOVED[self.__name__]
        value = getattr(import_module(new), name)
        message = f"{self.__name__} moved to {new}; the old path goes with fp8refit {REMOVED_IN}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return value


def keep_old_paths() -> None:
    """Make the old paths importable. Nothing is imported yet."""
    for old in MOVED:
        sys.modules[old] = module = _OldPath(old)
        module.__spec__ = ModuleSpec(old, None)
        parent, _, name = old.rpartition(".")
        setattr(sys.modules[parent], name, module)
