"""One vLLM engine of a model with experts or latent attention; `test_experts.py` compares. The result is a JSON file.

python run_experts.py refit --shape S [--tp N] [--ep] [--eager] --work DIR --out FILE   dummy engine, refitted to policy 1
python run_experts.py fresh --shape S [--tp N] [--ep] [--eager] --work DIR --out FILE   boots from `refit`'s FP8 checkpoint
python run_experts.py speed --shape S --work DIR --out FILE                             our refit beside vLLM's own reload
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if sys.argv[1] == "speed" else "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}

sys.path.append(str(Path(__file__).parents[1]))

if __name__ == "__main__":  # vLLM's processes import this file again, and nothing of what follows
    from experts_modes import main

    main()
