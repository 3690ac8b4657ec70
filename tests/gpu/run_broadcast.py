"""A trainer on one GPU and vLLM engines on others; `test_broadcast.py` judges. The result is a JSON file.

python run_broadcast.py --shape S [--tp N] [--replicas R] --work DIR --out FILE
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}

sys.path.append(str(Path(__file__).parents[1]))

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from broadcast_modes import main

    main()
