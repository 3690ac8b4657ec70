"""Servers on some GPUs that answer without end, a trainer on another; `test_servers.py` judges. The result is a JSON file.

    python run_servers.py --engine vllm --shape S [--tp N] [--replicas R] --work DIR --out FILE

With `--kills N` one server is attacked until N trainers were killed as they wrote (`tests/oracle`). `--shape tiny --pushes 6`
tries it without a GPU, where vLLM runs on a CPU.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_PLUGINS", "fp8refit")
os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",  # as SGLang has it in its processes
}

sys.path.append(str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # before others that have a package called tests

if __name__ == "__main__":
    from server_modes import main

    main()
