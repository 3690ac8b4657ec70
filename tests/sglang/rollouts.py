"""A BF16 engine of the rollout benchmark that loaded its policy, and one that boots from the policy of an FP8 engine."""

from pathlib import Path

import torch
from engines import look
from fp8refit_sglang.rollout import SglangRollout, boot
from safetensors.torch import save_file

from fp8refit import Refitter
from fp8refit.bench import Precision, policies, write_config
from fp8refit.bench.rollout_engine import RolloutBoot

SEED = 3


def run_rollouts(work: Path) -> dict:
    """What two BF16 engines hold."""
    model = work / "rollouts"
    write_config("tiny", model)
    engine = booted(model)
    found = {"booted": look(engine.candidate, "live_bytes")}
    engine.load_bf16(SEED)
    engine.generate([[101, 102, 103]], 2)
    found["loaded"] = look(engine.candidate, "live_bytes")
    engine.close()
    engine = booted(model, Precision.FP8)
    policy = policies.stream(policies.manifest(Refitter(engine.candidate).layout()), SEED, torch.device("cpu"))
    save_file(dict(policy), model / "model.safetensors", metadata={"format": "pt"})
    engine.close()
    engine = booted(model, load_format="auto")
    found["fresh"] = look(engine.candidate, "live_bytes")
    engine.close()
    return found


def booted(model: Path, precision: Precision = Precision.BF16, **options: str) -> SglangRollout:
    return boot(RolloutBoot(model=model, tp=1, precision=precision, max_length=64, max_batch=2, arguments=options))
