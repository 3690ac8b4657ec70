"""Engines and ranks that Ray places. Ray starts their processes, which import vLLM by themselves."""

import os
from pathlib import Path

from engines import make_policy
from ray_platform import ACCELERATOR
from servers import EXAMPLES, FAMILY, run_script
from subject import NOISE, booted_as

from fp8refit import Broadcaster
from tests.engines.attempts import bad_policy
from tests.tiny_models import save_model

TIMEOUT_S = 500
"""Three actors and two engines import vLLM: 80 to 215 s on two cores, longer if others use these too."""


def run_ray(work: str) -> dict:
    """The example of a trainer and engines in actors."""
    folder = Path(work) / "bf16"
    save_model(FAMILY, 2, folder)
    os.environ |= {
        "FP8REFIT_TEST_KERNEL": "fp32",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    return run_script(EXAMPLES / "ray_trainer.py", folder, timeout_s=TIMEOUT_S)


def run_ray_executor(work: str) -> dict:
    """vLLM's own executor: the ranks of one engine are actors. Policy 1, NaN, policy 2 by a broadcast, 1 and 2 by refits."""
    import ray
    from vllm.platforms.cpu import CpuPlatform

    family = "qwen2_wide"  # of `layout_runs.CASES["tensor parallel"]`, whose fresh engine is compared with
    folder = Path(work) / "bf16"
    save_model(family, 1, folder)
    os.environ |= {"FP8REFIT_TEST_RAY": ACCELERATOR, "FP8REFIT_TEST_KERNEL": "ue8m0", "RAY_USAGE_STATS_ENABLED": "0"}
    CpuPlatform.ray_device_key = ACCELERATOR  # of this process, which took its platform when it imported vLLM
    ray.init(num_cpus=2, resources={ACCELERATOR: 2}, include_dashboard=False)
    with booted_as("Ray executor", folder, "ue8m0", **NOISE) as subject:
        broadcaster = Broadcaster([subject.llm])
        subject.refit(make_policy(family, 1))
        found: dict = {"old": subject.state(), "nan": subject.refused(subject.refit, bad_policy(family))}
        found["dirty"] = {"generate": subject.refused(subject.generate)}
        report = broadcaster.push(make_policy(family, 2))
        found["broadcast"] = subject.state() | {"ranks": [rank.rank for rank in report.ranks]}
        broadcaster.close()
        subject.refit(make_policy(family, 1))
        found["again"] = subject.state()
        subject.refit(make_policy(family, 2))
        found["new"] = subject.state()
    ray.shutdown()
    return found
