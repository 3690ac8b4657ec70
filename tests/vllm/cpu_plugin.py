"""What vLLM's plugin mechanism loads in every process of a test's engine: the CPU kernel, and a way to look at a worker.

`conftest.py` makes the entry point. `FP8REFIT_TEST_KERNEL` names the kernel; without it nothing is registered.
"""

import os


def register() -> None:
    kind = os.environ.get("FP8REFIT_TEST_KERNEL")
    if kind is None:
        return
    import cpu_kernel
    import torch
    from faults import raise_in_worker
    from observer import observe
    from vllm.v1.worker.worker_base import WorkerBase

    torch.compiler.set_stance("force_eager")  # as `run_engine.py` says
    cpu_kernel.register(kind)
    WorkerBase.observe = observe
    WorkerBase.raise_in_worker = raise_in_worker
