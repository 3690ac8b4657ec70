"""Stands for SGLang's kernel package, which has no build for a CPU without AMX: it imports, and nothing in it can be called.

Every module and every name under `sgl_kernel` is there; whatever is called raises, so that no test can pass on a kernel that
never ran.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "0.0.0"
OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Those that SGLang looks up when it is imported; declared, without any code behind them."""


class AbsentKernel:
    """A name in the package: it has more names, and raises when it is called."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self.__name__}.{name}")

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self.__name__} is a stub of tests/sglang; nothing here has SGLang's kernels")


class AbsentModule(types.ModuleType):
    """A module of the package."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentKernel(f"{self.__name__}.{name}")


class FindAbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module under the package."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return AbsentKernel(f"{__name__}.{name}")


sys.meta_path.insert(0, FindAbsentModules())
library = torch.library.Library("sgl_kernel", "FRAGMENT")  # they live as long as it does
for operator in OPERATORS:
    library.define(f"{operator}(Tensor x) -> Tensor")
