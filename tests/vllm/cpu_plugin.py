"""What vLLM's plugin mechanism loads in every process of a test's engine: the CPU kernel, and a way to look at a worker.

`conftest.py` makes the entry point. `FP8REFIT_TEST_KERNEL` names the kernel; without it nothing is registered.
`FP8REFIT_TEST_START_METHOD` says how an engine's processes begin: as forks, as on a GPU, unless it is `spawn`.
With `FP8REFIT_TEST_TRANSFER` vLLM's weight transfer needs no GPU.
"""

import os
import time


def register() -> None:
    kind = os.environ.get("FP8REFIT_TEST_KERNEL")
    if kind is None:
        return
    import cpu_eplb
    import cpu_kernel
    import torch
    from faults import raise_in_worker
    from observer import observe
    from vllm.config import CompilationMode
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.worker_base import WorkerBase

    if "FP8REFIT_TEST_TRANSFER" in os.environ:
        import cpu_transfer

        cpu_transfer.install()
    torch.compiler.set_stance("force_eager")  # as `run_engine.py` says
    cpu_kernel.register(kind)
    cpu_eplb.install()
    WorkerBase.observe = observe
    WorkerBase.raise_in_worker = raise_in_worker
    shm_broadcast.sched_yield = lambda: time.sleep(5e-4)  # who waits for a message leaves the core to who makes it
    check_and_update_config = CpuPlatform.check_and_update_config

    def check_and_choose_start_method(config) -> None:
        check_and_update_config(config)  # which always chooses `spawn`; importing vLLM takes longer than a tiny boot
        config.compilation_config.mode = CompilationMode.NONE  # for examples, which say nothing of it
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = os.environ.get("FP8REFIT_TEST_START_METHOD", "fork")

    CpuPlatform.check_and_update_config = staticmethod(check_and_choose_start_method)
