"""The refit latency benchmark: where the time of a refit goes, beside what an engine's own means take, in one run.

`fp8refit bench` runs it; `run_refit_bench`, `run_kernel_bench` and `run_rollout_bench` are the same for scripts. Models are
built from configs, and weights from a seed: nothing is downloaded.
"""

from fp8refit.bench.kernel import KernelBenchConfig, KernelBenchResult, KernelTiming, run_kernel_bench
from fp8refit.bench.refit import RefitBenchConfig, RefitBenchResult, StrategyResult, run_refit_bench
from fp8refit.bench.rollout import (
    Precision,
    RolloutBenchConfig,
    RolloutBenchResult,
    RolloutTiming,
    run_rollout_bench,
)
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
