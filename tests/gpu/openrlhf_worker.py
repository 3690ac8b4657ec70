"""OpenRLHF's extension of vLLM's worker, and stubs of what it imports and a host may lack; each process needs them first."""

from tests.stubs.absent import stand_for

stand_for("deepspeed", "flash_attn", "pylatexenc", "ray", "torchdata")
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap  # noqa: E402

__all__ = ["WorkerWrap"]
