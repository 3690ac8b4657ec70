"""What scripts that boot vLLM set before they import it, in their process and in those that it starts."""

import os
import sys
from pathlib import Path

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
