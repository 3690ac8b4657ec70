"""One engine, or one model of transformers, whose FP8 KV scales `test_kv.py` compares. The result is a JSON file.

    python run_kv.py MODE --shape S --work DIR --out FILE [--kv auto] [--tp N] [--backend NAME] [--reference FILE]

`MODE` is vllm or sglang (`--kv auto`: a BF16 KV cache, whose result is the reference of the others), vllm-sleep, or
transformers-ue8m0 and transformers-fp32 (an independent pass with unquantized attention).
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
}

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

if __name__ == "__main__":  # processes of engines import this file again, and nothing of what follows
    from kv_modes import main

    main()
