"""Stands for SGLang's kernel package, which has no build for a CPU without AMX: it imports, and nothing in it can be called.

Every module and every name under `sgl_kernel` is there; whatever is called raises, so that no test can pass on a kernel that
never ran.
"""

import torch
from absent import AbsentName, stand_for

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


class AbsentKernel(AbsentName):
    """A name in the package: it raises when it is called."""

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self.__name__} is a stub of tests/sglang; nothing here has SGLang's kernels")


__getattr__ = stand_for(__name__, kind=AbsentKernel)
library = torch.library.Library("sgl_kernel", "FRAGMENT")  # they live as long as it does
for operator in OPERATORS:
    library.define(f"{operator}(Tensor x) -> Tensor")
