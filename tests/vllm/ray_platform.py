"""A CPU that vLLM's Ray executor takes, which asks for accelerators: each rank gets one of Ray's that no test machine has.

vLLM's plugin mechanism loads it in every process, and takes it where `FP8REFIT_TEST_RAY` names the kind of accelerator.
"""

import os

ACCELERATOR = "NPU"
"""A kind whose devices Ray numbers without looking for them."""


def name() -> str | None:
    """Of the platform that vLLM is to take, if it is another than usual."""
    return "ray_platform.CpuWithRay" if "FP8REFIT_TEST_RAY" in os.environ else None


def __getattr__(wanted: str) -> type:
    if wanted != "CpuWithRay":
        raise AttributeError(wanted)
    from vllm.platforms.cpu import CpuPlatform  # not before vLLM asks for its platform

    return type(wanted, (CpuPlatform,), {"ray_device_key": os.environ["FP8REFIT_TEST_RAY"]})
