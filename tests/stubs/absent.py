"""Packages that are not there, of which engines only import names: every module and every name in them is found.

Nothing here does anything. A name decorates a function by leaving it as it is, and can be a base class, an annotation or an
argument of another name; it has no values.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class AbsentName:
    """A name in the package."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self.__name__}.{name}")

    def __call__(self, *arguments, **options):
        is_decorator = len(arguments) == 1 and not options and isinstance(arguments[0], types.FunctionType)
        return arguments[0] if is_decorator else self

    def __getitem__(self, key):
        return self

    def __mro_entries__(self, bases):
        return ()

    def __or__(self, other):
        return self

    __ror__ = __or__


class AbsentModule(types.ModuleType):
    """A module of the package, with names of a kind."""

    __path__ = ()

    def __init__(self, name, kind):
        super().__init__(name)
        self.__kind = kind

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__kind(f"{self.__name__}.{name}")


class FindAbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module under these packages, if nobody else does."""

    def __init__(self, packages, kind):
        self._packages, self._kind = packages, kind

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return AbsentModule(spec.name, self._kind)

    def exec_module(self, module):
        pass


def stand_for(*packages, kind=AbsentName):
    """Give what a stub's `__getattr__` is, and find every module under `packages`: the stub, and others beside it."""
    sys.meta_path.append(FindAbsentModules(packages, kind))
    return AbsentModule(packages[0], kind).__getattr__
