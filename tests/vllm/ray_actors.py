"""The example of a trainer and engines that Ray places. Ray starts their processes, which import vLLM by themselves."""

import os
from pathlib import Path

from servers import EXAMPLES, FAMILY, run_script

from tests.tiny_models import save_model

TIMEOUT_S = 150


def run_ray(work: str) -> dict:
    folder = Path(work) / "bf16"
    save_model(FAMILY, 2, folder)
    os.environ |= {
        "FP8REFIT_TEST_KERNEL": "fp32",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    return run_script(EXAMPLES / "ray_trainer.py", folder, timeout_s=TIMEOUT_S)
