"""A BF16 engine of the rollout benchmark that loaded its policy, and one that boots from the policy of an FP8 engine."""

from pathlib import Path

import torch
from fp8refit_vllm.rollout import VllmRollout, boot
from safetensors.torch import save_file

from fp8refit import Refitter
from fp8refit.bench import Precision, policies, write_config
from fp8refit.bench.rollout_engine import RolloutBoot

SEED = 3


def run_rollouts(work: str) -> dict:
    """What two BF16 engines hold, in processes of their own."""
    model = Path(work) / "rollouts"
    write_config("tiny", model)
    engine = booted(model)
    found = {"booted": observe(engine)}
    engine.load_bf16(SEED)
    engine.generate([[101, 102, 103]], 2)
    found["loaded"] = observe(engine)
    engine.close()
    engine = booted(model, Precision.FP8)
    policy = policies.stream(policies.manifest(Refitter(engine.candidate).layout()), SEED, torch.device("cpu"))
    save_file(dict(policy), model / "model.safetensors", metadata={"format": "pt"})
    engine.close()
    engine = booted(model, load_format="auto")
    found["fresh"] = observe(engine)
    engine.close()
    return found


def booted(model: Path, precision: Precision = Precision.BF16, **options: str) -> VllmRollout:
    arguments = {"dtype": "bfloat16", "num_gpu_blocks_override": 64, **options}
    return boot(RolloutBoot(model=model, tp=1, precision=precision, max_length=64, max_batch=2, arguments=arguments))


def observe(engine: VllmRollout) -> dict[str, str]:
    (rank,) = engine.candidate.collective_rpc("observe", args=("live_bytes",))
    return rank["found"]
