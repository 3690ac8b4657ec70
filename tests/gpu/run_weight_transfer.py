"""vLLM's weight-transfer API with fp8refit as its backend; `test_weight_transfer.py` judges. The result is a JSON file.

python run_weight_transfer.py --shape S --work DIR --out FILE
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}

sys.path.append(str(Path(__file__).parents[1]))

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from weight_transfer_modes import main

    main()
