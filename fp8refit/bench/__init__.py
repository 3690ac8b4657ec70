"""The refit benchmark: where the time of a refit goes, compared in one run with an engine's own methods.

`fp8refit bench` runs it; scripts call `run_refit_bench`, `run_kernel_bench` and `run_rollout_bench`. Models are built
from configs, and weights from a seed: nothing is downloaded.
"""

from fp8refit.bench.kernel import KernelBenchConfig, KernelBenchResult, KernelTiming, run_kernel_bench
from fp8refit.bench.refit import RefitBenchConfig, RefitBenchResult, StrategyResult, run_refit_bench
from fp8refit.bench.rollout import run_rollout_bench
from fp8refit.bench.rollout_engine import Precision
from fp8refit.bench.rollout_result import RolloutBenchConfig, RolloutBenchResult, RolloutTiming
from fp8refit.bench.shapes import SHAPES, write_config

__all__ = [
    "SHAPES",
    "KernelBenchConfig",
    "KernelBenchResult",
    "KernelTiming",
    "Precision",
    "RefitBenchConfig",
    "RefitBenchResult",
    "RolloutBenchConfig",
    "RolloutBenchResult",
    "RolloutTiming",
    "StrategyResult",
    "run_kernel_bench",
    "run_refit_bench",
    "run_rollout_bench",
    "write_config",
]
