"""What scripts that boot vLLM set before they import it, in their process and in those that it starts."""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def set_up(**own: str) -> None:
    """Set variables, those of a script instead of the ones that all have, and find the tests' models."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        **own,
    }
    sys.path.append(str(HERE.parent))


def cpu_options() -> dict[str, Any]:
    """What a vLLM engine of a tiny shape is booted with on a CPU, with the tests' own kernel, to try a script.

    Nothing on a GPU. An engine in a process of its own finds the kernel by a plugin, as in `tests/vllm/conftest.py`.
    """
    import torch

    if torch.cuda.is_available():
        return {}
    sys.path.append(str(HERE.parent / "vllm"))
    import cpu_kernel

    torch.compiler.set_stance("force_eager")
    cpu_kernel.register("fp32")
    return {"dtype": "bfloat16", "max_model_len": 512, "num_gpu_blocks_override": 64, "gpu_memory_utilization": 0.1}
